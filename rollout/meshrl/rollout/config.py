"""The `rollout` section of a recipe, and its checks. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from meshrl.common import plugins
from meshrl.common.checks import Problem, check_options, dotted
from meshrl.common.config import Config, Machine, read_options
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import OnUpdate, SamplingParams
from meshrl.rollout.containers.box import BoxLimits

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings that the torch engine computes: their frequencies do not change with the length."""
HYBRID_ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Members of TORCH_ARCHITECTURES with layers of linear attention."""
TORCH_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    *HYBRID_ARCHITECTURES,
)
"""Architectures (`architectures` in config.json) that the torch engine supports; text only, whatever they read."""
PROGRAMS = "meshrl.rollout.programs"
ENGINES = "meshrl.rollout.engines"


def _positive_or_all(top_k: int) -> int:
    if top_k == 0 or top_k < -1:
        raise ValueError("want a positive number, or -1 for all tokens")
    return top_k


def _no_empty_string(stop: list[str]) -> list[str]:
    if "" in stop:
        raise ValueError("an empty stop string would stop everything at once")
    return stop


TopK = Annotated[int, AfterValidator(_positive_or_all)]
TopP = Annotated[float, Field(gt=0, le=1)]
LogitBias = Annotated[float, Field(ge=-100, le=100)]
StopList = Annotated[list[str], AfterValidator(_no_empty_string)]


class Distribution(Config):
    """The distribution of sampled tokens.

    Applied in this order: `logit_bias`, `repetition_penalty`, temperature, top_k, min_p, top_p. Log-probs are of the
    result.
    """

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: TopP = 1.0
    """Smallest set of tokens with this probability; 1 keeps all."""
    top_k: TopK = -1
    """The k likeliest tokens; -1 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Tokens with at least this share of the likeliest one's probability; 0 keeps all."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    """Divides the positive logits of tokens that stand in prompt or response, and multiplies the negative ones; 1 is
    off. Not on SGLang, which counts the response's alone."""
    logit_bias: dict[NonNegativeInt, LogitBias] = Field(default_factory=dict)
    """Added to the logits of tokens, by id: -100 bans one."""


class ValKwargs(Distribution):
    """How held-out tasks are sampled."""

    n: PositiveInt = 1
    """Samples per held-out prompt."""
    temperature: NonNegativeFloat = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIntervals:
    """How often running responses are saved in the queue, for the worker that takes over after a death or drain."""

    tokens: int = 64
    """New tokens after which to save; 0: no limit by tokens."""
    ms: int = 1000
    """Milliseconds after which to save; 0: no limit by time. Both 0: nothing is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreakerConfig:
    """When a worker with a failing engine stops leasing rows. Deterministic runs have no circuit breaker."""

    error_rate: float = 0.5
    """If this share of the last `window` requests has failed, the worker leases no rows during a pause."""
    window: int = 20
    """Requests over which the rate is measured; at least a quarter of them must have ended."""
    pause_s: float = 0.5
    """The first pause. One row is tried after each; while that fails, the next pause is twice as long."""

    @property
    def longest_pause_s(self) -> float:
        """No pause is longer."""
        return 60 * self.pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSchedule:
    """How the rows of one worker share its engine."""

    slots: int
    """Rows at once."""
    deterministic: bool = False
    """In sync batches. Nothing is saved then, because a row that begins again has the same bits, and there is no
    circuit breaker, because one row as a probe is not a sync batch."""
    checkpoint: CheckpointIntervals | None = None
    """None: running responses are not saved."""
    max_staleness: float = math.inf
    """Saved responses more versions old are not continued."""
    breaker: CircuitBreakerConfig = CircuitBreakerConfig()


class GatewayConfig(Config):
    """The endpoint of a worker whose program lets external code lead the conversation (`openai`)."""

    host: str = "127.0.0.1"
    """Address to listen on; another one is only for external agents, with `tokens` or client certificates."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free one, written to `<run.dir>/gateways/<worker>.json`; else worker `rollout-3` has this plus 3."""
    tokens: Path | None = None
    """A YAML file of tokens as for `reward.registry.tokens`. The role `claim` may request sessions, as may the run's
    credentials `agent` and `operator`. A gateway beyond loopback needs tokens, or mutual TLS."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names by which clients call it, besides `localhost`, `host` and IP addresses; another Host is refused."""
    max_request_bytes: PositiveInt = 8 << 20
    """Size of one request. Raise it for agents that send long conversations with pictures."""

    max_connections: ClassVar[int] = 4096
    """Connections at the same time, three quarters of them from one address; further ones get 503 or are closed."""
    claims_per_minute: ClassVar[float] = 6000.0
    """Session requests of one caller."""


class ContainersConfig(Config):
    """The containers of a worker whose program works in them, one for each row (docs/how-to/containers.md)."""

    backend: Literal["bubblewrap", "podman", "docker", "kubernetes"] = "bubblewrap"
    """`bubblewrap` needs no daemon and no root, and starts from an unpacked root; podman and docker use their engine;
    with kubernetes each row has a pod."""
    boxes: PositiveInt = 16
    """Containers of one worker at the same time; it leases no more rows than that."""
    warm: NonNegativeInt = 0
    """Containers among these that are started before a row wants them, of the image that the last row had."""
    starts: PositiveInt = 4
    """Images that are made, and containers that are started, at the same time."""
    store: Path | None = None
    """The folder in which bubblewrap unpacks images; null: a folder of this user's in /var/tmp."""
    tools: str = "debian:stable-slim"
    """The image from which kubernetes gives each pod bash, tar and what else its commands begin with."""
    lent: list[Path] = Field(default_factory=list)
    """Folders of this machine that every container can read, under the same path: an agent's program."""
    limits: BoxLimits = BoxLimits()
    """Limits of one container, where its task names none."""

    @field_validator("lent")
    @classmethod
    def _absolute(cls, lent: list[Path]) -> list[Path]:
        for path in lent:
            if not path.is_absolute() or path == Path("/") or ".." in path.parts:
                raise ValueError(f"{path}: want an absolute path below /")
        return lent


class RolloutConfig(Distribution):
    """How tasks become trajectories."""

    name: str = "torch"
    """A module of `meshrl.rollout.engines`, or a dotted path."""
    n: PositiveInt = 8
    """Samples per prompt: the size of a group."""
    top_k_top_p: Literal["sequential", "joint"] = "sequential"
    """Rule for top_k and top_p together. `sequential`: top_p cuts the renormalised distribution that top_k leaves
    (torch, vLLM, Hugging Face); `joint`: the whole distribution (SGLang). An engine refuses the other rule, so that a
    fleet samples from one distribution. With only one of the two set, both rules are the same."""
    stop: StopList = Field(default_factory=list)
    """A response ends when its text contains one of these; the tokens that complete it stay in the response."""
    program: str = "single_turn"
    """A module of `meshrl.rollout.programs`, or a dotted path."""
    program_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the program: the `Config` in its module."""
    gateway: GatewayConfig = GatewayConfig()
    """The endpoint of each worker, for programs that have one."""
    containers: ContainersConfig = ContainersConfig()
    """The containers of each worker, for programs that work in them."""
    workers: PositiveInt = 1
    """Processes, each with its own engine."""
    slots: PositiveInt = 64
    """Requests that one worker runs at the same time."""
    on_update: OnUpdate = OnUpdate.IN_FLIGHT
    """How new weights treat running requests: drain, interrupt (recompute their cache) or in_flight."""
    deadline_s: PositiveFloat = 600.0
    """A rollout that takes longer counts as `timeout`."""
    journal_tokens: NonNegativeInt = CheckpointIntervals().tokens
    """Running responses are saved in the queue: after the death of a worker at most this many tokens of each are
    sampled again (an append starts at half of it), and every token is saved after at most a second, however slow
    the engine; 0: only that second counts. Deterministic runs save nothing."""
    routing_replay: bool = False
    """Replay the routing of a mixture of experts (R3): the engine reports the experts of each token, rows keep them
    compressed, and the trainer sends the tokens to the same ones."""
    deterministic: bool | None = None
    """Sample rows in sync batches, whose bits do not depend on timing; None: if `queue.max_staleness` is 0."""
    engine: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the engine: the `Config` in its module."""
    val_kwargs: ValKwargs = ValKwargs()

    def is_deterministic(self, max_staleness: float) -> bool:
        """Whether rows run in sync batches: as configured, else exactly when training is on-policy."""
        return max_staleness == 0 if self.deterministic is None else self.deterministic

    def schedule(self, max_staleness: float) -> RowSchedule:
        """How the rows of each worker share its engine."""
        return RowSchedule(
            slots=self.slots,
            deterministic=self.is_deterministic(max_staleness),
            checkpoint=CheckpointIntervals(tokens=self.journal_tokens),
            max_staleness=max_staleness,
        )

    def sampling(self, *, max_tokens: int, seed: int) -> SamplingParams:
        """How training tasks are sampled."""
        return self._drawn_from(self, max_tokens, seed)

    def val_sampling(self, *, max_tokens: int, seed: int) -> SamplingParams:
        """How held-out tasks are sampled."""
        return self._drawn_from(self.val_kwargs, max_tokens, seed)

    def _drawn_from(self, distribution: Distribution, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=distribution.temperature,
            top_p=distribution.top_p,
            top_k=distribution.top_k,
            min_p=distribution.min_p,
            repetition_penalty=distribution.repetition_penalty,
            logit_bias=distribution.logit_bias,
            joint_cut=self.top_k_top_p == "joint",
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            seed=seed,
        )


def longer_than(
    config: Mapping[str, Any], asked: int | None, model: Path
) -> Iterator[tuple[str, str]]:
    """Option and message where one request may have more tokens (`asked`) than config.json allows."""
    text = config.get("text_config") or config
    allowed = text.get("max_position_embeddings")
    if asked is not None and isinstance(allowed, int) and asked > allowed:
        yield "max_model_len", f"{asked}, and {model} allows {allowed}; want at most that"


class TorchEngineConfig(Config):
    """`rollout.engine` for `rollout.name: torch`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and cache; `auto` is bfloat16 on a GPU, float32 on a CPU. Sampling is float32 always."""
    max_model_len: PositiveInt | None = None
    """Prompt and response tokens of one request; None: as many as the checkpoint allows."""
    max_prefill_tokens: PositiveInt | None = None
    """Prompt tokens computed at once (a longer single prompt is computed alone); None: 512 on a CPU, where more only
    adds padding, 8192 on a GPU."""
    kv_cache_bytes: PositiveInt | None = None
    """Bound of the cache, which grows with need; None: 2 GiB on a CPU, half of the free memory on a GPU,
    or where the weights leave less than two thirds of it, three quarters of what they leave."""
    weight_staging: Literal["auto", "device", "host"] = "auto"
    """Memory in which a version of the weights waits for its commit: `device`, beside the served one; `host`, to be
    written over the served one while generation pauses. `auto`: on a GPU without room for two, `host`."""
    enforce_eager: bool = False
    """Launch each operation of a decode step by itself, where a GPU would repeat recorded steps (CUDA graphs). A CPU
    and mixtures of experts do so always."""
    stream_interval: PositiveInt = Field(default=16)
    """Decode steps between two deltas of a request: waking a consumer costs more than a token."""
    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response; None: all that generation_config.json, config.json and the tokenizer (`eos_token`)
    name. Empty: responses end at stop strings and lengths only."""

    def faults(self, machine: Machine, model: Path) -> Iterator[tuple[str, str]]:
        """Options that this machine or the model does not support, each with one sentence."""
        if self.device == "cuda" and not machine.gpus:
            yield "device", "cuda, and this machine has no GPU"
        config = machine.json(model / "config.json")
        architectures = config.get("architectures") or ["an unnamed architecture"]
        if config and architectures[0] not in TORCH_ARCHITECTURES:
            yield (
                "",
                f"the torch engine cannot run {architectures[0]} of {model} (it runs"
                f" {', '.join(TORCH_ARCHITECTURES)}; other models need rollout.name=vllm or sglang)",
            )
            return
        text = config.get("text_config") or config
        act = text.get("hidden_act", "silu")
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        for wrong, what in (
            (act != "silu", f"the activation {act} of {model} (it computes silu)"),
            (
                kind not in STATIC_ROPES,
                f"the rope type {kind} of {model} (it computes {', '.join(STATIC_ROPES)})",
            ),
        ):
            if wrong:
                yield "", f"the torch engine cannot run {what}; want rollout.name=vllm or sglang"
        yield from longer_than(config, self.max_model_len, model)


def check_rollout(
    rollout: RolloutConfig, machine: Machine, model: Path, *, tries: bool = False
) -> Iterator[Problem]:
    """Every problem of the section; with `tries` also those that a program finds only when it loads its parts."""
    yield from _program_options(rollout, machine, model, tries)
    yield from check_options(
        ("rollout", "engine"), ENGINES, rollout.name, rollout.engine, machine, model
    )
    yield from _unable(rollout)


def row_fault(program: str, extra_info: Mapping[str, Any]) -> str:
    """Why a program cannot play a row with this `extra_info`; empty where it can, or nothing is known of it."""
    if program not in plugins.known(PROGRAMS):
        return ""
    module: Any = importlib.import_module(f"{PROGRAMS}.{program}")
    return str(module.row_fault(extra_info)) if hasattr(module, "row_fault") else ""


def _program_options(
    rollout: RolloutConfig, machine: Machine, model: Path, tries: bool
) -> Iterator[Problem]:
    """Check options of built-in programs, which import fast; a worker loads what they name."""
    name, options = rollout.program, rollout.program_options
    if name not in plugins.known(PROGRAMS):
        return
    program, key = importlib.import_module(f"{PROGRAMS}.{name}"), "rollout.program_options"
    if not hasattr(program, "Config"):
        if options:
            yield ("rollout", "program_options"), f"{key}: the program {name!r} takes none"
        return
    try:
        config = read_options(program.Config, options, where=key)
        if hasattr(program, "check"):
            program.check(config)
        faults = getattr(config, "faults", None)
        wrong = list(faults(machine, model) if faults else ())
        if tries and not wrong and hasattr(program, "try_out"):
            wrong = [("env", said)] if (said := program.try_out(config, machine)) else []
        for option, text in wrong:
            yield ("rollout", "program_options", *option.split(".")), f"{key}.{option}: {text}"
    except ConfigError as error:
        yield ("rollout", "program_options"), str(error)


def _unable(rollout: RolloutConfig) -> Iterator[Problem]:
    """Problems where the engine cannot sample as asked, or has another rule for top_k and top_p together."""
    asked = [rollout.sampling(max_tokens=1, seed=0), rollout.val_sampling(max_tokens=1, seed=0)]
    twice = next((sampling for sampling in asked if sampling.cuts_twice), None)
    kind = plugins.config_class(ENGINES, rollout.name)
    with contextlib.suppress(ConfigError):  # wrong options are reported at their place
        options: Any = read_options(kind, rollout.engine, where="rollout.engine") if kind else None
        if hasattr(options, "unable"):
            for at, sampling in zip((("rollout",), ("rollout", "val_kwargs")), asked, strict=True):
                for key, why in options.unable(sampling):
                    yield (*at, key), f"{dotted((*at, key))}: {why}"
    joint = bool(getattr(kind, "joint_cut", False))
    if twice is not None and kind is not None and twice.joint_cut != joint:
        rule = "of the whole distribution" if joint else "of what top_k has left"
        yield (
            ("rollout", "top_k_top_p"),
            f"rollout.top_k_top_p: top_k {twice.top_k} with top_p {twice.top_p}: {rollout.name} takes top_p {rule};"
            f" want {'joint' if joint else 'sequential'} to accept that, or one of the two alone",
        )
