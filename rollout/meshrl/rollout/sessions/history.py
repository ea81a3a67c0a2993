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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from meshrl.contract.types import Json, Media
from meshrl.rollout.chat import ChatMessage
from meshrl.rollout.sessions.requests import ToolCall
from meshrl.rollout.sessions.tool_calls import same_call
from meshrl.rollout.streams import Response

Key: TypeAlias = bytes
"""A chained hash over the messages of a conversation, up to some message."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One response, and the conversation before it."""

    parent: Turn | None
    observed: tuple[int, ...]
    """Tokens between the parent's response and this one, not sampled; of a first turn: the prompt."""
    response: Response
    media: tuple[Media, ...] = ()
    """Pictures in `observed`, which has one placeholder for each."""
    messages: tuple[ChatMessage, ...] = ()
    """What the request added to the conversation, and the answer; empty for completions of text."""
    conversation: str = ""
    """The name that its client gave to the conversation."""

    def path(self) -> list[Turn]:
        """From the first turn to this one."""
        turns: list[Turn] = [self]
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
    tool_calls: tuple[ToolCall, ...] = ()

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
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place in the history that a request continues."""

    turn: Turn | None
    """None: the request begins a conversation."""
    known: int
    """How many messages (chat), characters or tokens (completion) of the request are recorded already."""
    key: Key = b""
    """Of the whole request, for `History.add_chat`."""


class History:
    """The turns of one session, in the order in which they ended."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._chats: dict[Key, Turn] = {}
        self._shown: list[tuple[Key, ShownMessage, Key]] = []
        """The conversation before a message, the message, the conversation with it."""
        self._completions: list[Completion] = []

    def find_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Json], *, conversation: str = ""
    ) -> Place:
        """The longest conversation of that name that `messages` repeat, under the same tools."""
        key = _chain(b"", [conversation, *tools])
        turn, known = None, 0
        for number, message in enumerate(messages):
            key = self._step(key, message)
            if key in self._chats:
                turn, known = self._chats[key], number + 1
        return Place(turn=turn, known=known, key=key)

    def add_chat(self, place: Place, turn: Turn, message: ShownMessage) -> None:
        """Record a turn that answered the conversation at `place`."""
        after = _chain(place.key, {"turn": len(self.turns)})
        self._shown.append((place.key, message, after))
        self._chats[after] = turn
        self.turns.append(turn)

    def find_text(self, prompt: str, *, conversation: str = "") -> tuple[Place, str]:
        """The longest recorded text that `prompt` begins with; the rest of `prompt` that is new."""
        known = self._of(conversation)
        matches = [w for w in known if w.text and prompt.startswith(w.text)]
        if not matches:
            return Place(turn=None, known=0), prompt
        best = max(reversed(matches), key=lambda completion: len(completion.text))
        return Place(turn=best.turn, known=len(best.text)), prompt[len(best.text) :].removeprefix(
            best.hidden
        )

    def find_tokens(self, prompt: Sequence[int], *, conversation: str = "") -> Place:
        """As `find_text`, for token ids."""
        ids = tuple(prompt)
        matches = [w for w in self._of(conversation) if ids[: len(w.tokens)] == w.tokens]
        if not matches:
            return Place(turn=None, known=0)
        best = max(reversed(matches), key=lambda completion: len(completion.tokens))
        return Place(turn=best.turn, known=len(best.tokens))

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
