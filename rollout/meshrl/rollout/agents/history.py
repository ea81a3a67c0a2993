"""Finds the recorded response that a request continues: a tree of turns, searched by what the client was shown.

    root ── turn 1 ──┬── turn 2 ── turn 3        the conversation
                     └── turn 2'                 the same beginning, continued differently
    root'── turn 1                               another conversation: a sub-agent, or an edited past

A request continues the longest recorded conversation that it repeats. The tokens of that conversation are taken as
they were sampled; only new messages are rendered. A request that repeats none begins a new branch, so tokens never
stand for text that the client did not see or that the policy did not sample.

A message of the policy is recognised by its content: tool calls by their ids (name and arguments unchanged), text by
the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from meshrl.contract.types import Json, Media, RowPart, Trajectory, Uint8, VersionSpan
from meshrl.rollout.agents.requests import ClientToolCall, same_call
from meshrl.rollout.conversation import ChatMessage
from meshrl.rollout.streams import Response

Key: TypeAlias = bytes
"""A chained hash over the messages of a conversation, up to some message."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedTurn:
    """One response, and the conversation before it."""

    parent: RecordedTurn | None
    observed: tuple[int, ...]
    """Tokens between the parent's response and this one, not sampled; of a first turn: the prompt."""
    response: Response
    media: tuple[Media, ...] = ()
    """Pictures in `observed`, which has one placeholder for each."""
    messages: tuple[ChatMessage, ...] = ()
    """Messages that the request added, then the answer; empty for text completions."""
    conversation: str = ""
    """The name that its client gave to the conversation."""

    def path(self) -> list[RecordedTurn]:
        """The turns from the first to this one."""
        turns: list[RecordedTurn] = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled in this turn and the turns before it."""
        return sum(len(turn.response.tokens) for turn in self.path())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """An assistant's message as the client received it."""

    text: str
    tool_calls: tuple[ClientToolCall, ...] = ()

    def is_message(self, message: Mapping[str, Any]) -> bool:
        """Whether `message`, sent by the client, is this one."""
        calls = message.get("tool_calls") or []
        text = message.get("content") or ""
        if len(calls) != len(self.tool_calls):
            return False
        if not all(same_call(o, t) for o, t in zip(self.tool_calls, calls, strict=True)):
            return False
        # Clients drop or trim text beside tool calls; the ids of the calls already identify the message.
        return text == self.text or (bool(calls) and text.strip() in ("", self.text.strip()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Prompt and answer of a completion: a later prompt that begins with them continues it."""

    text: str
    hidden: str
    """Sampled text after `text`, usually a stop string. If the next prompt repeats it, it is not added again."""
    tokens: tuple[int, ...]
    turn: RecordedTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlace:
    """The place in the history that a request continues."""

    turn: RecordedTurn | None
    """None: the request begins a conversation."""
    known: int
    """How many messages (chat), characters or tokens (completion) of the request are recorded already."""
    key: Key = b""
    """Key of the whole request, for `TurnTree.add_chat`."""


class TurnTree:
    """The turns of one session, in the order in which they ended."""

    def __init__(self) -> None:
        self.turns: list[RecordedTurn] = []
        self._chats: dict[Key, RecordedTurn] = {}
        self._shown: list[tuple[Key, ShownMessage, Key]] = []
        """The conversation before a message, the message, the conversation with it."""
        self._completions: list[Completion] = []

    def find_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Json], *, conversation: str = ""
    ) -> TreePlace:
        """The longest conversation of that name that `messages` repeat, under the same tools."""
        key = _chain(b"", [conversation, *tools])
        turn, known = None, 0
        for number, message in enumerate(messages):
            key = self._step(key, message)
            if key in self._chats:
                turn, known = self._chats[key], number + 1
        return TreePlace(turn=turn, known=known, key=key)

    def add_chat(self, place: TreePlace, turn: RecordedTurn, message: ShownMessage) -> None:
        """Record a turn that answered the conversation at `place`."""
        after = _chain(place.key, {"turn": len(self.turns)})
        self._shown.append((place.key, message, after))
        self._chats[after] = turn
        self.turns.append(turn)

    def find_text(self, prompt: str, *, conversation: str = "") -> tuple[TreePlace, str]:
        """The longest recorded text that `prompt` begins with; the rest of `prompt` that is new."""
        known = self._of(conversation)
        matches = [w for w in known if w.text and prompt.startswith(w.text)]
        if not matches:
            return TreePlace(turn=None, known=0), prompt
        best = max(reversed(matches), key=lambda completion: len(completion.text))
        return TreePlace(turn=best.turn, known=len(best.text)), prompt[
            len(best.text) :
        ].removeprefix(best.hidden)

    def find_tokens(self, prompt: Sequence[int], *, conversation: str = "") -> TreePlace:
        """As `find_text`, for token ids."""
        ids = tuple(prompt)
        matches = [w for w in self._of(conversation) if ids[: len(w.tokens)] == w.tokens]
        if not matches:
            return TreePlace(turn=None, known=0)
        best = max(reversed(matches), key=lambda completion: len(completion.tokens))
        return TreePlace(turn=best.turn, known=len(best.tokens))

    def add_completion(self, completion: Completion) -> None:
        """Record a completion."""
        self._completions.append(completion)
        self.turns.append(completion.turn)

    def _of(self, conversation: str) -> list[Completion]:
        return [w for w in self._completions if w.turn.conversation == conversation]

    def _step(self, key: Key, message: ChatMessage) -> Key:
        """The key after one more message; an assistant's message matches the newest recorded one.

        The call's id says whose result a tool's message is, so a client may name the tool once and not the next time.
        """
        if message.get("role") == "assistant":
            for before, shown, after in reversed(self._shown):
                if before == key and shown.is_message(message):
                    return after
        if message.get("tool_call_id"):
            message = {key: value for key, value in message.items() if key != "name"}
        return _chain(key, message)


def _chain(key: Key, content: Any) -> Key:
    written = json.dumps(content, sort_keys=True, default=str).encode(errors="surrogatepass")
    return hashlib.blake2b(written, key=key, digest_size=32).digest()


def joined(
    turns: Sequence[RecordedTurn], row_of: Callable[[RecordedTurn], Trajectory]
) -> tuple[Trajectory, tuple[RowPart, ...]]:
    """All branches of a session as one row, in the order in which their first new turns ended.

        branches  P a A b │ P' c │ P' d        P, P', A observed; a, b, c, d sampled
        row       P a A b   P' c   P' d        parts begin at 0, 4 and 6; d is trained behind P', not behind c

    The trainer takes the row apart (`learner/unfolding.py`). A turn that several branches share is trained in the
    first of them, and context in the others.

    Args:
        turns: The turns of a session, in that order; at least one.
        row_of: The row of the branch that ends with a turn.
    """
    number = {turn: index for index, turn in enumerate(turns)}
    parents = {turn.parent for turn in turns}
    trained: set[RecordedTurn] = set()
    rows: list[Trajectory] = []
    parts: list[RowPart] = []
    leaves = [turn for turn in turns if turn not in parents]
    while leaves:
        leaf = min(leaves, key=lambda end: min(number[t] for t in end.path() if t not in trained))
        leaves.remove(leaf)
        row, anchors = _new_turns(row_of(leaf), leaf.path(), trained)
        parts.append(RowPart(start=sum(len(row.tokens) for row in rows), anchors=anchors))
        rows.append(row)
        trained.update(leaf.path())
    return end_to_end(rows, parts), tuple(parts)


def end_to_end(rows: Sequence[Trajectory], parts: Sequence[RowPart]) -> Trajectory:
    """Rows of one episode as one, where `parts` say that they begin."""
    spans = [
        replace(span, start=span.start + part.start, end=span.end + part.start)
        for row, part in zip(rows, parts, strict=True)
        for span in row.spans
    ]
    return replace(
        rows[0],
        tokens=np.concatenate([row.tokens for row in rows]),
        loss_mask=np.concatenate([row.loss_mask for row in rows]),
        rollout_logprobs=np.concatenate([row.rollout_logprobs for row in rows]),
        spans=tuple(spans),
        response_text="\n".join(row.response_text for row in rows),
    )


def _new_turns(
    row: Trajectory, path: Sequence[RecordedTurn], trained: set[RecordedTurn]
) -> tuple[Trajectory, tuple[str, ...]]:
    """A branch whose known turns are context, and what each run of new tokens answers."""
    keep: Uint8 = np.zeros(len(row.tokens), dtype=np.uint8)
    anchors: list[str] = []
    at, runs_on = 0, False
    for turn in path:
        start = at + len(turn.observed)
        at = start + len(turn.response.tokens)
        new = turn not in trained and len(turn.response.tokens) > 0
        if new:
            keep[start:at] = 1
            if turn.observed or not runs_on:
                anchors.append(anchor_of(turn.messages[-2] if turn.messages[1:] else turn.observed))
        runs_on = new or (runs_on and at == start and not turn.observed)
    mask = row.loss_mask * keep
    spans = [part for span in row.spans for part in _within(span, keep)]
    logprobs = np.where(mask, row.rollout_logprobs, 0).astype(np.float32)
    return (
        replace(row, loss_mask=mask, rollout_logprobs=logprobs, spans=tuple(spans)),
        tuple(anchors),
    )


def _within(span: VersionSpan, keep: Uint8) -> list[VersionSpan]:
    """The pieces of a span that are kept."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], keep[span.start : span.end], [0]])))
    return [
        replace(span, start=span.start + int(a), end=span.start + int(b))
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def anchor_of(shown: ChatMessage | Sequence[int]) -> str:
    """A name of what the policy was shown last: the message before its answer, else the tokens."""
    written = json.dumps(shown, sort_keys=True)
    return hashlib.blake2b(written.encode(), digest_size=8).hexdigest()
