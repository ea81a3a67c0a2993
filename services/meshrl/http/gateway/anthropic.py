"""Anthropic's Messages API: requests as the session takes them, and its answers as messages or events.

    POST /messages                ──▶ MessagesBody.ask ──▶ session ──▶ MessageFormat
    POST /messages/count_tokens   ──▶ CountBody.ask ──▶ session.count_tokens

A client that asks for thinking gets the text between `<think>` and `</think>` as a block of its own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat, JsonValue
from typing_extensions import override

from meshrl.contract.errors import MeshError
from meshrl.contract.types import Json
from meshrl.http.gateway.answers import (
    ParameterError,
    anthropic_error,
    error_body,
    named_event,
    status_of,
)
from meshrl.http.gateway.models import (
    Body,
    Positive,
    StopString,
    checked_text,
    chosen,
    content_of,
    function_schema,
    image_part,
    text_part,
    tool_call,
)
from meshrl.http.gateway.thinking import Kind, ThoughtSplitter, joined
from meshrl.rollout.agents.answer_stream import AnswerStream
from meshrl.rollout.agents.requests import ClientToolCall, SessionAnswer, SessionRequest
from meshrl.rollout.tokenizer import Tokenizer

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Stop reason by finish reason."""


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str


class Base64Source(Body):
    """The bytes of a picture."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z+*.-]+$")]
    data: str

    @property
    def url(self) -> str:
        """The picture as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class ImageBlock(Body):
    """An image, for a vision-language model; it is not fetched from a URL."""

    type: Literal["image"]
    source: Base64Source


class ToolUseBlock(Body):
    """A tool call of the policy."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


Shown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Shown] | None = None


class ThinkingBlock(Body):
    """A thought of the policy, as it was given out."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class AnthropicTurn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: (
        str
        | list[
            Annotated[
                TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
                Field(discriminator="type"),
            ]
        ]
    )

    def messages(self) -> Iterator[dict[str, Json]]:
        """As a chat template reads it: a message for each tool result, then one for the rest."""
        blocks = self.content
        if isinstance(blocks, str):
            yield {"role": self.role, "content": blocks}
            return
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        for result in results:
            yield {
                "role": "tool",
                "tool_call_id": result.tool_use_id,
                "content": result.content
                if isinstance(result.content, str)
                else _shown(result.content or []),
            }
        if len(results) == len(blocks) and results:
            return
        said = _shown([each for each in blocks if isinstance(each, TextBlock | ImageBlock)])
        if self.role == "assistant":
            said = "".join(block.text for block in blocks if isinstance(block, TextBlock))
            thoughts = [block for block in blocks if isinstance(block, ThinkingBlock)]
            if thoughts:
                thought = "".join(block.thinking for block in thoughts)
                said = joined(thought, said, thoughts[-1].signature)
        calls: list[Json] = [
            tool_call(call.id, call.name, call.input)
            for call in blocks
            if isinstance(call, ToolUseBlock)
        ]
        yield {"role": self.role, "content": said, **({"tool_calls": calls} if calls else {})}


class AnthropicTool(Body):
    """A tool that the policy may call; those of Anthropic's own servers are refused."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str = ""
    input_schema: dict[str, JsonValue]

    def function(self) -> dict[str, Json]:
        """As OpenAI's clients send it, and as chat templates read it."""
        return function_schema(self.name, self.description, self.input_schema)


class CountBody(Body):
    """POST /messages/count_tokens."""

    model: str = Field(default="policy", max_length=256)
    """Any name: there is one model, the policy."""
    messages: Annotated[list[AnthropicTurn], Field(min_length=1)]
    system: str | list[TextBlock] = ""
    tools: list[AnthropicTool] = Field(default_factory=list)
    tool_choice: dict[str, JsonValue] | None = None
    """Must be auto or none."""
    thinking: dict[str, JsonValue] | None = None
    """`enabled` or `adaptive` gives thoughts as blocks; their budget is ignored."""

    @property
    def thinks(self) -> bool:
        """Whether thoughts are blocks of their own."""
        return (self.thinking or {}).get("type") in ("enabled", "adaptive")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that would change the answer elsewhere, and do not here."""
        return ()

    def ask(self) -> SessionRequest:
        """Raises ParameterError."""
        choice = (self.tool_choice or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            raise ParameterError(
                "tool_choice", "tool_choice must be auto or none: the policy chooses itself"
            )
        system = self.system if isinstance(self.system, str) else _shown(self.system)
        first: list[dict[str, Json]] = [{"role": "system", "content": system}] if system else []
        said = [message for turn in self.messages for message in turn.messages()]
        return SessionRequest(
            messages=tuple(checked_text("messages", message) for message in [*first, *said]),
            tools=tuple(
                checked_text("tools", tool.function()) for tool in self.tools if choice != "none"
            ),
        )


class MessagesBody(CountBody):
    """POST /messages."""

    max_tokens: Positive
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] = Field(default_factory=list)
    stream: bool = False
    temperature: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    """Used only with `program_options.client_sampling`; see the how-to."""
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    """As `temperature`."""
    top_k: int | None = None
    """Ignored: the policy is sampled as it is trained."""

    @property
    @override
    def ignored(self) -> tuple[str, ...]:
        return ("top_k",) if self.top_k is not None else ()

    @override
    def ask(self) -> SessionRequest:
        asked = super().ask()
        return SessionRequest(
            messages=asked.messages,
            tools=asked.tools,
            max_tokens=self.max_tokens,
            stop=checked_text("stop_sequences", tuple(self.stop_sequences)),
            sampling=chosen(self),
        )


def _shown(blocks: Sequence[TextBlock | ImageBlock]) -> Json:
    return content_of(
        [
            text_part(block.text) if isinstance(block, TextBlock) else image_part(block.source.url)
            for block in blocks
        ],
        "\n",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """An answer as Anthropic's clients read it."""

    model: str
    """The name that the client used."""
    tokenizer: Tokenizer
    thinking: bool = False
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def complete(self, asking: AnswerStream, answer: SessionAnswer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        split = ThoughtSplitter.of(asking, self.tokenizer, wanted=self.thinking)
        content: list[dict[str, Any]] = []
        for kind, piece in (*split.feed(answer.text), *split.end()):
            if not content or content[-1]["type"] != kind:
                content.append({"type": str(kind), str(kind): ""})
            content[-1][kind] += piece
        for block in content:
            if block["type"] == Kind.THOUGHT:
                block["signature"] = split.signature
        for call in answer.tool_calls:
            use = {"id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            content.append({"type": "tool_use", **use})
        usage = self._usage(asking, len(answer.tokens))
        return {**self._message(content, usage), **_stop(answer)}

    async def stream(self, asking: AnswerStream) -> AsyncIterator[bytes]:
        """Server-sent events; an error is one event and ends the stream."""
        yield named_event("message_start", message=self._message([], self._usage(asking, 0)))
        blocks = _Blocks(ThoughtSplitter.of(asking, self.tokenizer, wanted=self.thinking))
        try:
            async for part in asking:
                for event in blocks.feed(part.text):
                    yield event
        except MeshError as error:
            failed = anthropic_error(error_body(error), status_of(error)[0])
            yield named_event("error", error=failed["error"])
            return
        answer = asking.answer
        assert answer is not None
        for event in (
            *blocks.feed(answer.tail),
            *blocks.end(),
            *blocks.calls(answer.tool_calls),
        ):
            yield event
        usage = self._usage(asking, len(answer.tokens))
        yield named_event("message_delta", delta=_stop(answer), usage=usage)
        yield named_event("message_stop")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, asking: AnswerStream, output: int) -> dict[str, int]:
        return {"input_tokens": len(asking.prompt), "output_tokens": output}


class _Blocks:
    """The events of content blocks, one open at a time."""

    def __init__(self, split: ThoughtSplitter) -> None:
        self._split = split
        self._number = -1
        self._open: Kind | None = None

    def feed(self, text: str) -> Iterator[bytes]:
        """More of the answer."""
        for kind, piece in self._split.feed(text):
            yield from self._add(kind, piece)

    def end(self) -> Iterator[bytes]:
        """The end of the answer's text."""
        for kind, piece in self._split.end():
            yield from self._add(kind, piece)
        yield from self._close()

    def calls(self, calls: Sequence[ClientToolCall]) -> Iterator[bytes]:
        """A block for each call."""
        for call in calls:
            use = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield self._start(use)
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            yield named_event("content_block_stop", index=self._number)

    def _add(self, kind: Kind, piece: str) -> Iterator[bytes]:
        if kind is not self._open:
            yield from self._close()
            self._open = kind
            signature = {"signature": ""} if kind is Kind.THOUGHT else {}
            yield self._start({"type": str(kind), str(kind): "", **signature})
        yield self._delta({"type": f"{kind}_delta", str(kind): piece})

    def _close(self) -> Iterator[bytes]:
        if self._open is Kind.THOUGHT:
            yield self._delta({"type": "signature_delta", "signature": self._split.signature})
        if self._open is not None:
            yield named_event("content_block_stop", index=self._number)
        self._open = None

    def _start(self, block: dict[str, Any]) -> bytes:
        self._number += 1
        return named_event("content_block_start", index=self._number, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", index=self._number, delta=delta)


def _stop(answer: SessionAnswer) -> dict[str, Any]:
    reason = "stop_sequence" if answer.stop_string else STOPS[answer.finish_reason]
    if answer.tool_calls:
        reason = STOPS["tool_calls"]
    return {"stop_reason": reason, "stop_sequence": answer.stop_string or None}
