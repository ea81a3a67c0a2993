"""The text of a response that a client sees while it streams: up to a stop string, no tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.rollout.sessions.requests import ToolCall
from meshrl.rollout.sessions.tool_calls import parse_calls
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.tools.formats.hermes import OPENING

BROKEN = "�"
"""A tokenizer decodes a part of a character to this."""


class VisibleText:
    """Decodes one response. Shown text never changes: text that may still change is held back."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str], tools: bool) -> None:
        self.hidden = ""
        """After `end`: the stop string that ended the response, and the rest of its last token."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tools = tools
        self._ids: list[int] = []
        self._shown = 0

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that can be shown now."""
        self._ids += tokens
        text, _ = self._cut()
        end = len(text.rstrip(BROKEN))
        marks = (*self._stop, *(OPENING,) * self._tools)
        if self._tools and OPENING in text:
            end = min(end, text.index(OPENING))
        end = min(end, len(text) - max((_held(text, mark) for mark in marks), default=0))
        return self._show(text, end)

    def end(self) -> tuple[str, str, tuple[ToolCall, ...]]:
        """The whole text, the part of it not shown yet, and the tool calls after it."""
        text, self.hidden = self._cut()
        calls: tuple[ToolCall, ...] = ()
        if self._tools:
            text, calls = parse_calls(text)
        return text, self._show(text, len(text)), calls

    def _cut(self) -> tuple[str, str]:
        """The text before the first stop string, and the rest."""
        text = self._tokenizer.decode(self._ids)
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        cut = min(found, default=len(text))
        return text[:cut], text[cut:]

    def _show(self, text: str, end: int) -> str:
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        return new


def _held(text: str, mark: str) -> int:
    """Characters at the end of `text` with which `mark` may begin."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )
