"""Options of the `vllm` engine. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt

from meshrl.rollout.engines._server.config import ServerConfig


class Config(ServerConfig):
    """`rollout.engine` for `rollout.name: vllm`."""

    update: Literal["staged", "native"] = "staged"
    """How a version gets in: `staged`: every rank reads the staged file, through a plugin of ours; `native`: it is
    broadcast from here over NCCL to vLLM's own backend, which needs neither plugin nor a common file system."""
    nccl: dict[str, JsonValue] = Field(default_factory=dict)
    """For `native`: options of rank 0's process, the keys of `weights.nccl`."""
    packed_bytes: PositiveInt = 256 << 20
    """For `native`: a broadcast has as many whole tensors as it takes to be larger than this."""
    join_s: PositiveFloat = 120.0
    """For `native`: deadline for meeting the server's ranks."""
    root: str = "meshrl.weights.nccl.root"
    """For `native`: the module whose `build` makes rank 0."""
