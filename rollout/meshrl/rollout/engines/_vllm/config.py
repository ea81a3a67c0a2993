"""Options of the `vllm` engine. Imports no torch."""

from __future__ import annotations

from meshrl.rollout.engines._server.config import ServerConfig


class Config(ServerConfig):
    """`rollout.engine` for `rollout.name: vllm`."""
