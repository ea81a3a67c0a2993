"""The stores: one module each, named as in `queue.store`; each defines `build(config, path)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshrl.common.plugins import load
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.store import Store


def build(config: QueueConfig, path: Path) -> Store:
    """The store that `config.store` names, at `config.path` or else at `path`.

    Raises:
        ConfigError: no such store; lists the known ones.
    """
    build_store: Callable[[QueueConfig, Path], Store] = load(__name__, config.store, "build")
    return build_store(config, config.path or path)
