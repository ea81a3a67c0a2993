"""The engine over a stock vLLM server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshrl.contract.config import read_options
from meshrl.rollout.engines._server.engine import ServerEngine
from meshrl.rollout.engines._server.server import Host
from meshrl.rollout.engines._vllm.config import Config
from meshrl.rollout.engines._vllm.kind import Vllm
from meshrl.rollout.tokenizer import Tokenizer


def build(
    config: Mapping[str, object],
    *,
    model: Path,
    slots: int,
    tokenizer: Tokenizer | None = None,
) -> ServerEngine:
    """An engine over the checkpoint directory `model` that runs up to `slots` requests at once.

    `tokenizer` is needed by requests with stop strings only. Raises ConfigError for wrong options.
    """
    options = read_options(Config, config, where="rollout.engine")
    host = Host(Vllm(options), options, slots=slots)
    return ServerEngine(options, host, model=model, slots=slots, tokenizer=tokenizer)
