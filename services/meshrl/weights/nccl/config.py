"""Options of the processes that speak NCCL. Imports neither cupy nor torch."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat

from meshrl.contract.config import Config


class NcclConfig(Config):
    """The process that holds one rank, at either end; `carrier: nccl` has one per replica at both ends."""

    library: str = "cupy"
    """A module of `meshrl.weights.nccl.libraries` (cupy; stub: sockets, without a GPU), or a dotted path."""
    device: NonNegativeInt = 0
    """The CUDA device, of those that the process sees (CUDA_VISIBLE_DEVICES)."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment of the process, such as NCCL_SOCKET_IFNAME, or LD_PRELOAD with the libnccl.so.2 of the other
    side: all ranks need the identical version."""
    spare: bool = True
    """Keep a started process in waiting, because importing torch and cupy takes seconds."""
    start_s: PositiveFloat = 60.0
    """Longest time from the start of a process until it has found its GPU."""
