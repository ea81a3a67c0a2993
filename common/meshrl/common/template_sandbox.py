"""The sandbox of chat templates: Jinja's, in which iterations, calls and what they make are counted and bounded."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    Set,
    Sized,
    ValuesView,
)
from itertools import chain
from typing import Any

from jinja2 import Template, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from typing_extensions import override

MOST = 256 << 20
"""Characters and items that one rendering may make."""
STEP = 256
"""The charge for an iteration or a call: `MOST` pays for a million of them."""
MOST_S = 30.0
"""A rendering takes milliseconds; what is not counted, such as comparisons of long texts, ends with this."""
MOST_WIDTH, MOST_BITS = 1000, 1 << 14
"""Limits of a field's width or an indentation, and of the bits of a whole number."""
WIDTHS = re.compile("batch|center|expandtabs|indent|ljust|rjust|slice|tojson|urlize|wordwrap|zfill")
"""Filters and methods that make something as large as a number says, or repeat a text."""
TEXTS = frozenset(["join", "pprint", "string", "tojson", "urlencode", "xmlattr"])
"""Filters that make a text of all that is in what they get."""
SHALLOW = re.compile(
    "batch|count|d|default|first|items|last|length|list|map|random|reject|rejectattr|reverse"
    "|select|selectattr|slice"
)
"""Filters that look at no more than the first level of what they get."""
UNSAFE = frozenset(["encode", "to_bytes", "translate"])
"""Methods that no template needs, which make what nothing else here bounds."""
CONTAINERS = (list, tuple, Mapping, Set, KeysView, ValuesView, ItemsView, Namespace)
ITEM = 8
"""Characters that each item of a list counts for where all of it is looked at."""
UNBOUND = re.compile(r"\d{5}|\*|\{[^{}]*:[^{}]*\{")
"""In a format: a width of more than four digits, or one that only the values say."""


class _Work(threading.local):
    """The units and the time that the rendering on this thread has left."""

    left, until = MOST, float("inf")

    def begin(self) -> None:
        self.left, self.until = MOST, time.monotonic() + MOST_S

    def add(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise OverflowError(
                f"it makes more than {MOST} characters and items, or {MOST // STEP} iterations and calls"
            )
        if time.monotonic() > self.until:
            raise OverflowError(f"it takes more than {MOST_S:g} s")

    def made(self, value: Any) -> Any:
        """`value`, which a step has made."""
        self.add(STEP + (len(value) if isinstance(value, Sized) else 0))
        return value

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.add(STEP)
            yield item

    def size(self, value: Any, known: dict[int, int] | None = None) -> int:
        """Characters and items of all that is in `value`, as often as it is there.

        A list that has another one twice is large for whatever prints or compares it, not in memory.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, CONTAINERS):
            return ITEM
        known = {} if known is None else known
        if id(value) not in known:
            known[id(value)] = 0
            inside: Any = getattr(value, "_Namespace__attrs", value)
            if isinstance(inside, Mapping):
                inside = inside.items()
            if isinstance(inside, ItemsView):
                inside = chain.from_iterable(inside)
            known[id(value)] = ITEM + sum(self.size(each, known) for each in inside)
        if not known[id(value)]:
            raise OverflowError("it looks at a namespace that contains itself")
        return known[id(value)]

    def looked_at(self, value: Any) -> Any:
        """`value`, all of which may be looked at."""
        if isinstance(value, CONTAINERS):
            self.add(0)
            if (size := self.size(value)) > MOST:
                raise OverflowError(f"it looks at {size} characters and items, {MOST} is the most")
        return value

    def written(self, value: Any) -> Any:
        """`value`, of which a text is going to be made."""
        self.add(STEP + self.size(value))
        return value

    def before(self, name: str, text: Any, arguments: Sequence[Any]) -> None:
        """Ends the rendering before the filter or method `name` makes something large at once."""
        if name in TEXTS:
            self.written(text)
        if not SHALLOW.fullmatch(name):
            self.looked_at(text)
        for each in arguments:
            self.looked_at(each)
        if name == "sum" and any(isinstance(each, CONTAINERS) for each in arguments):
            raise OverflowError("it sums lists")
        if WIDTHS.fullmatch(name):
            widths = [len(each) if isinstance(each, str) else each for each in arguments]
            for width in (each for each in widths if isinstance(each, int)):
                if width > MOST_WIDTH:
                    raise OverflowError(f"{name} with {width}, {MOST_WIDTH} is the most")
                if isinstance(text, str):
                    self.add(width * (1 + text.count("\n") + text.count("\t")))
        elif isinstance(text, str) and name in ("format", "format_map"):
            self.formats(text, arguments)
        elif isinstance(text, str) and name == "replace" and len(arguments) > 1:
            self.add(text.count(str(arguments[0])) * len(str(arguments[1])))

    def formats(self, text: str, values: Sequence[Any]) -> None:
        if UNBOUND.search(text):
            raise OverflowError(f"it formats without a bound: {text[:40]!r}")
        widest = max(map(int, re.findall(r"\d+", text)), default=0)
        self.add((text.count("%") + text.count("{")) * (widest + sum(map(self.size, values))))

    def joins(self, items: Iterable[Any], between: Any) -> list[Any]:
        """`items`, which are going to be one text with `between` between them."""
        parts = list(self.each(items))
        self.add(self.size(parts) + len(parts) * len(str(between)))
        return parts


_work = _Work()


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skipped = int(hasattr(function, "jinja_pass_arg"))  # the context comes first

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        first, value, rest = arguments[:skipped], arguments[skipped], arguments[skipped + 1 :]
        if name == "join":
            value = _work.joins(value, rest[0] if rest else named.get("d", ""))
        _work.before(name, value, [*rest, *named.values()])
        return _work.made(function(*first, value, *rest, **named))

    return call


def _told(method: str, node: Any) -> nodes.Expr:
    """A call of a method of `_Work` with the value of `node`."""
    return nodes.Call(nodes.EnvironmentAttribute(method), [node], [], None, None)


class _Counting(CodeGenerator):
    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = _told("each", node.iter)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        node.nodes = [_told("written", each) for each in node.nodes]
        super().visit_Concat(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        node.expr = _told("looked_at", node.expr)
        for operand in node.ops:
            operand.expr = _told("looked_at", operand.expr)
        super().visit_Compare(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for pair in node.items:
            pair.key = _told("looked_at", pair.key)
        super().visit_Dict(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        texts = [child.data for child in node.nodes if isinstance(child, nodes.TemplateData)]
        self.writeline(f"environment.add({sum(map(len, texts))})", node)
        super().visit_Output(node, frame)


class _Filters(dict[str, Callable[..., Any]]):
    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _counted_filter(name, function))


class _Rendering(Template):
    def render(self, *arguments: Any, **named: Any) -> str:
        _work.begin()
        return super().render(*arguments, **named)


@pass_eval_context
def _output(_: nodes.EvalContext, value: Any) -> Any:
    return _work.written(value)


def _looking(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def call(*arguments: Any) -> Any:
        return test(*map(_work.looked_at, arguments))

    return call


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment in which transformers compiles chat templates."""

    code_generator_class = _Counting
    template_class = _Rendering
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    add, each, looked_at, written = _work.add, _work.each, _work.looked_at, _work.written

    def __init__(self, *arguments: Any, **named: Any) -> None:
        _work.begin()  # constants are worked out when a template is compiled
        super().__init__(*arguments, **named)
        known, self.filters = self.filters, _Filters()
        for name, function in known.items():
            self.filters[name] = function
        tests: dict[str, Any] = self.tests
        self.tests = {name: _looking(test) for name, test in tests.items()}
        del self.globals["lipsum"]
        self.finalize = _output

    @override
    def call(
        __self,
        __context: Context,
        __function: Any,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        if getattr(__function, "__self__", None) is _work:
            return __function(*arguments)
        method = getattr(__function, "__wrapped__", __function)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str) and name == "join" and arguments:
            arguments = (_work.joins(arguments[0], owner),)
        elif isinstance(owner, str):
            _work.before(name, owner, [*arguments, *named.values()])
        for each in (*arguments, *named.values()):
            _work.looked_at(each)
        return _work.made(super().call(__context, __function, *arguments, **named))

    @override
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in UNSAFE and super().is_safe_attribute(obj, attr, value)

    @override
    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _work.looked_at(argument))

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _work.formats(left, [right])
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, Sized) and isinstance(times, int):
                    _work.add(len(items) * max(times, 0))
        bits = [each.bit_length() if isinstance(each, int) else 0 for each in (left, right)]
        if operator == "*" and sum(bits) > MOST_BITS:
            raise OverflowError("it multiplies numbers of more than 4000 digits")
        if operator == "**" and isinstance(right, int) and bits[0] * right > MOST_BITS:
            raise OverflowError("it makes a number of more than 4000 digits")
        return _work.made(super().call_binop(context, operator, left, right))
