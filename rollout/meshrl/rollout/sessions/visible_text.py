"""The text of a response that a client sees while it streams: up to a stop string, no tool calls.

The tokens of a long response come one by one, so each is decoded a bounded number of times: with those after it,
and as their context. Of the text, only what a stop string or a tool call may begin with is looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.rollout.sessions.requests import ToolCall
from meshrl.rollout.sessions.tool_calls import parse_calls
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.tools.formats.hermes import OPENING

BROKEN = "�"
"""A tokenizer decodes a part of a character to this."""
CHARACTER_TOKENS = 4
"""A character is at most so many tokens of a byte-level vocabulary."""


class VisibleText:
    """Decodes one response. Shown text never changes: text that may still change is held back."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str], tools: bool) -> None:
        self.hidden = ""
        """After `end`: the stop string that ended the response, and the rest of its last token."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tools = tools
        self._marks = (*self._stop, OPENING) if tools else self._stop
        self._ids: list[int] = []
        self._context, self._read = 0, 0
        """Tokens before `_read` have their text; it is what those from `_context` on are decoded with, whose text may
        depend on them: in some vocabularies the first token loses a blank."""
        self._context_text = ""
        self._wanted = 0
        """Decode again when there are so many tokens."""
        self._held = ""
        """Text that is not shown, because a mark may begin with it."""
        self._shown = 0
        """In characters."""
        self._marked = False
        """There is a mark in the text: nothing more is shown before the end."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that can be shown now."""
        self._ids += tokens
        if self._marked or len(self._ids) < self._wanted:
            return ""
        text = self._held + self._decoded()
        marks = [at for mark in self._marks if (at := text.find(mark)) >= 0]
        self._marked = bool(marks)
        held = max((_held(text, mark) for mark in self._marks), default=0)
        end = min([*marks, len(text) - held])
        self._held = text[end:]
        self._shown += end
        return text[:end]

    def end(self) -> tuple[str, str, tuple[ToolCall, ...]]:
        """The whole text, the part of it not shown yet, and the tool calls after it."""
        text = self._tokenizer.decode(self._ids)
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        cut = min(found, default=len(text))
        text, self.hidden = text[:cut], text[cut:]
        calls: tuple[ToolCall, ...] = ()
        if self._tools:
            text, calls = parse_calls(text)
        return text, text[self._shown :], calls

    def _decoded(self) -> str:
        """The text of the tokens from `_read` on, up to the last that ends a character; `_read` moves behind it."""
        length = len(self._ids)
        for end in range(length, max(self._read, length - CHARACTER_TOKENS), -1):
            text = self._tokenizer.decode(self._ids[self._context : end])
            new = text[len(self._context_text) :]
            if new and not new.endswith(BROKEN):
                self._context, self._read = self._read, end
                self._context_text = self._tokenizer.decode(self._ids[self._context : end])
                return new
        undecided = length - self._read
        if undecided > CHARACTER_TOKENS:
            # Tokens without text, or bytes that are no character: trying each time they are twice as many adds up to
            # a multiple of their number.
            self._wanted = length + undecided
        return ""


def _held(text: str, mark: str) -> int:
    """Characters at the end of `text` with which `mark` may begin."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )
