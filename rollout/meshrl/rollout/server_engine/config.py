"""Options that every engine over a server has. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.common.config import Config as BaseConfig
from meshrl.common.config import Environment, Machine
from meshrl.common.sockets import is_loopback
from meshrl.contract.types import SamplingParams
from meshrl.rollout.config import longer_than


class ServerConfig(BaseConfig):
    """At most one of `url`, `python` and `command` is set: it says where the server comes from."""

    package: ClassVar[str] = ""
    """The server's Python package, for one that is started with the current interpreter; empty: not known."""
    joint_cut: ClassVar[bool] = False
    """The server's top_p is a share of the whole distribution, also beside top_k: `rollout.top_k_top_p: joint`."""

    pictures: ClassVar[bool] = False
    """The server is given the pictures of a prompt."""

    def unable(self, sampling: SamplingParams) -> Iterator[tuple[str, str]]:
        """Parameters under which the server gives other log-probs or tokens than other engines, and how."""
        yield from ()

    url: str | None = None
    """The address of a server that runs already; docs/reference/engines.md says how to start one."""
    python: Path | None = None
    """The interpreter of the server's environment, with which a server is started. None: the current interpreter."""
    command: list[str] = Field(default_factory=list)
    """A command that starts a server, instead of `python`; the arguments are appended."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and cache, for a server that is started here."""
    quantization: Literal["fp8"] | None = None
    """A server that is started here quantises the weights whenever it loads them; the trainer's stay as they are.
    Sets `algorithm.rollout_correction.rollout_is: token` where a recipe leaves it out (null there: none)."""
    max_model_len: PositiveInt | None = None
    """Prompt and response tokens of one request; None: as many as the checkpoint allows."""
    extra_args: list[str] = Field(default_factory=list)
    """More arguments for a server that is started here, such as --tensor-parallel-size 4."""
    env: Environment = Field(default_factory=dict)
    """More environment variables for a server that is started here, such as CUDA_VISIBLE_DEVICES."""
    log: Path | None = None
    """The log file of a server that is started here; None: `meshrl-<engine>-<port>.log` in a temporary directory."""
    staging: Path | None = None
    """A directory for staged versions, on a file system that the server can read; None: shared memory if there is
    space, else the temporary directory."""
    weight_staging: Literal["auto", "device", "host"] = "auto"
    """Memory in which a version waits for its commit: the server's device, which weights.carrier=nccl writes and the
    server loads from, or a file in host memory. auto: the device where it has room for a second version, on a server
    of one GPU, from the second version on. A version on the device is lost when the server ends: the rollout process
    is then restarted. See docs/explanation/weight-plane.md."""
    return_routed_experts: bool = False
    """A server that is started here tells the experts of tokens; `rollout.routing_replay` sets it."""
    max_lora_rank: NonNegativeInt = 0
    """Serve LoRA adapters of up to this rank as they are sent, beside the base model, where the server can: an update
    pauses nothing, and a response ends with the adapter that it began with. 0: adapters are merged before."""
    stream_interval: PositiveInt = 16
    """Decode steps between two deltas of a request."""
    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response; None: all that generation_config.json, config.json and the tokenizer (`eos_token`)
    name. Empty: responses end at stop strings and lengths only."""
    start_s: PositiveFloat | None = None
    """Deadline of the server's start, in seconds; None: 900 for one that is started here, 10 for a `url`."""
    update_s: PositiveFloat = 600.0
    """Deadline of each step of a weight update, in seconds."""
    silence_s: PositiveFloat = 600.0
    """Seconds without a token after which a running request has failed."""
    restarts: NonNegativeInt = 3
    """How often in a row the server is restored, with no response finished in between, before the engine stops."""

    @property
    def stages_out_of_sight(self) -> bool:
        """Versions are files of this machine, and the server is at a `url` of another."""
        if self.url is None or self.staging is not None:
            return False
        return not is_loopback(urlsplit(self.url).hostname or "")

    def faults(self, machine: Machine, model: Path) -> Iterator[tuple[str, str]]:
        """Options with which the server could not start on this machine or model, each with one sentence."""
        yield from longer_than(machine.json(model / "config.json"), self.max_model_len, model)
        if self.url is not None:
            return
        if self.python is not None:
            if not machine.program(str(self.python)):
                yield "python", f"no such program: {self.python}"
        elif self.command:
            if not machine.program(self.command[0]):
                yield "command", f"no program {self.command[0]!r} here"
        elif self.package and not machine.installed(self.package):
            yield (
                "",
                f"{self.package} is not installed here; set rollout.engine.python to the interpreter of its"
                " environment, or rollout.engine.url to a server that runs",
            )


def quantization_arguments(config: ServerConfig) -> tuple[str, ...]:
    """Arguments of quantization, which vLLM and SGLang call alike."""
    return () if config.quantization is None else ("--quantization", config.quantization)
