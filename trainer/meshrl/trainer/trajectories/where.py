"""Conditions on logged rows, such as `reward < 0.5 and staleness > 1`: a small language that runs no code.

    condition   and, or, not, ( ); < <= > >= == !=, also in a chain; `TEXT in TEXT`, `not in`
    value       a column, `components.NAME` (or `components["NAME"]`), a number, a 'text', None, + - * /,
                abs(NUMBER), len(TEXT), lower(TEXT)

The text is parsed by Python's own parser, and each node is translated by a table: what is not in the table is
refused. A comparison with a missing value is false; `advantage == None` asks for one.
"""

from __future__ import annotations

import ast
import difflib
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from meshrl.contract.errors import UserError

TEXTS = (
    "uid",
    "task",
    "split",
    "data_source",
    "prompt",
    "response",
    "ground_truth",
    "extra_info",
    "reward_hash",
    "outcome",
    "worker",
)
NUMBERS = (
    "index",
    "attempt",
    "group_size",
    "step",
    "epoch",
    "turns",
    "prompt_length",
    "length",
    "reward",
    "advantage",
    "mismatch",
    "staleness",
    "time_unix_s",
    "sampled_unix_s",
    "sample_s",
    "score_wait_s",
    "score_s",
    "train_wait_s",
)
COMPONENTS = "components"
LONGEST = 1000
"""Characters of a condition."""

Row: TypeAlias = Mapping[str, Any]
_Kind: TypeAlias = Literal["number", "text", "condition", "nothing"]
_COMPARE: Mapping[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.In: ("in", lambda part, whole: part in whole),
    ast.NotIn: ("not in", lambda part, whole: part not in whole),
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: Mapping[str, tuple[_Kind, _Kind, Callable[[Any], Any]]] = {
    "abs": ("number", "number", abs),
    "len": ("text", "number", len),
    "lower": ("text", "text", str.lower),
}
"""Functions by name: the kind of the argument, the kind of the result, the function."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A part of a condition, as a function of a row; None if the row lacks the value."""

    kind: _Kind
    of: Callable[[Row], Any]


def condition(text: str) -> Callable[[Row], bool]:
    """A test of rows as `reading.read_rows` gives them.

    Raises:
        UserError: `text` is no condition; says where and what would be.
    """
    text = text.strip()
    if len(text) > LONGEST:
        raise UserError(f"a condition of {len(text)} characters; at most {LONGEST} are read")
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's advice on code is no answer here
            tree = ast.parse(text, mode="eval")
        found = _Translator(text).value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        hint = "; equal is ==" if "=" in text and "==" not in text else ""
        raise UserError(
            f"{text!r} is not a condition{hint} (want, for example, reward < 0.5 and staleness > 1)"
        ) from error
    if found.kind != "condition":
        raise UserError(f"{text!r} is a {found.kind}, no condition: compare it, as in reward < 0.5")
    return lambda row: bool(found.of(row))


class _Translator:
    """Evaluates nodes of Python's grammar."""

    def __init__(self, text: str) -> None:
        self._text = text

    def value(self, node: ast.expr) -> _Value:
        """Translate one node."""
        match node:
            case ast.BoolOp(op=op, values=nodes):
                return self._joined([self._of(part, "condition") for part in nodes], op)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                negated = self._of(inner, "condition").of
                return _Value("condition", lambda row: not negated(row))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                number = self._of(inner, "number").of
                return _Value("number", lambda row: _given(operator.neg, number(row)))
            case ast.Compare(left=left, ops=ops, comparators=rest):
                return self._comparison([left, *rest], ops)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._arithmetic(left, _ARITHMETIC[type(op)], right)
            case ast.Constant(value=None):
                return _Value("nothing", lambda row: None)
            case ast.Constant(value=str(constant)):
                return _Value("text", lambda row: constant)
            case ast.Constant(value=int(constant) | float(constant)) if not isinstance(
                constant, bool
            ):
                return _Value("number", lambda row: constant)
            case ast.Name(id=name):
                return self._column(name)
            case ast.Attribute(value=ast.Name(id="components"), attr=name):
                return _component(name)
            case ast.Subscript(
                value=ast.Name(id="components"), slice=ast.Constant(value=str(name))
            ):
                return _component(name)
            case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in _FUNCTIONS:
                takes, gives, function = _FUNCTIONS[name]
                of = self._of(inner, takes).of
                return _Value(gives, lambda row: _given(function, of(row)))
        raise self._refused(node, f"is not known here; functions are {', '.join(_FUNCTIONS)}")

    def _of(self, node: ast.expr, kind: _Kind) -> _Value:
        found = self.value(node)
        if found.kind != kind:
            raise self._refused(node, f"is a {found.kind}, want a {kind}")
        return found

    def _column(self, name: str) -> _Value:
        if name in TEXTS or name in NUMBERS:
            return _Value("text" if name in TEXTS else "number", lambda row: row.get(name))
        if name == COMPONENTS:
            raise UserError("components: name one, as in components.acc > 0")
        near = difflib.get_close_matches(name, [*TEXTS, *NUMBERS, COMPONENTS], n=1)
        known = ", ".join((*NUMBERS, *TEXTS, f"{COMPONENTS}.NAME"))
        hint = f"did you mean {near[0]}?" if near else f"there are {known}"
        raise UserError(f"no column {name!r} to ask for; {hint}")

    def _joined(self, parts: list[_Value], op: ast.boolop) -> _Value:
        every = all if isinstance(op, ast.And) else any
        return _Value("condition", lambda row: every(part.of(row) for part in parts))

    def _arithmetic(
        self, left: ast.expr, does: Callable[[Any, Any], float], right: ast.expr
    ) -> _Value:
        one, other = self._of(left, "number").of, self._of(right, "number").of

        def of(row: Row) -> Any:
            try:
                return _given(does, one(row), other(row))
            except (ZeroDivisionError, OverflowError):
                return None

        return _Value("number", of)

    def _comparison(self, nodes: list[ast.expr], ops: list[ast.cmpop]) -> _Value:
        values = [self.value(node) for node in nodes]
        tests = []
        for at, op in enumerate(ops):
            if type(op) not in _COMPARE:
                raise self._refused(nodes[at + 1], "is compared by a word that is not known here")
            name, test = _COMPARE[type(op)]
            tests.append(self._pair(values[at], name, test, values[at + 1]))
        return _Value("condition", lambda row: all(test(row) for test in tests))

    def _pair(
        self, one: _Value, name: str, test: Callable[[Any, Any], bool], other: _Value
    ) -> Callable[[Row], bool]:
        kinds = {one.kind, other.kind}
        if "nothing" in kinds and name in ("==", "!="):
            return lambda row: test(one.of(row), other.of(row))
        if kinds != {"text"} and ("in" in name or kinds != {"number"}):
            raise UserError(
                f"{self._text!r} compares a {one.kind} with a {other.kind} by {name}"
                + ("; want a text on both sides" if "in" in name else "")
            )
        return lambda row: bool(_given(test, one.of(row), other.of(row)))

    def _refused(self, node: ast.expr, problem: str) -> UserError:
        return UserError(f"{ast.get_source_segment(self._text, node)!r} {problem}")


def _component(name: str) -> _Value:
    return _Value("number", lambda row: row["reward_components"].get(name))


def _given(does: Callable[..., Any], *values: Any) -> Any:
    """None where a value is missing."""
    return None if any(value is None for value in values) else does(*values)
