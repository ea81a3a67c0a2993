"""A policy with LoRA sends its adapters alone, and engines serve the trainer's merged weights to the bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pytest import FixtureRequest
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3MoeConfig

from meshrl.contract.errors import UserError
from meshrl.contract.types import GenerateRequest, SamplingParams, Version
from meshrl.rollout.engines.torch import build
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, build_policy, load_hf, open_hf, random_hf
from meshrl.trainer.model.snapshot import WeightSnapshot, take_snapshot
from meshrl.trainer.ranks.world import World
from meshrl.weights.carrier import RunPaths
from tests.doubles.weights import HashSink

from ..waiting import until
from .weights_fleet import RUN, Fleet, opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=128, max_position_embeddings=64,
    )  # fmt: skip
    random_hf(config, seed=0).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="module")
def mixture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=64, max_position_embeddings=64,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, initializer_range=0.3,
    )  # fmt: skip
    random_hf(config, seed=0).save_pretrained(path)
    return path


class Learning:
    """A policy, with adapters unless told, that moves a little at each version."""

    def __init__(self, model: Path, world: World, rank: int = 2) -> None:
        config = ModelConfig(path=model, lora_rank=rank, lora_alpha=5)
        self.policy: Policy = build_policy(open_hf(model), world, config)
        self._optimizers = Optimizers(self.policy, OptimConfig(lr=1e-2))
        self._world = world

    def step(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        rows = [draw.integers(0, 64, 12).astype(np.int32) for _ in range(3)]
        logprobs, _ = self.policy(pack(rows, [3] * 3), 1.0)
        (-logprobs.mean()).backward()
        assert self._optimizers.step(1e-2) > 0

    def sent(
        self, step: int, dtype: str = "float32", *, adapters_only: bool = True
    ) -> WeightSnapshot:
        made = take_snapshot(
            self.policy, self._world, run=RUN, version=Version(1, step), dtype=dtype,
            bucket_bytes=1 << 16, adapters_only=adapters_only,
        )  # fmt: skip
        assert made is not None
        return made


def stand(fleet: Fleet, model: Path) -> None:
    """Replicas that join from now on have this model."""
    fleet.paths = RunPaths(directory=fleet.paths.directory, model_path=model)


@pytest.mark.parametrize(("carrier", "dtype"), [("gloo", "bfloat16"), ("disk", "float32")])
async def test_every_replica_serves_the_merged_weights_bit_for_bit(
    carrier: str, dtype: str, tmp_path: Path, model: Path, world: World
) -> None:
    learning = Learning(model, world)
    async with opened(carrier, tmp_path) as fleet:
        stand(fleet, model)
        engines = [fleet.join("a"), fleet.join("b")]
        await until(lambda: len(fleet.coordinator.fleet().replicas) == 2)
        for step in range(3):
            learning.step(step)
            sent = learning.sent(step, dtype)
            merged = learning.sent(step, dtype, adapters_only=False).manifest
            assert sent.manifest.total_bytes < merged.total_bytes / 4
            await fleet.carry(sent)  # type: ignore[arg-type]
            for engine in engines:
                assert engine.version == Version(1, step)
                assert engine.hashes == merged.bucket_hashes
        late = fleet.join("late")
        await until(lambda: late.version == Version(1, 2))
        assert late.hashes == engines[0].hashes


class AdapterHashSink(HashSink):
    """One that takes adapters as they are sent."""

    serves_adapters = True


async def test_an_engine_that_serves_adapters_gets_what_was_sent_beside_one_that_gets_it_merged(
    tmp_path: Path, model: Path, world: World
) -> None:
    learning = Learning(model, world)
    async with opened("disk", tmp_path) as fleet:
        stand(fleet, model)
        merging = fleet.join("merging")
        serving = fleet.join("serving", AdapterHashSink())
        await until(lambda: len(fleet.coordinator.fleet().replicas) == 2)
        learning.step(0)
        sent = learning.sent(0)
        await fleet.carry(sent)  # type: ignore[arg-type]
        assert serving.version == merging.version == Version(1, 0)
        assert serving.hashes == sent.manifest.bucket_hashes
        assert merging.hashes == sent.manifest.served.bucket_hashes


@pytest.mark.parametrize(
    ("base", "rank", "carrier"),
    [("model", 2, "disk"), ("mixture_model", 2, "disk"), ("mixture_model", 0, "delta")],
)
async def test_an_engine_decodes_as_the_policy_that_was_sent_does(
    base: str, rank: int, carrier: str, tmp_path: Path, world: World, request: FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(base)
    learning = Learning(model, world, rank)
    engine = build({"device": "cpu"}, model=model, slots=2)
    await engine.start()
    try:
        async with opened(carrier, tmp_path) as fleet:
            stand(fleet, model)
            fleet.join("a", engine)  # type: ignore[arg-type]
            await until(lambda: len(fleet.coordinator.fleet().replicas) == 1)
            for step in range(2):
                learning.step(step)
                await fleet.carry(learning.sent(step))  # type: ignore[arg-type]
            prompt = np.arange(5, 9, dtype=np.int32)
            greedily = SamplingParams(temperature=0.0, max_tokens=12)
            asked = GenerateRequest(request_id="r", prompt_ids=prompt, sampling=greedily)
            deltas = [delta async for delta in engine.generate(asked)]
        text = np.concatenate([prompt, *(delta.tokens for delta in deltas)])
        assert {delta.version for delta in deltas} == {Version(1, 1)}
        made = pack([text.astype(np.int32)], [len(prompt)])
        assert bool(learning.policy.is_greedy(made).all())
        logprobs = np.concatenate([delta.logprobs for delta in deltas])
        np.testing.assert_allclose(
            logprobs, learning.policy(made, 1.0)[0].detach().numpy(), atol=1e-5
        )
        start = build_policy(open_hf(model), world, ModelConfig(path=model))
        assert not np.allclose(logprobs, start(made, 1.0)[0].detach().numpy(), atol=1e-2)
    finally:
        await engine.close()


async def test_a_replica_with_another_base_model_ends_in_one_line_and_the_other_commits(
    tmp_path: Path, model: Path, world: World
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = next(other.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    learning = Learning(model, world)
    learning.step(0)
    async with opened("disk", tmp_path) as fleet:
        stand(fleet, model)
        good = fleet.join("good")
        stand(fleet, other)
        misled = fleet.join("misled")
        await until(lambda: len(fleet.coordinator.fleet().replicas) == 2)
        await fleet.carry(learning.sent(0))  # type: ignore[arg-type]
        assert good.version == Version(1, 0)
        assert misled.version is None
        with pytest.raises(
            UserError, match=r"other has the fingerprint .*adapter belongs to "
        ) as said:
            await fleet.controllers.pop("misled")
        assert "\n" not in str(said.value)


async def test_a_merge_that_comes_out_differently_is_never_served(
    tmp_path: Path, model: Path, world: World
) -> None:
    learning = Learning(model, world)
    learning.step(0)
    sent = learning.sent(0)
    adapter = sent.manifest.adapter
    assert adapter is not None
    wrong = replace(sent.manifest, adapter=replace(adapter, scale=adapter.scale * 2))
    async with opened("disk", tmp_path) as fleet:
        stand(fleet, model)
        engine = fleet.join("a")
        await until(lambda: len(fleet.coordinator.fleet().replicas) == 1)
        await fleet.carry(WeightSnapshot(wrong, sent.buckets))  # type: ignore[arg-type]
        await until(lambda: "merged here, are not what" in fleet.reason_of("a"))
        assert engine.version is None
        assert fleet.published == []


def test_a_checkpoint_of_other_names_is_sent_merged(
    tmp_path: Path, model: Path, world: World
) -> None:
    path = tmp_path / "renamed"
    shutil.copytree(model, path)
    hf = load_hf(model)
    tensors = {f"{name}_": p.detach().clone() for name, p in hf.named_parameters()}
    for file in path.glob("model*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    policy = build_policy(open_hf(model), world, ModelConfig(path=path, lora_rank=2))
    made = take_snapshot(
        policy, world, run=RUN, version=Version(1, 0), dtype="float32", bucket_bytes=1 << 20,
        adapters_only=True,
    )  # fmt: skip
    assert made is not None and made.manifest.adapter is None
