"""The requests of a session's client, and the answers it gets."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.types import Float32, Int32, Json
from meshrl.rollout.chat import ChatMessage


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
    temperature: float | None = None
    """This and `top_p` are used only if the session allows it (`client_sampling`); None: the task's."""
    top_p: float | None = None
    conversation: str = ""
    """The name that the client gave to the conversation, of several in one session; used only if the session's rules
    say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
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
class Answer:
    """A complete answer, R tokens."""

    text: str
    """Without the stop string that ended it, without tool calls."""
    tail: str
    """The end of `text` that no part had."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    tokens: Int32
    """int32[R]: as sampled, including tokens that the client does not see."""
    logprobs: Float32
    """float32[R]"""
