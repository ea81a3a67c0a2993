"""Options of the `sglang` engine. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from meshrl.rollout.engines._server.config import ServerConfig


class Config(ServerConfig):
    """`rollout.engine` for `rollout.name: sglang`."""

    update: Literal["staged", "disk", "native"] = "staged"
    """How a version gets in: `staged`: every rank reads the staged file, through a loader of ours that the server was
    started with; `disk`: the same file through /update_weights_from_disk, without that loader; `native`: broadcast
    from this process through the server's own process group, which needs no common file system."""
    group_address: str = "127.0.0.1"
    """For `native`: where the server's ranks find this process."""
    group_backend: Literal["nccl", "gloo"] = "nccl"
    """For `native`: `gloo` is for machines without GPUs."""
    bucket_bytes: PositiveInt = 512 << 20
    """For `native`: bytes of one broadcast."""
