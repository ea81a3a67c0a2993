"""Which recorded response a request goes on from: a tree of turns, found by what the client was shown.

    root ── turn 1 ──┬── turn 2 ── turn 3        the conversation
                     └── turn 2'                 the same beginning, gone on with otherwise
    root'── turn 1                               another conversation: a sub-agent, or an edited past

A request goes on from the longest recorded conversation that it repeats. Of that the tokens are taken as they were
sampled; only what is new is rendered. Whatever repeats nothing begins a branch of its own, so tokens never stand for
something that the client did not see, or that the policy did not say.

A message of ours is known by what it is: tool calls by their ids (name and arguments unchanged), text by the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from meshrl.contract.types import Json
from meshrl.rollout.chat import ChatMessage
from meshrl.rollout.sampling import Response
from meshrl.rollout.sessions.requests import ToolCall
from meshrl.rollout.sessions.tool_calls import same_call

Key: TypeAlias = bytes
"""Of a conversation up to some message: a hash over its messages, chained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One response, and how the conversation came to it."""

    parent: Turn | None
    observed: tuple[int, ...]
    """Tokens between the parent's response and this one, none of them sampled; of a first turn: the prompt."""
    response: Response

    def path(self) -> list[Turn]:
        """From the first turn to this one."""
        turns: list[Turn] = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled, on the way here and in this turn."""
        return sum(len(turn.response.tokens) for turn in self.path())


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An assistant's message as the client was given it."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()

    def is_message(self, message: Mapping[str, Any]) -> bool:
        """Whether `message` is this one, sent back."""
        calls = message.get("tool_calls") or []
        text = message.get("content") or ""
        if len(calls) != len(self.tool_calls):
            return False
        if not all(same_call(o, t) for o, t in zip(self.tool_calls, calls, strict=True)):
            return False
        # Beside tool calls clients drop or trim the text; the calls' ids have said already which message this is.
        return text == self.text or (bool(calls) and text.strip() in ("", self.text.strip()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """A completion's prompt and answer: what a later prompt must begin with to go on from it."""

    text: str
    hidden: str
    """What was sampled behind `text`: a stop string, mostly. A prompt that repeats it does not say it twice."""
    tokens: tuple[int, ...]
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request goes on."""

    turn: Turn | None
    """None: nowhere, it is a beginning."""
    fresh: int
    """Messages (of a chat) or characters or tokens (of a completion) that were there before."""
    key: Key = b""
    """Of everything that the request says, for `History.chatted`."""


class History:
    """The turns of one session, in the order in which they ended."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._chats: dict[Key, Turn] = {}
        self._said: list[tuple[Key, Said, Key]] = []
        """What was said after which conversation, and what that made of it."""
        self._written: list[Written] = []

    def find_chat(self, messages: Sequence[ChatMessage], tools: Sequence[Json]) -> Place:
        """The longest conversation that `messages` repeat, under the same tools."""
        key = _chain(b"", list(tools))
        found, fresh = None, 0
        for number, message in enumerate(messages):
            key = self._step(key, message)
            if key in self._chats:
                found, fresh = self._chats[key], number + 1
        return Place(turn=found, fresh=fresh, key=key)

    def chatted(self, place: Place, turn: Turn, said: Said) -> None:
        """A turn ended that answered the conversation at `place`."""
        after = _chain(place.key, {"turn": len(self.turns)})
        self._said.append((place.key, said, after))
        self._chats[after] = turn
        self.turns.append(turn)

    def find_text(self, prompt: str) -> tuple[Place, str]:
        """The longest text that `prompt` begins with; what of the rest is new."""
        found = [w for w in self._written if w.text and prompt.startswith(w.text)]
        if not found:
            return Place(turn=None, fresh=0), prompt
        best = max(reversed(found), key=lambda written: len(written.text))
        return Place(turn=best.turn, fresh=len(best.text)), prompt[len(best.text) :].removeprefix(
            best.hidden
        )

    def find_tokens(self, prompt: Sequence[int]) -> Place:
        """As `find_text`, of token ids."""
        given = tuple(prompt)
        found = [w for w in self._written if given[: len(w.tokens)] == w.tokens]
        if not found:
            return Place(turn=None, fresh=0)
        best = max(reversed(found), key=lambda written: len(written.tokens))
        return Place(turn=best.turn, fresh=len(best.tokens))

    def wrote(self, written: Written) -> None:
        """A completion ended."""
        self._written.append(written)
        self.turns.append(written.turn)

    def _step(self, key: Key, message: ChatMessage) -> Key:
        """The key after one more message; the newest of ours that it can be."""
        if message.get("role") == "assistant":
            for before, said, after in reversed(self._said):
                if before == key and said.is_message(message):
                    return after
        return _chain(key, message)


def _chain(key: Key, content: Any) -> Key:
    written = json.dumps(content, sort_keys=True, default=str).encode(errors="surrogatepass")
    return hashlib.blake2b(written, key=key, digest_size=32).digest()
