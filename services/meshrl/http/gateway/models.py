"""Request bodies of OpenAI's API, and checks that reject what the gateway does not support."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue

from meshrl.contract.types import Json
from meshrl.http.gateway.answers import ParameterError
from meshrl.rollout.agents.requests import SessionRequest, read_arguments

MAX_STOPS = 16
MOST_TOP = 20
"""As vLLM's default."""
MAX_TOKENS = 1 << 31
Positive = Annotated[int, Field(ge=1, lt=MAX_TOKENS)]
Token = Annotated[int, Field(ge=0, lt=MAX_TOKENS)]
Bias = Annotated[FiniteFloat, Field(ge=-100, le=100)]
DISTRIBUTION = ("temperature", "top_p", "min_p", "repetition_penalty", "logit_bias")
"""Fields of requests that change the distribution, and are used with `program_options.client_sampling`."""
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None


def function_schema(name: str, description: str, parameters: Json) -> dict[str, Json]:
    """A tool that the policy may call, as OpenAI's clients send it and chat templates read it."""
    described = {"description": description} if description else {}
    return {
        "type": "function",
        "function": {"name": name, **described, "parameters": parameters},
    }


def tool_call(call_id: str, name: str, arguments: Json) -> dict[str, Json]:
    """A tool call in an assistant's message, as chat templates read it."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def text_part(text: str) -> dict[str, Json]:
    """A part of a message that is text, as chat templates read it."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Json]:
    """A part of a message that is a picture, as chat templates read it; `url` has its bytes."""
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: Sequence[Mapping[str, Json]], between: str) -> Json:
    """The text of the parts, `between` it where one ends; or the parts, where there are pictures."""
    if all(part["type"] == "text" for part in parts):
        return between.join(str(part["text"]) for part in parts)
    return [dict(part) for part in parts]


def check_tool_choice(chosen: object) -> None:
    """Raises ParameterError unless the policy itself chooses among its tools, or gets none."""
    if chosen not in (None, "none", "auto"):
        raise ParameterError(
            "tool_choice",
            "tool_choice must be none or auto: the policy chooses itself",
        )


class Body(BaseModel):
    """Fields that are not listed here are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class Function(Body):
    """The function of a tool call."""

    name: str
    arguments: str
    """JSON."""


class ToolCallBody(Body):
    """One tool call of an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class TextPart(Body):
    """A part of a message that is text."""

    type: Literal["text", "refusal"]
    text: str = ""


class ImageUrl(Body):
    """A picture as a URL."""

    url: Annotated[str, Field(pattern=r"^data:image/[a-z+*.-]+;base64,")]
    """`data:image/png;base64,...`: pictures are not fetched."""


class ImagePart(Body):
    """An image in a message, for a vision-language model."""

    type: Literal["image_url"]
    image_url: ImageUrl


class MessageBody(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None

    def message(self) -> dict[str, Json]:
        """As a chat template reads it; the JSON text of tool call arguments is parsed."""
        content = self.content
        said: Json = content or ""
        if isinstance(content, list):
            parts = [
                text_part(part.text)
                if isinstance(part, TextPart)
                else image_part(part.image_url.url)
                for part in content
            ]
            said = content_of(parts, "")
        message: dict[str, Json] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": said,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                tool_call(call.id, call.function.name, read_arguments(call.function.arguments))
                for call in self.tool_calls
            ]
        message |= {k: v for k in ("name", "tool_call_id") if (v := getattr(self, k)) is not None}
        return message


class FunctionSchema(Body):
    """Name, description and parameters of a tool."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1, max_length=256)]


class ToolBody(Body):
    """A tool that the policy may call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: FunctionSchema


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = False


CHANGING = re.compile(
    "(add_generation_prompt|chat_template.*|continue_final_message|documents|guided_.*|json_schema|ebnf|regex"
    "|structured_outputs|logits_processors|min_p|min_tokens|repetition_penalty|top_k|typical_p|reasoning_effort)"
)
"""Fields of servers like vLLM and SGLang that would change what the policy is asked or what it may say."""


class Sampling(Body):
    """Fields of both kinds of requests; others are ignored."""

    model_config = ConfigDict(extra="allow")
    model: str = Field(default="policy", max_length=256)
    """Any name: there is one model, the policy."""
    max_tokens: Positive | None = None
    stop: Stops = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    """Used only with `program_options.client_sampling`; see the how-to."""
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    """As `temperature`."""
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    """As `temperature`; a field of vLLM and SGLang."""
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0, le=2)] | None = None
    """As `min_p`."""
    n: int | None = 1
    """Must be 1."""
    seed: int | None = None
    """Ignored: each row has its own seed."""
    frequency_penalty: FiniteFloat | None = None
    """Must be 0."""
    presence_penalty: FiniteFloat | None = None
    """Must be 0."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    """A field of vLLM: log-probs of the prompt's tokens under the policy itself, and of this many of the likeliest at
    each place. Must be absent of a streamed answer."""
    logit_bias: dict[Token, Bias] | None = None
    """Must be empty without `client_sampling`."""
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that would change the prompt or the answer elsewhere, and do not here."""
        given = (self.model_extra or {}) | chosen(self)
        return tuple(sorted(n for n, v in given.items() if v is not None and CHANGING.fullmatch(n)))

    @property
    def usage_in_stream(self) -> bool:
        """Whether a streamed answer ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raises ParameterError for options that would change the trained distribution or are not supported."""
        if self.n not in (None, 1):
            raise ParameterError("n", f"n is {self.n}: a session is one row, so n must be 1")
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                raise ParameterError(
                    name, f"{name} must be 0: the policy is sampled as it is trained"
                )
        if self.prompt_logprobs is not None and self.stream:
            raise ParameterError(
                "prompt_logprobs",
                "prompt_logprobs must be absent: streamed answers do not have them",
            )


def chosen(body: Body) -> dict[str, Any]:
    """The parameters of the distribution that a request has, by their names in SamplingParams."""
    given = {name: getattr(body, name, None) for name in DISTRIBUTION}
    return {name: value for name, value in given.items() if value is not None}


class ChatBody(Sampling):
    """POST /chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, JsonValue] | None = None
    """Must be none or auto."""
    parallel_tool_calls: bool | None = None
    """Ignored."""
    logprobs: bool | None = False
    top_logprobs: int | None = None
    """Must be 0."""
    response_format: dict[str, JsonValue] | None = None
    """Must be text."""
    functions: list[JsonValue] | None = None
    """Must be absent: use `tools`."""

    def ask(self) -> SessionRequest:
        """Raises ParameterError."""
        self.check()
        check_tool_choice(self.tool_choice)
        if self.top_logprobs:
            raise ParameterError(
                "top_logprobs", "top_logprobs must be 0: only sampled tokens have log-probs"
            )
        if self.response_format and self.response_format.get("type") != "text":
            raise ParameterError("response_format", "response_format must be text")
        if self.functions:
            raise ParameterError("functions", "functions are not supported: use tools")
        tools = self.tools if self.tools and self.tool_choice != "none" else []
        return SessionRequest(
            messages=tuple(checked_text("messages", m.message()) for m in self.messages),
            tools=tuple(
                checked_text("tools", tool.model_dump(exclude_none=True)) for tool in tools
            ),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=checked_text("stop", self.stops),
            sampling=chosen(self),
            prompt_top=self.prompt_logprobs,
        )


class CompletionBody(Sampling):
    """POST /completions."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 and 1 both give the log-probs of the sampled tokens."""
    echo: bool | None = False
    """Whether the answer begins with the prompt; must be false of a streamed answer."""
    suffix: str | None = None
    """Must be absent."""
    best_of: int | None = 1
    """Must be 1."""

    def ask(self) -> SessionRequest:
        """Raises ParameterError."""
        self.check()
        if self.echo and self.stream:
            raise ParameterError("echo", "echo must be false: streamed answers begin with new text")
        if self.suffix:
            raise ParameterError(
                "suffix", "suffix must be empty: the policy samples from left to right"
            )
        if self.best_of not in (None, 1):
            raise ParameterError("best_of", "best_of must be 1: a session is one row")
        echoed = 0 if self.echo and self.logprobs is not None else None
        return SessionRequest(
            prompt=checked_text("prompt", self._prompt()),
            max_tokens=self.max_tokens,
            stop=checked_text("stop", self.stops),
            sampling=chosen(self),
            prompt_top=echoed if self.prompt_logprobs is None else self.prompt_logprobs,
        )

    def _prompt(self) -> str | tuple[int, ...]:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ParameterError(
                    "prompt", f"{len(prompt)} prompts: a session is one row, so there must be one"
                )
            prompt = prompt[0]
        return prompt if isinstance(prompt, str) else tuple(prompt)


class ClaimBody(Body):
    """POST /v1/sessions."""

    wait_s: Annotated[FiniteFloat, Field(ge=0, le=60)] = 20.0
    """Seconds to wait for a row; then the answer is 408, and the client may ask again."""


class RewardBody(Body):
    """POST /v1/sessions/{id}/reward."""

    score: FiniteFloat
    components: dict[Annotated[str, Field(min_length=1, max_length=64)], FiniteFloat] = Field(
        default_factory=dict, max_length=64
    )
    """Reported as metrics beside the score."""
    finish: bool = True
    """Whether the session ends with it, if the agent is external; other sessions end with their agents."""


def checked_text(param: str, value: Any) -> Any:
    """`value`. Raises ParameterError if a text in it has half a surrogate pair, which cannot be tokenised."""
    try:
        for text in _texts(value):
            text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(param, f"{param}: text with half a surrogate pair") from error
    except RecursionError as error:
        raise ParameterError(param, f"{param}: nested too deeply") from error
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    return []
