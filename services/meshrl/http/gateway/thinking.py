"""Splits an answer into thought and text where a model writes its thought between `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from meshrl.rollout.agents.answer_stream import AnswerStream
from meshrl.rollout.tokenizer import Tokenizer

OPENING, CLOSING = "<think>", "</think>"
PROMPT_END = 16
"""Tokens at the end of a prompt that may open a thought."""


class Kind(StrEnum):
    """The kind of a piece of an answer."""

    THOUGHT = "thinking"
    TEXT = "text"


class ThoughtSplitter:
    """Feed an answer as it comes. Joined by `joined`, its pieces are the answer again, to the character."""

    def __init__(self, prompt: str, *, wanted: bool) -> None:
        """Begin an answer to `prompt`, which may end within a thought; without `wanted` all is text."""
        self._marks = [not prompt.rstrip().endswith(OPENING), False]
        """Whether the answer has OPENING, and CLOSING."""
        self._kind = Kind.TEXT if self._marks[0] or not wanted else Kind.THOUGHT
        self._may_open = wanted and self._kind is Kind.TEXT
        self._held = ""

    @classmethod
    def of(cls, asking: AnswerStream, tokenizer: Tokenizer, *, wanted: bool) -> ThoughtSplitter:
        """The splitter of an answer that begins behind the prompt of `asking`."""
        prompt = tokenizer.decode(asking.prompt[-PROMPT_END:].tolist()) if wanted else ""
        return cls(prompt, wanted=wanted)

    @property
    def signature(self) -> str:
        """The marks that the answer has: clients give it back with the thought, unread."""
        return "".join("01"[mark] for mark in self._marks)

    def feed(self, text: str) -> Iterator[tuple[Kind, str]]:
        """The next pieces; the end of `text` is held back while a mark may begin with it."""
        self._held += text
        if self._may_open and not OPENING.startswith(self._held):
            self._may_open = False
            if self._held.startswith(OPENING):
                self._held = self._held.removeprefix(OPENING)
                self._kind = Kind.THOUGHT
        if self._may_open:
            return
        if self._kind is Kind.THOUGHT:
            thought, mark, rest = self._held.partition(CLOSING)
            kept = 0 if mark else _begun(thought)
            if shown := thought[: len(thought) - kept]:
                yield Kind.THOUGHT, shown
            self._held = rest if mark else thought[len(thought) - kept :]
            if not mark:
                return
            self._kind, self._marks[1] = Kind.TEXT, True
        if self._held:
            yield Kind.TEXT, self._held
            self._held = ""

    def end(self) -> Iterator[tuple[Kind, str]]:
        """The piece that was held back."""
        if self._held:
            yield self._kind, self._held
            self._held = ""


def joined(thought: str, text: str, signature: str) -> str:
    """The answer again; a thought of another model, whose signature says nothing, gets both marks."""
    opened, closed = (mark != "0" for mark in (signature if len(signature) == 2 else "11"))
    return OPENING * opened + thought + CLOSING * closed + text


def _begun(text: str) -> int:
    """Characters at the end of `text` with which CLOSING may begin."""
    lengths = range(min(len(CLOSING) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(CLOSING[:length])), 0)
