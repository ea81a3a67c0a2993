"""What a client sees of a response while it comes: whole characters, up to a stop string, no tool call."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.rollout.sessions.requests import ToolCall
from meshrl.rollout.sessions.tool_calls import OPENING, parse_calls
from meshrl.rollout.tokenizer import Tokenizer

BROKEN = "�"
"""What a tokenizer decodes part of a character to."""


class VisibleText:
    """Decodes one response. What has been shown is never taken back: whatever may still change waits."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str], tools: bool) -> None:
        self.hidden = ""
        """After `end`: the stop string that ended the response and what its last token had beyond."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tools = tools
        self._ids: list[int] = []
        self._shown = 0

    def feed(self, tokens: Sequence[int]) -> str:
        """More of the response; the text that can be shown by now."""
        self._ids += tokens
        text, _ = self._cut()
        end = len(text.rstrip(BROKEN))
        marks = (*self._stop, *(OPENING,) * self._tools)
        if self._tools and OPENING in text:
            end = min(end, text.index(OPENING))
        end = min(end, len(text) - max((_held(text, mark) for mark in marks), default=0))
        return self._show(text, end)

    def end(self) -> tuple[str, str, tuple[ToolCall, ...]]:
        """The whole text, what of it was not shown yet, and the tool calls behind it."""
        text, self.hidden = self._cut()
        calls: tuple[ToolCall, ...] = ()
        if self._tools:
            text, calls = parse_calls(text)
        return text, self._show(text, len(text)), calls

    def _cut(self) -> tuple[str, str]:
        """What lies before the first stop string, and what does not."""
        text = self._tokenizer.decode(self._ids)
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        cut = min(found, default=len(text))
        return text[:cut], text[cut:]

    def _show(self, text: str, end: int) -> str:
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh


def _held(text: str, mark: str) -> int:
    """Characters at the end of `text` with which `mark` may begin."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )
