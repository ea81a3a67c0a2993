"""OpenAI's Responses API: requests as the session takes them, and its answers as items or events.

    POST /responses   ──▶ ResponsesBody.ask ──▶ session ──▶ ResponseFormat

`previous_response_id` names an answer of the same session. A client that asks for reasoning gets the text between
`<think>` and `</think>` as an item of its own. Custom tools, whose input is text, are functions of one argument for
the policy; tools of OpenAI's own servers are left out.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, FiniteFloat, JsonValue, Tag

from meshrl.contract.errors import MeshError, NotFoundError
from meshrl.contract.types import Json
from meshrl.http.gateway.answers import ParameterError, error_body, named_event
from meshrl.http.gateway.models import (
    Body,
    Positive,
    check_tool_choice,
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
from meshrl.rollout.agents.requests import (
    ClientToolCall,
    SessionAnswer,
    SessionRequest,
    read_arguments,
)
from meshrl.rollout.conversation import ChatMessage
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rpc.credentials import sha256

INPUT = "input"
"""The argument of a custom tool."""


class TextContent(Body):
    """A part of a message that is text."""

    type: Literal["input_text", "output_text", "refusal", "text"]
    text: str = ""


class ImageContent(Body):
    """An image in a message, for a vision-language model."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(pattern=r"^data:image/[a-z+*.-]+;base64,")]


Content = str | list[Annotated[TextContent | ImageContent, Field(discriminator="type")]]


class MessageItem(Body):
    """One message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Body):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """JSON."""


class CustomCallItem(Body):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class OutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class ReasoningText(Body):
    """A part of a thought."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Body):
    """A thought of the policy, as it was given out."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    """The text for `joined`, not encrypted."""


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    if kind == "custom_tool_call_output":
        return "function_call_output"
    return str(kind or "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ToolItem(Body):
    """A tool that the policy may call."""

    type: str
    name: str = ""
    description: str = ""
    parameters: dict[str, JsonValue] | None = None
    """JSON Schema of a function's arguments."""

    def function(self) -> dict[str, Json]:
        """As chat templates read it."""
        parameters: Json = self.parameters or {"type": "object", "properties": {}}
        if self.type == "custom":
            properties: Json = {INPUT: {"type": "string"}}
            parameters = {"type": "object", "properties": properties, "required": [INPUT]}
        return function_schema(self.name, self.description, parameters)


class ResponsesBody(Body):
    """POST /responses."""

    model: str = Field(default="policy", max_length=256)
    """Any name: there is one model, the policy."""
    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    """An answer of this session, whose conversation `input` continues."""
    tools: list[ToolItem] = Field(default_factory=list)
    tool_choice: str | dict[str, JsonValue] | None = None
    """Must be none or auto."""
    max_output_tokens: Positive | None = None
    stream: bool | None = False
    reasoning: dict[str, JsonValue] | None = None
    """Anything but an effort of none gives thoughts as items; the effort is ignored."""
    text: dict[str, JsonValue] | None = None
    """The format must be text."""
    background: bool | None = False
    """Must be false."""
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    """Used only with `program_options.client_sampling`; see the how-to."""
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    """As `temperature`."""

    @property
    def thinks(self) -> bool:
        """Whether thoughts are items of their own."""
        return bool(self.reasoning) and (self.reasoning or {}).get("effort") != "none"

    @property
    def known_tools(self) -> list[ToolItem]:
        """Tools that the client runs."""
        return [tool for tool in self.tools if tool.type in ("function", "custom") and tool.name]

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tools that would change the answer elsewhere, and do not here."""
        known = self.known_tools
        return tuple(f"tools: {tool.type}" for tool in self.tools if tool not in known)

    def messages(self) -> list[dict[str, Json]]:
        """The input as a chat template reads it; items of one answer are one message."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Json]] = []
        for answered, items in groupby(self.input, _is_answer):
            if answered:
                found.append(_assistant(list(items)))
            else:
                found += [
                    _observed(item) for item in items if isinstance(item, MessageItem | OutputItem)
                ]
        return [checked_text("input", message) for message in found]

    def ask(self, before: Sequence[ChatMessage]) -> SessionRequest:
        """The request, which continues the messages `before`. Raises ParameterError."""
        check_tool_choice(self.tool_choice)
        format = (self.text or {}).get("format") or {}
        if not isinstance(format, Mapping) or format.get("type", "text") != "text":
            raise ParameterError("text", "text.format must be text")
        if self.background:
            raise ParameterError("background", "background must be false: the row waits for it")
        tools = self.known_tools if self.tool_choice != "none" else []
        first: list[ChatMessage] = []
        if self.instructions:
            first = [{"role": "system", "content": checked_text("instructions", self.instructions)}]
        return SessionRequest(
            messages=(*first, *before, *self.messages()),
            tools=tuple(checked_text("tools", tool.function()) for tool in tools),
            max_tokens=self.max_output_tokens,
            sampling=chosen(self),
        )


def _is_answer(item: Any) -> bool:
    said = isinstance(item, MessageItem) and item.role == "assistant"
    return said or isinstance(item, ReasoningItem | CallItem | CustomCallItem)


def _assistant(items: Sequence[Any]) -> dict[str, Json]:
    """One message of the items of an answer."""
    text = "".join(str(_shown(item.content, "")) for item in items if isinstance(item, MessageItem))
    thoughts = [item for item in items if isinstance(item, ReasoningItem) and item.content]
    if thoughts:
        thought = "".join(part.text for item in thoughts for part in item.content or [])
        text = joined(thought, text, thoughts[-1].encrypted_content or "")
    calls: list[Json] = [
        tool_call(
            item.call_id,
            item.name,
            read_arguments(item.arguments) if isinstance(item, CallItem) else {INPUT: item.input},
        )
        for item in items
        if isinstance(item, CallItem | CustomCallItem)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _observed(item: MessageItem | OutputItem) -> dict[str, Json]:
    if isinstance(item, OutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _shown(item.output)}
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _shown(item.content)}


def _shown(content: Content, between: str = "\n") -> Json:
    """Text; or parts, where there are pictures."""
    if isinstance(content, str):
        return content
    parts = [
        text_part(part.text) if isinstance(part, TextContent) else image_part(part.image_url)
        for part in content
    ]
    return content_of(parts, between)


class SaidBefore:
    """The conversations that the answers of one session ended, by the answer's id.

    A message is kept once, though clients send the whole conversation each time.
    """

    def __init__(self) -> None:
        self._messages: dict[str, tuple[ChatMessage, ...]] = {}
        self._known: dict[str, ChatMessage] = {}
        """Messages by the digest of their JSON."""

    def up_to(self, response: str | None) -> tuple[ChatMessage, ...]:
        """The messages up to that answer; none for None. Raises NotFoundError."""
        if response is None:
            return ()
        if response not in self._messages:
            raise NotFoundError(
                f"previous_response_id: no answer of this session is {response[:64]!r}"
            )
        return self._messages[response]

    def keep(self, response: str, asked: Sequence[ChatMessage], answer: SessionAnswer) -> None:
        """Remember an answer to the messages `asked`."""
        calls: list[Json] = [
            tool_call(call.id, call.name, read_arguments(call.arguments))
            for call in answer.tool_calls
        ]
        said: dict[str, Json] = {"role": "assistant", "content": answer.text}
        last = {**said, "tool_calls": calls} if calls else said
        self._messages[response] = tuple(map(self._once, (*asked, last)))

    def _once(self, message: ChatMessage) -> ChatMessage:
        return self._known.setdefault(sha256(json.dumps(message)), message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """An answer as clients of Responses read it."""

    body: ResponsesBody
    tokenizer: Tokenizer
    keep: Callable[[str, SessionAnswer], None]
    """Called with the answer's id and the answer, before the client gets its end."""
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, asking: AnswerStream, answer: SessionAnswer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        self.keep(self.id, answer)
        items = self._items(asking)
        for _ in (*items.feed(answer.text), *items.end(), *items.calls(answer.tool_calls)):
            pass
        return self._body(items.done, answer)

    async def stream(self, asking: AnswerStream) -> AsyncIterator[bytes]:
        """Server-sent events; an error is an event and ends the stream."""
        items = self._items(asking)
        for name in ("created", "in_progress"):
            yield items.event(f"response.{name}", response=self._body([], None))
        try:
            async for part in asking:
                for event in items.feed(part.text):
                    yield event
        except MeshError as error:
            failure = error_body(error)["error"]
            failed = self._body(items.done, None) | {"status": "failed", "error": failure}
            yield items.event("response.failed", response=failed)
            told = {key: failure[key] for key in ("code", "message", "param")}
            yield items.event("error", **told)
            return
        answer = asking.answer
        assert answer is not None
        self.keep(self.id, answer)
        for event in (*items.feed(answer.tail), *items.end(), *items.calls(answer.tool_calls)):
            yield event
        body = self._body(items.done, answer)
        yield items.event(f"response.{body['status']}", response=body)

    def _items(self, asking: AnswerStream) -> _Items:
        split = ThoughtSplitter.of(asking, self.tokenizer, wanted=self.body.thinks)
        custom = frozenset(tool.name for tool in self.body.tools if tool.type == "custom")
        return _Items(split, custom)

    def _body(self, output: list[dict[str, Any]], answer: SessionAnswer | None) -> dict[str, Any]:
        """The response object, in progress while there is no answer."""
        asked = self.body
        cut = answer is not None and answer.finish_reason == "length"
        status = "in_progress" if answer is None else "incomplete" if cut else "completed"
        usage = None
        if answer is not None:
            usage = {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": len(answer.tokens),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + len(answer.tokens),
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": asked.model,
            "output": list(output),
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": {},
        }


class _Items:
    """The items of an answer, one open at a time, and their events."""

    def __init__(self, split: ThoughtSplitter, custom: frozenset[str]) -> None:
        """`custom` are the names of tools whose input is text."""
        self.done: list[dict[str, Any]] = []
        self._split = split
        self._custom = custom
        self._open: Kind | None = None
        self._id = ""
        self._text = ""
        self._events = 0

    def event(self, type: str, **fields: Any) -> bytes:
        """One server-sent event, numbered."""
        self._events += 1
        return named_event(type, sequence_number=self._events - 1, **fields)

    def feed(self, text: str) -> Iterator[bytes]:
        """More of the answer."""
        for kind, piece in self._split.feed(text):
            yield from self._add(kind, piece)

    def end(self) -> Iterator[bytes]:
        """The end of the answer's text."""
        for kind, piece in self._split.end():
            yield from self._add(kind, piece)
        yield from self._close()

    def _add(self, kind: Kind, piece: str) -> Iterator[bytes]:
        """Text of an item, which begins where the kind changes."""
        if kind is not self._open:
            yield from self._close()
            self._open, self._text = kind, ""
            self._id = f"{'msg' if kind is Kind.TEXT else 'rs'}_{secrets.token_hex(12)}"
            item = self._item("", "in_progress") | {"content": []}
            yield self._of_item("response.output_item.added", item=item)
            yield self._of_part("response.content_part.added", part=_part(kind, ""))
        self._text += piece
        yield self._of_part(f"response.{_part_type(kind)}.delta", delta=piece)

    def _close(self) -> Iterator[bytes]:
        """The end of the open item; idempotent."""
        if self._open is None:
            return
        kind = self._open
        yield self._of_part(f"response.{_part_type(kind)}.done", text=self._text)
        yield self._of_part("response.content_part.done", part=_part(kind, self._text))
        item = self._item(self._text, "completed")
        yield self._of_item("response.output_item.done", item=item)
        self.done.append(item)
        self._open = None

    def calls(self, calls: Sequence[ClientToolCall]) -> Iterator[bytes]:
        """An item for each call."""
        for call in calls:
            custom = call.name in self._custom
            key, written = "arguments", call.arguments
            if custom:
                given = read_arguments(call.arguments)
                key, written = INPUT, str(given.get(INPUT, "")) if isinstance(given, dict) else ""
            self._id = f"{'ctc' if custom else 'fc'}_{secrets.token_hex(12)}"
            item = {
                "id": self._id,
                "type": "custom_tool_call" if custom else "function_call",
                "call_id": call.id,
                "name": call.name,
                key: written,
                "status": "completed",
            }
            name = "custom_tool_call_input" if custom else "function_call_arguments"
            begun = item | {key: "", "status": "in_progress"}
            yield self._of_item("response.output_item.added", item=begun)
            at = {"item_id": self._id, "output_index": len(self.done)}
            yield self.event(f"response.{name}.delta", delta=written, **at)
            yield self.event(f"response.{name}.done", **{key: written}, **at)
            yield self._of_item("response.output_item.done", item=item)
            self.done.append(item)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        content = [_part(Kind.TEXT if self._open is Kind.TEXT else Kind.THOUGHT, text)]
        if self._open is Kind.TEXT:
            said = {"role": "assistant", "status": status, "content": content}
            return {"id": self._id, "type": "message", **said}
        signature = self._split.signature if status == "completed" else None
        thought = {"summary": [], "content": content, "encrypted_content": signature}
        return {"id": self._id, "type": "reasoning", **thought}

    def _of_item(self, type: str, **fields: Any) -> bytes:
        return self.event(type, output_index=len(self.done), **fields)

    def _of_part(self, type: str, **fields: Any) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if "output_text" in type else {}
        at = {"item_id": self._id, "output_index": len(self.done), "content_index": 0}
        return self.event(type, **at, **fields, **more)


def _part_type(kind: Kind) -> str:
    return "output_text" if kind is Kind.TEXT else "reasoning_text"


def _part(kind: Kind, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _part_type(kind), "text": text}
    return part | ({"annotations": [], "logprobs": []} if kind is Kind.TEXT else {})
