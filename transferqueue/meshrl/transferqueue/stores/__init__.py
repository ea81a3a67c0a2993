"""Where rows are kept: one module each, its name is the config value, each defines `build(config, path)`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from meshrl.contract.plugins import load
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.store import Store


def build(config: QueueConfig, path: Path) -> Store:
    """The store that `config.store` names, at `config.path` or else at `path`.

    Raises:
        ConfigError: no such store; lists the known ones.
    """
    make = load(__name__, config.store, "build")
    return cast(Store, make(config, config.path or path))
