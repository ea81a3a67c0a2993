"""The loop publishes a version when its plan is known; the snapshot, whose buckets are known before they come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig

from meshrl.contract.ports import WeightSource
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.loop.time_slices import Always
from meshrl.trainer.model.lora import Weight
from meshrl.trainer.model.policy import Policy, build_policy, open_hf, random_hf
from meshrl.trainer.model.snapshot import WeightSnapshot
from meshrl.trainer.ranks.world import Compute, World
from meshrl.weights.messages import SourceError, digest, gathered, whole

from . import tiny
from .rank_work import snapshot
from .ranks import Ranks

AMPLE_S = 60.0
SOURCE = cast(WeightSource, object())


class Fleet:
    """A publisher that says when it was given a version."""

    def __init__(self) -> None:
        self.given = threading.Event()
        self.cancelled = False
        self.takes_for_ever = False

    async def publish(self, source: WeightSource) -> None:
        assert source is SOURCE
        self.given.set()
        if self.takes_for_ever:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    async def drained(self) -> None: ...


def trainer(fleet: Fleet, snapshot: Callable[..., WeightSource], turns: object) -> Trainer:
    """The parts that publishing a version touches."""
    made = object.__new__(Trainer)

    async def keep_ranks_waiting(work: Awaitable[None]) -> None:
        await work

    parts: dict[str, Any] = {
        "_state": SimpleNamespace(epoch=1, step=3),
        "status": SimpleNamespace(phase=lambda phase: nullcontext(), step=3),
        "_settings": SimpleNamespace(
            run="r",
            weight_dtype="bfloat16",
            bucket_bytes=1,
            adapters_only=False,
        ),
        "_learner": SimpleNamespace(policy=None),
        "_world": None,
        "_compute": Compute(torch.device("cpu")),
        "_publisher": fleet,
        "_turns": turns,
        "_source": SimpleNamespace(keep_ranks_waiting=keep_ranks_waiting, giving_up=nullcontext),
        "_context": SimpleNamespace(snapshot=snapshot),
    }
    for name, part in parts.items():
        setattr(made, name, part)
    return made


async def published(fleet: Fleet, snapshot: Callable[..., WeightSource], turns: object) -> None:
    made = trainer(fleet, snapshot, turns)
    try:
        await made._publish()
    finally:
        made._compute.close()


async def test_a_version_is_under_way_before_its_gather_is_over() -> None:
    fleet = Fleet()

    def gather(*_: object, on_plan: Callable[[WeightSource], None], **__: object) -> WeightSource:
        on_plan(SOURCE)
        assert fleet.given.wait(AMPLE_S)  # the loop is free meanwhile
        return SOURCE

    await published(fleet, gather, Always())


async def test_what_cannot_be_planned_is_published_when_it_is_whole() -> None:
    fleet = Fleet()

    def gather(*_: object, **__: object) -> WeightSource:
        assert not fleet.given.is_set()
        return SOURCE

    await published(fleet, gather, Always())
    assert fleet.given.is_set()


async def test_a_gather_that_fails_ends_the_wait_for_the_fleet() -> None:
    fleet = Fleet()
    fleet.takes_for_ever = True

    def gather(*_: object, on_plan: Callable[[WeightSource], None], **__: object) -> WeightSource:
        on_plan(SOURCE)
        assert fleet.given.wait(AMPLE_S)
        raise ValueError("a rank has died")

    with pytest.raises(ValueError, match="a rank has died"):
        await published(fleet, gather, Always())
    await asyncio.sleep(0)
    assert fleet.cancelled


async def test_engines_that_use_the_device_too_get_a_version_when_it_is_whole() -> None:
    fleet = Fleet()
    order: list[str] = []

    class Shared:
        async def acquire(self) -> None: ...

        async def release(self, *, version_follows: bool = False) -> None:
            assert not fleet.given.is_set()
            order.append("released")

    def gather(*_: object, on_plan: Callable[[WeightSource], None], **__: object) -> WeightSource:
        on_plan(SOURCE)
        return SOURCE

    await published(fleet, gather, Shared())
    assert order == ["released"]
    assert fleet.given.is_set()


def taken(
    policy: Policy, world: World, planned: list[WeightSnapshot], **more: Any
) -> WeightSnapshot:
    how = {"dtype": "bfloat16", "bucket_bytes": 1 << 13, "on_plan": planned.append, **more}
    return snapshot(policy, world, **how)


def policy_of(path: Path, world: World, **more: Any) -> Policy:
    return build_policy(open_hf(path), world, ModelConfig(path=path, **more))


async def test_what_is_sent_is_known_before_a_byte_is_gathered(
    tiny_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[WeightSnapshot] = []
    seen: list[bool] = []
    shared = Weight.shared

    def watched(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        seen.append(bool(planned) and not planned[0].manifest.bucket_hashes)
        return shared(weight, dtype)

    monkeypatch.setattr(Weight, "shared", watched)
    sent = taken(policy_of(tiny_path, world), world, planned)
    assert planned == [sent]
    assert all(seen)
    assert len(seen) == len(sent.manifest.tensors)
    await whole(sent)
    assert len(sent.buckets) > 2
    for index, bucket in enumerate(sent.buckets):
        assert digest(bucket) == sent.manifest.bucket_hashes[index]
        of_bucket = [t for t in sent.manifest.tensors if t.bucket == index]
        assert (await gathered(sent, index))[0] == digest(bucket)
        assert len((await sent.gathered(index))[1]) == len(of_bucket)
        assert not bucket.flags.writeable


async def test_a_gather_that_fails_is_told_to_whoever_waits_for_its_buckets(
    tiny_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[WeightSnapshot] = []
    shared = Weight.shared

    def broken(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        if weight.shape == (37, 32):  # the embedding comes first
            return shared(weight, dtype)
        raise RuntimeError("rank 1 has died")

    policy = policy_of(tiny_path, world)
    monkeypatch.setattr(Weight, "shared", broken)
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        taken(policy, world, planned)
    with pytest.raises(SourceError, match="were not gathered: rank 1 has died"):
        await whole(planned[0])


def test_an_adapter_is_proposed_with_the_hashes_of_what_it_is_merged_into(
    tiny_path: Path, world: World
) -> None:
    planned: list[WeightSnapshot] = []
    policy = policy_of(tiny_path, world, lora_rank=2)
    sent = taken(policy, world, planned, adapters_only=True)
    assert not planned
    assert sent.manifest.adapter is not None
    assert sent.manifest.bucket_hashes


@pytest.mark.parametrize(
    ("model", "size", "parallel", "groups"),
    [
        ("dense", 2, {}, 1),
        ("untied", 2, {"tensor": 2}, 1),
        ("untied", 4, {"tensor": 2}, 2),
        ("mixture", 4, {"expert": 2}, 3),
        ("two experts", 4, {}, 1),  # more ranks than experts: some have none
        ("two experts", 4, {"expert": 2}, 3),
    ],
    ids=str,
)
def test_ranks_gather_a_bucket_in_one_collective_a_group_that_shares_it(
    ranks: Ranks,
    tiny_path: Path,
    mixture_path: Path,
    tmp_path: Path,
    model: str,
    size: int,
    parallel: dict[str, int],
    groups: int,
) -> None:
    path = tiny_path if model == "dense" else mixture_path
    if model == "untied":  # a vocabulary that ranks share
        path = tmp_path / "untied"
        random_hf(tiny.config(vocab_size=38, tie_word_embeddings=False), 0).save_pretrained(path)
    if model == "two experts":
        path = tmp_path / "two"
        config = AutoConfig.from_pretrained(mixture_path, num_experts=2)
        random_hf(config, 0).save_pretrained(path)
    ranks.run("snapshot", path, parallel, 1 << 13, output=tmp_path / "output", ranks=size)
    output = (tmp_path / "output").read_text()
    buckets, together, alone, wrong, tensors = map(int, output.split())
    assert buckets < tensors
    assert wrong == 0
    assert buckets > 1
    assert together <= groups * buckets, output
    assert together < alone, output
