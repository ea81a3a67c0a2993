"""The requests of a session's client, and the answers it gets."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.types import Float32, Int32, Json, PromptLogprobs
from meshrl.rollout.conversation import ChatMessage
from meshrl.rollout.tools.formats import call_of, from_json
from meshrl.rollout.tools.formats.hermes import CLOSING, OPENING


class SessionEndedError(ConflictError):
    """The session accepts no more requests; the message says why."""

    code = "session_ended"


class ContextLengthError(UserError):
    """The conversation has reached its maximum length."""

    code = "context_length_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """One request. Either `messages` (with `tools`), or `prompt`: text, or token ids."""

    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Json, ...] = ()
    """JSON schemas of functions, as the client sent them."""
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    """None: as many as fit."""
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the distribution by their names in SamplingParams, used instead of the task's only if the session
    allows it (`client_sampling`)."""
    prompt_top: int | None = None
    """Number of the likeliest tokens to return at each place of the prompt; None: no log-probs of the prompt."""
    conversation: str = ""
    """The name that the client gave to the conversation, of several in one session; used only if the session's rules
    say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientToolCall:
    """A function call of the policy."""

    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """The next part of an answer, k tokens."""

    text: str
    """The text that the client may see; empty while it may become a stop string or a tool call."""
    tokens: Int32
    """int32[k]"""
    logprobs: Float32
    """float32[k]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAnswer:
    """A complete answer, R tokens."""

    text: str
    """The text without its stop string and tool calls."""
    tail: str
    """The end of `text` that no part had."""
    tool_calls: tuple[ClientToolCall, ...] = ()
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_string: str = ""
    """The stop string that ended it; empty: none did."""
    prompt_tokens: int
    tokens: Int32
    """int32[R]: as sampled, including tokens that the client does not see."""
    logprobs: Float32
    """float32[R]"""
    prompt: PromptLogprobs | None = None
    """None unless the request asks for them."""


def parse_calls(text: str) -> tuple[str, tuple[ClientToolCall, ...]]:
    """The text before the first call, and the calls.

    If a call cannot be read, or other text follows, there are no calls and everything is text: a client must not run
    half of the calls.
    """
    first = at = text.find(OPENING)
    calls: list[ClientToolCall] = []
    while 0 <= at < len(text):
        end = text.find(CLOSING, at)
        if not text.startswith(OPENING, at) or end < 0:
            return text, ()
        call = _read(text[at + len(OPENING) : end].strip())
        if call is None:
            return text, ()
        calls.append(call)
        at = end + len(CLOSING)
        while at < len(text) and text[at].isspace():
            at += 1
    return (text[:first] if calls else text), tuple(calls)


def _read(text: str) -> ClientToolCall | None:
    found = call_of(from_json(text))
    if found.problem or not found.name:
        return None
    written = json.dumps(found.arguments, ensure_ascii=False)
    return ClientToolCall(id=f"call_{secrets.token_hex(12)}", name=found.name, arguments=written)


def read_arguments(text: str) -> Any:
    """Arguments as an object, as templates want them; text that is no JSON stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def same_call(ours: ClientToolCall, theirs: Mapping[str, Any]) -> bool:
    """Whether a client's tool call is the one that it received; the JSON may be formatted differently."""
    function = theirs.get("function") or {}
    sent = function.get("arguments")
    arguments = read_arguments(sent) if isinstance(sent, str) else sent
    return (theirs.get("id"), function.get("name"), arguments) == (
        ours.id,
        ours.name,
        read_arguments(ours.arguments),
    )
