"""What a client asks of a session, and what it is answered."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.types import Float32, Int32, Json
from meshrl.rollout.chat import ChatMessage


class SessionEndedError(ConflictError):
    """The session takes no more requests; says why."""

    code = "session_ended"


class ContextLengthError(UserError):
    """The conversation is as long as it may get."""

    code = "context_length_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """One request. Either `messages` (with `tools`), or `prompt`: text, or token ids."""

    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Json, ...] = ()
    """JSON schemas of functions, as the client gave them."""
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    """None: as many as there is room for."""
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    """This and `top_p` count only where the session lets the client decide; None: the task's."""
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the policy asks for."""

    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """More of an answer. k tokens."""

    text: str
    """What the client may see of it; empty while it may still turn out to be a stop string or a tool call."""
    tokens: Int32
    """int32[k]"""
    logprobs: Float32
    """float32[k]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. R tokens."""

    text: str
    """Without the stop string that ended it, without tool calls."""
    tail: str
    """Of `text`, what no piece had."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    tokens: Int32
    """int32[R]: as sampled, whatever the client sees of them."""
    logprobs: Float32
    """float32[R]"""
