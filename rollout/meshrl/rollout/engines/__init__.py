"""The engines: one file each, named by `rollout.name`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from meshrl.common import plugins
from meshrl.contract.ports import Engine
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.tokenizer import Tokenizer

ENGINES = "meshrl.rollout.engines"
TELLS_EXPERTS = "return_routed_experts"
"""The option of engines that must be started so; `rollout.routing_replay` sets it."""


class EngineBuilder(Protocol):
    """The `build` of an engine's module."""

    def __call__(
        self, config: Mapping[str, object], *, model: Path, slots: int, tokenizer: Tokenizer | None
    ) -> Engine:
        """An engine that is not started. Raises ConfigError for options it does not know."""
        ...


def build_engine(config: RolloutConfig, *, model: Path, tokenizer: Tokenizer | None) -> Engine:
    """The engine `config.name` over the checkpoint directory `model`, not started.

    Raises:
        ConfigError: no such engine, or wrong options for it.
    """
    build: EngineBuilder = plugins.load(ENGINES, config.name, "build")
    options = config.engine
    known = plugins.config_class(ENGINES, config.name) if config.routing_replay else None
    if known is not None and TELLS_EXPERTS in known.model_fields:
        options = {TELLS_EXPERTS: True, **options}
    return build(options, model=model, slots=config.slots, tokenizer=tokenizer)
