"""Engines over random tiny checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.rollout.engines.torch import TorchEngine, build

from .checkpoints import FIRST, Checkpoint, make_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model = make_model("Qwen3", head_dim=8, tie_word_embeddings=True)
    path = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(path)
    return Checkpoint(model, path)


EngineMaker = Callable[..., Awaitable[TorchEngine]]


@pytest.fixture
async def make_engine() -> AsyncIterator[EngineMaker]:
    """Builds engines that serve their checkpoint as version 1.0 (or nothing yet, with serve=False)."""
    engines: list[TorchEngine] = []

    async def make(
        path: Path, *, slots: int = 8, serve: bool = True, tokenizer: Any = None, **options: Any
    ) -> TorchEngine:
        options = {"device": "cpu", "stream_interval": 1} | options
        engine = build(options, model=path, slots=slots, tokenizer=tokenizer)
        engines.append(engine)
        await engine.start()
        if serve:
            await engine.serve_checkpoint(FIRST)
        return engine

    yield make
    for engine in engines:
        await engine.close()
