from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl.contract.errors import CorruptError, FencedError, InfraError
from meshrl.contract.types import Version
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.checkpoint.export import export_checkpoint, export_policy
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.model.snapshot import layout, take_snapshot
from meshrl.trainer.ranks.world import World

from . import tiny


def fresh(path: Path, world: World, optimizer: str = "adamw") -> tuple[Policy, Optimizers]:
    policy = build_policy(open_hf(path), world, ModelConfig(path=path))
    return policy, Optimizers(policy, OptimConfig(name=optimizer, lr=1e-2))  # type: ignore[arg-type]


def learn(policy: Policy, optimizers: Optimizers, seed: int) -> None:
    rows = tiny.rows(4, seed=seed)
    logprobs, _ = policy(pack(rows, [2] * 4), 1.0)
    (-logprobs.mean()).backward()
    optimizers.step(1e-2)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().clone() for n, p in policy.named_tensors()}  # type: ignore[attr-defined]


def state(step: int, epoch: int = 1) -> TrainerState:
    return TrainerState(run="r", step=step, epoch=epoch, seed=0, world_size=1, kl_coef=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_loaded_model_and_optimizer_go_on_bit_for_bit(
    tmp_path: Path, tiny_path: Path, world: World, optimizer: str
) -> None:
    policy, optimizers = fresh(tiny_path, world, optimizer)
    learn(policy, optimizers, 1)
    path = checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    learn(policy, optimizers, 2)
    other, others = fresh(tiny_path, world, optimizer)
    gradients: set[int] = set()
    for part in others.parts:
        part.register_step_pre_hook(
            lambda *_: gradients.add(sum(p.grad is not None for p in other.parameters()))
        )
    assert checkpoint.load(path, other, others) == state(1)
    assert gradients == {1}  # of zeros, which make the states; all at once would be a model more
    learn(other, others, 2)
    expected, got = weights(policy), weights(other)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_only_the_newest_checkpoints_are_kept(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, policy, optimizers, state(step), world, keep=2)
    assert [v for v, _ in checkpoint.complete(tmp_path)] == [Version(1, 3), Version(1, 2)]


def test_a_later_epoch_is_newer_than_a_higher_step(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.save(tmp_path, policy, optimizers, state(9, epoch=1), world, keep=2)
    checkpoint.save(tmp_path, policy, optimizers, state(4, epoch=2), world, keep=2)
    good = checkpoint.newest(tmp_path)
    assert good is not None and good[1].step == 4


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, tiny_path: Path, world: World) -> None:
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    path = checkpoint.save(tmp_path, policy, optimizers, state(2), world, keep=2)
    victim = next((path / "tensors").glob("*.distcp"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CorruptError, match=r"differs from what state.json says"):
        checkpoint.read_state(path)
    good = checkpoint.newest(tmp_path)
    assert good is not None and good[1].step == 1


def test_leftovers_of_a_killed_writer_are_ignored_and_swept(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    leftover = tmp_path / ".writing-step-00000007-epoch-0001"
    leftover.mkdir()
    (leftover / "state.json").write_text(json.dumps({}))
    assert checkpoint.newest(tmp_path) is None
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    assert not leftover.exists()


MOMENTS = {
    "before it begins": (checkpoint, "_sweep"),
    "as it asks": (checkpoint, "_check_owner"),
    "before its tensors": (checkpoint.state_dict_saver, "save"),
    "after its tensors": (checkpoint, "_hash_together"),
    "at its end": (checkpoint, "sync"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("after", [False, True])
def test_a_trainer_whose_run_is_taken_over_puts_no_checkpoint_in_place(
    tmp_path: Path,
    tiny_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    after: bool,
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.take_over(tmp_path, 1)
    checkpoint.save(tmp_path, policy, optimizers, state(1, epoch=1), world, keep=2)
    where, name = MOMENTS[moment]
    product = getattr(where, name)
    of_the_successor = tmp_path / ".writing-step-00000002-epoch-0002"

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(where, name, product)
        result = product(*args, **kwargs) if after else None
        checkpoint.take_over(tmp_path, 2)
        of_the_successor.mkdir()
        return result if after else product(*args, **kwargs)

    monkeypatch.setattr(where, name, overtaken)
    with pytest.raises((FencedError, InfraError), match=r"epoch 1 is fenced|checkpoint of step 2"):
        checkpoint.save(tmp_path, policy, optimizers, state(2, epoch=1), world, keep=2)
    assert [version for version, _ in checkpoint.complete(tmp_path)] == [Version(1, 1)]
    assert [path.name for path in tmp_path.glob(".writing-*")] == [of_the_successor.name]


def test_transformers_loads_an_export_of_the_live_model_and_of_the_checkpoint(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    learn(policy, optimizers, 1)
    checkpoint.save(tmp_path / "ckpt", policy, optimizers, state(1), world, keep=2)
    live = export_policy(policy, world, tmp_path / "live", tokenizer=tiny_path)
    stored = export_checkpoint(tmp_path / "ckpt", tmp_path / "stored", model=tiny_path)
    expected = weights(policy)
    for path in (live, stored):
        hf = AutoModelForCausalLM.from_pretrained(path)
        assert {n: p.shape for n, p in hf.named_parameters()} == {
            n: p.shape for n, p in expected.items()
        }
        assert all(torch.equal(p, expected[n]) for n, p in hf.named_parameters())
        assert (path / "tokenizer.json").read_text() == "{}"


def test_a_bfloat16_snapshot_holds_the_rounded_weights(tiny_path: Path, world: World) -> None:
    policy, _ = fresh(tiny_path, world)
    made = take_snapshot(
        policy, world, run="r", version=Version(1, 3), dtype="bfloat16", bucket_bytes=4096
    )
    assert made is not None
    expected = weights(policy)
    names = [spec.name for spec in made.manifest.tensors]
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names  # tied: sent once
    assert len(made.manifest.bucket_bytes) > 1
    for spec in made.manifest.tensors:
        data = made.bucket(spec.bucket)[spec.offset : spec.offset + spec.nbytes]
        tensor = torch.from_numpy(data.copy()).view(torch.bfloat16).view(spec.shape)
        assert torch.equal(tensor, expected[spec.name].to(torch.bfloat16))


def test_a_snapshot_does_not_move_when_training_goes_on(tiny_path: Path, world: World) -> None:
    policy, optimizers = fresh(tiny_path, world)
    made = take_snapshot(
        policy, world, run="r", version=Version(1, 3), dtype="float32", bucket_bytes=1 << 20
    )
    assert made is not None
    before = made.bucket(0).copy()
    learn(policy, optimizers, 1)
    assert np.array_equal(made.bucket(0), before)


def test_tensors_lie_aligned_in_order_and_a_large_one_alone() -> None:
    specs = layout(
        [("a", (3,)), ("b", (100,)), ("c", (2, 2)), ("d", ())],
        dtype="float32",
        itemsize=4,
        bucket_bytes=32,
    )
    assert [(s.bucket, s.offset, s.nbytes) for s in specs] == [
        (0, 0, 12),
        (1, 0, 400),
        (2, 0, 16),
        (2, 16, 4),
    ]
