"""JSON bodies of the Tinker SDK. Fields that change nothing here are ignored, others refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
)

from meshrl.contract.errors import UserError
from meshrl.contract.types import AdamStep, CreateModel, Refused
from meshrl.http.common import first_mistake
from meshrl.http.tinker.wire import Part
from meshrl.v1 import tinker_pb2 as pb

MOST_NUMBER = 2**62
MOST_SAMPLES = 1024
MOST_TOP = 20
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
_ADAM = TypeAdapter(AdamStep)


class TinkerBody(BaseModel):
    """A body that may have fields of a newer SDK."""

    model_config = ConfigDict(protected_namespaces=(), extra="ignore")


class LoraBody(TinkerBody):
    """The form of adapters."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelBody(TinkerBody):
    """A model of a session."""

    session_id: str
    model_seq_id: int = Field(ge=0, le=MOST_NUMBER)
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] = Field(default_factory=lambda: {"type": "adamw"})

    def verb(self) -> CreateModel | Refused:
        """The request of the port."""
        if self.optimizer_config.get("type") != "adamw":
            return Refused(error=f"optimizer: got {self.optimizer_config}, want adamw")
        if (lora := self.lora_config) is None:
            return CreateModel(base_model=self.base_model)
        return CreateModel(
            base_model=self.base_model,
            lora_rank=lora.rank,
            lora_seed=lora.seed,
            lora_attention=lora.train_attn,
            lora_mlp=lora.train_mlp,
            lora_unembedding=lora.train_unembed,
        )


class ModelBody(TinkerBody):
    """A request about a model."""

    model_id: str


class NumberedBody(ModelBody):
    """A request of a model, with its number."""

    seq_id: int = Field(ge=1, le=MOST_NUMBER)


class OptimStepBody(NumberedBody):
    """An optimizer step."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None

    def verb(self) -> AdamStep | Refused:
        """The request of the port."""
        if self.adam_params is None:
            return Refused(error=f"optimizer_params: got {self.optimizer_params}, want AdamW's")
        try:
            return _ADAM.validate_python(self.adam_params)
        except ValidationError as error:
            where, why = first_mistake(error)
            return Refused(error=f"adam_params.{where}: {why}")


class SaveWeightsBody(NumberedBody):
    """A copy of a model's weights."""

    path: str | None = None
    overwrite: bool = False


class LoadWeightsBody(TinkerBody):
    """Weights of a checkpoint, for a model that is there or for a new one."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = Field(default=None, ge=1, le=MOST_NUMBER)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=MOST_NUMBER)
    base_model: str | None = None


class SamplingSessionBody(TinkerBody):
    """A sampler of the base model, or of weights that were saved for one."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(TinkerBody):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[Token] = Field(default_factory=list)
    data: Base64Bytes = b""
    format: Literal["", "png", "jpeg"] = ""
    expected_tokens: Token | None = None

    def part(self) -> Part:
        """Tokens, or a picture. Raises UserError."""
        if self.type == "encoded_text":
            return np.array(self.tokens, np.int32)
        if self.type != "image":
            raise UserError(f"prompt: {self.type} is not read here, want encoded_text or image")
        return pb.TinkerImage(
            data=self.data, format=self.format, expected_tokens=self.expected_tokens
        )


class PromptBody(TinkerBody):
    """A prompt."""

    chunks: list[ChunkBody]

    def parts(self) -> list[Part]:
        """Its tokens and pictures in order. Raises UserError for sounds, and for pictures that are elsewhere."""
        return [chunk.part() for chunk in self.chunks]


class SamplingBody(TinkerBody):
    """How to sample."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] | list[Token] | None = None
    temperature: FiniteFloat = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1, lt=1 << 31)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(TinkerBody):
    """A request of a sampler."""

    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0, le=MOST_NUMBER)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MOST_TOP)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None


class FutureBody(TinkerBody):
    """A request whose answer is wanted."""

    request_id: str


class FuturesTarget(TinkerBody):
    """A sampling session, and which clone of its client asks."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=MOST_NUMBER)


class FuturesBody(TinkerBody):
    """A poll for all samples of a target."""

    target: FuturesTarget
    prev_cursor: int = Field(default=0, ge=0, le=MOST_NUMBER)
    timeout: FiniteFloat | None = Field(default=None, ge=0)


class CopyBody(TinkerBody):
    """A copy of a checkpoint, for a model of a session; without one, of a session of its own."""

    source_path: str
    session_id: str | None = None
    model_seq_id: int = Field(default=0, ge=0, le=MOST_NUMBER)


class PathBody(TinkerBody):
    """A checkpoint by its path."""

    tinker_path: str
