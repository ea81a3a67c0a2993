"""Parsers of what a policy samples look at each character a bounded number of times, whatever the text is.

Operations are counted, not seconds: a `Counted` text adds up the characters that its methods look at or copy.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex

import pytest

from meshrl.common import plugins
from meshrl.rollout.agents import requests as tool_calls
from meshrl.rollout.agents.answer_stream import VisibleText
from meshrl.rollout.agents.requests import parse_calls
from meshrl.rollout.tools import formats
from meshrl.rollout.tools import formats as parsing
from meshrl.rollout.tools.formats import hermes, llama3_json, python_fence, search_r1

LENGTH = 64 << 10
PER_CHARACTER = 24
"""Characters looked at or copied, for each one of the text; what grows faster than the text has thousands."""
PARSERS: list[Callable[[str], Any]] = [
    parse_calls,
    hermes.parse,
    llama3_json.parse,
    python_fence.parse,
    search_r1.parse,
]
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<tool_call>\n",
    "<tool_call> ",
    "\n",
    " ",
    "```",
    "`",
    "```python\n",
    "```python ",
    "```py\t",
    "<|",
    "|>",
    "<|a",
    "_",
    "<|eom_id|>",
    "{",
    "}",
    '{"name":""};',
    '{"name": "f", "parameters": {}}',
    '{"name": "f", "arguments": {}}',
    "<search>",
    "</search>",
    "<answer>",
    '<tool_call>{"name": "f"}</tool_call>',
    '"name"',
    "[",
    "x",
    "; ",
    "\u2003",
]


class Counted(str):
    """Text that counts; parts of it count on."""

    work = 0

    def find(self, sub: str, start: Any = 0, end: Any = None) -> int:
        at = super().find(sub, start, len(self) if end is None else end)
        Counted.work += (at if at >= 0 else len(self)) - start + len(sub)
        return at

    def startswith(self, prefix: Any, start: Any = 0, end: Any = None) -> bool:
        Counted.work += len(prefix)
        return super().startswith(prefix, start, len(self) if end is None else end)

    def strip(self, chars: str | None = None) -> Counted:
        Counted.work += len(self)
        return Counted(super().strip(chars))

    def lstrip(self, chars: str | None = None) -> Counted:
        Counted.work += len(self)
        return Counted(super().lstrip(chars))

    def partition(self, sep: str) -> tuple[Counted, Counted, Counted]:  # type: ignore[override]
        Counted.work += 2 * len(self)
        before, found, after = super().partition(sep)
        return Counted(before), Counted(found), Counted(after)

    def __contains__(self, part: object) -> bool:
        Counted.work += len(self)
        return super().__contains__(part)  # type: ignore[operator]

    def endswith(self, suffix: Any, start: Any = 0, end: Any = None) -> bool:
        Counted.work += len(suffix)
        return super().endswith(suffix, start, len(self) if end is None else end)

    def __add__(self, other: str) -> Counted:
        Counted.work += len(self) + len(other)
        return Counted(super().__add__(other))

    def __getitem__(self, key: SupportsIndex | slice) -> Counted:
        part = Counted(super().__getitem__(key))
        Counted.work += len(part)
        return part


def hostile() -> list[str]:
    draw = random.Random(1)
    units = [*PIECES, *("".join(draw.choices(PIECES, k=draw.randint(2, 4))) for _ in range(60))]
    texts = [unit * (LENGTH // len(unit)) for unit in units]
    texts += [
        first + unit * (LENGTH // len(unit)) for first in PIECES[:4] for unit in ("\n", " ", "<")
    ]
    return texts + ["".join(draw.choices(PIECES, k=8000)) for _ in range(20)]


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: f"{parse.__module__}")
def test_the_work_grows_no_faster_than_the_text(parse: Callable[[str], Any]) -> None:
    for text in hostile():
        Counted.work = 0
        parse(Counted(text))
        assert Counted.work <= PER_CHARACTER * len(text) + 1000, text[:80]


def test_no_parser_of_sampled_text_backtracks() -> None:
    names = plugins.known(formats.__name__)
    modules = [importlib.import_module(f"{formats.__name__}.{name}") for name in names]
    for module in (*modules, parsing, tool_calls):
        held = [name for name, value in vars(module).items() if isinstance(value, re.Pattern)]
        assert not held and "re" not in vars(module), f"{module.__name__}: {held}"
    assert {parse.__module__ for parse in PARSERS} >= {module.__name__ for module in modules}


def test_they_read_what_regular_expressions_read() -> None:
    draw = random.Random(2)
    block = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
    call = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
    fence = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)
    special = re.compile(r"<\|\w+\|>")
    for _ in range(3000):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 9)))
        assert len(hermes.parse(text)) == len(block.findall(text))
        assert [c.arguments["code"] for c in python_fence.parse(text)] == fence.findall(text)
        assert llama3_json._without_special(text) == special.sub("", text)
        before, calls = parse_calls(text)
        found = call.findall(text)
        readable = [tool_calls._read(each) is not None for each in found]
        first = text.find("<tool_call>")
        whole = bool(found) and all(readable) and not call.sub("", text[first:]).strip()
        assert (before, len(calls)) == ((text[:first], len(found)) if whole else (text, 0)), text


BLANK, SPECIAL = ord(" "), 256


class Bytes:
    """A tokenizer whose tokens are bytes, or special ones; like some, it takes the first blank of a text away."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        text = bytes(token for token in ids if token < SPECIAL).decode(errors="replace")
        return Counted(text.removeprefix(" "))


def responses() -> Iterator[list[int]]:
    draw = random.Random(3)
    units = ["é☃😀 ".encode(), b"\xe2", b"a\xe2", b"<tool_cal", b"STO", b"\xf0\x9f\x98"]
    yield from (list(unit * LENGTH) for unit in (b"a", b"\x80"))
    yield [SPECIAL] * LENGTH
    yield from (list(unit * (2048 // len(unit))) for unit in units)
    for _ in range(8):
        pieces = draw.choices([*map(list, units), [SPECIAL] * 5, list(b"\x80" * 99)], k=6)
        yield [token for piece in pieces for token in piece * draw.randint(1, 300)][:2048]


def test_a_streamed_text_is_decoded_a_bounded_number_of_times() -> None:
    draw = random.Random(4)
    for ids in responses():
        tokenizer, at, shown = Bytes(), 0, ""
        Counted.work = 0
        visible = VisibleText(tokenizer, stop=("STOP", "<tool"), tools=False)
        while at < len(ids):
            size = draw.randint(1, 9) if len(ids) == LENGTH else 1
            shown += str(visible.feed(ids[at : at + size]))
            at += size
        assert tokenizer.decoded <= PER_CHARACTER * len(ids), ids[:9]
        assert Counted.work <= PER_CHARACTER * len(ids) + 1000, ids[:9]
        whole, tail, _ = visible.end()
        assert shown + tail == whole, ids[:9]


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    visible = VisibleText(Bytes(), stop=("STOP",), tools=False)
    fed = [visible.feed([token]) for token in " é STAR☃ STOP".encode()]
    assert fed == ["", "", "é", " ", "", "", "STA", "R", "", "", "☃", " ", "", "", "", ""]


def test_a_call_that_is_nested_too_deeply_is_a_call_with_a_problem() -> None:
    (call,) = llama3_json.parse('{"name": ' * 100_000)
    assert call.problem == "the call is nested too deeply"
