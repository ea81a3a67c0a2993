"""The options that every engine with a server behind it has. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.contract.config import Config as BaseConfig


class ServerConfig(BaseConfig):
    """One of `url`, `python`, `command` says whose server it is."""

    url: str | None = None
    """A server that runs already; see docs/reference/engines.md for how to start one."""
    python: Path | None = None
    """The interpreter of the server's environment: one is started with it. None: this one, if it has it."""
    command: list[str] = Field(default_factory=list)
    """What starts a server instead of `python`; the arguments are appended."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and cache of a started server."""
    max_model_len: PositiveInt | None = None
    """Prompt and response tokens of one request; None: what the checkpoint allows."""
    extra_args: list[str] = Field(default_factory=list)
    """More arguments of a started server, such as --tensor-parallel-size 4."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment of a started server, such as CUDA_VISIBLE_DEVICES."""
    log: Path | None = None
    """What a started server writes; None: `meshrl-<engine>-<port>.log` among temporary files."""
    staging: Path | None = None
    """Where versions wait, on a file system that the server sees; None: shared memory, or temporary files."""
    stream_interval: PositiveInt = 16
    """Decode steps between two deltas of a request."""
    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response; None: the checkpoint's. Empty: only stops and lengths end one."""
    start_s: PositiveFloat | None = None
    """Deadline of the server's start; None: 900 for one that is started here, 10 for a `url`."""
    update_s: PositiveFloat = 600.0
    """Deadline of each step of a weight update."""
    silence_s: PositiveFloat = 600.0
    """A running request without a token for this long has failed."""
    restarts: NonNegativeInt = 3
    """Restores of the server in a row, with no response finished in between, before the engine gives up."""
