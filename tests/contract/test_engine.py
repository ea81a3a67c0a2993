"""The engine contract, against every implementation that runs everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.ports import Engine
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.engines import build_engine
from meshrl.testing.contract.engine_suite import LONG, SLOTS, EngineSuite

from .. import servers, sglang_checkpoint
from ..unit.rollout.checkpoints import make_model, pack


class TestEcho(EngineSuite):
    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[Engine]:
        options = {"tokens_per_s": 20_000, "tokens_per_delta": 8, "response_tokens": 2 * LONG}
        config = RolloutConfig(name="echo", slots=SLOTS, engine=options)
        engine = build_engine(config, model=tmp_path, tokenizer=None)
        await engine.start()
        yield engine
        await engine.close()

    def weights(self, version: Version) -> tuple[WeightManifest, Sequence[Uint8]]:
        manifest = WeightManifest(
            run="run", version=version, tensors=(), bucket_bytes=(3,), bucket_hashes=("",)
        )
        return manifest, [np.zeros(3, dtype=np.uint8)]


class TestTorch(EngineSuite):
    model: Any = None

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[Engine]:
        self.model = make_model("Qwen2", max_position_embeddings=2 * LONG)
        self.model.save_pretrained(tmp_path)
        options = {"device": "cpu", "eos_token_ids": [], "stream_interval": 4}
        config = RolloutConfig(name="torch", slots=SLOTS, engine=options)
        engine = build_engine(config, model=tmp_path, tokenizer=None)
        await engine.start()
        yield engine
        await engine.close()

    def weights(self, version: Version) -> tuple[WeightManifest, Sequence[Uint8]]:
        return pack(self.model, version)


class TestSglang(EngineSuite):
    """Against a server of ours with SGLang's routes."""

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[Engine]:
        model = sglang_checkpoint.make_checkpoint(tmp_path / "model", max_length=2 * LONG)
        options = {
            "command": servers.COMMAND,
            "env": servers.environment(servers.OURS),
            "extra_args": ["--step-s", "0.001"],  # else a response ends before an update can begin
            "eos_token_ids": [],
            "stream_interval": 4,
            "log": str(tmp_path / "log"),
        }
        config = RolloutConfig(name="sglang", slots=SLOTS, engine=options)
        engine = build_engine(config, model=model, tokenizer=None)
        await engine.start()
        yield engine
        await engine.close()

    def weights(self, version: Version) -> tuple[WeightManifest, Sequence[Uint8]]:
        return sglang_checkpoint.weights(version)
