"""A version waits for its commit on the engine's device or in host memory, as the device has room for two."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.chunk_digest import digest
from meshrl.contract.errors import CapacityError, EngineGoneError, NotFoundError, UserError
from meshrl.contract.ports import LentBucket
from meshrl.contract.types import OnUpdate, TensorSpec, Uint8, Version, WeightManifest
from meshrl.rollout.engines.torch import engine as torch_engine
from meshrl.rollout.engines.torch import staging
from meshrl.rollout.engines.torch.architecture import read_architecture
from meshrl.rollout.engines.torch.staging import HEADROOM, choose, free_of, needed_bytes, stage
from meshrl.rollout.engines.torch.weights import Weights
from meshrl.rollout.streams import sample
from tests.doubles.device import GPU, opened

from .checkpoints import Checkpoint, greedy, make_model, pack, request
from .conftest import EngineMaker

CPU, GIB = torch.device("cpu"), 1 << 30
NEXT = Version(1, 1)
PROMPT = [11, 12, 13]
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
}


def plan(gib: int, dtype: str = "bfloat16") -> WeightManifest:
    """A version of `gib` GiB, in one tensor and buckets of 256 MiB."""
    nbytes = gib * GIB
    words = nbytes // getattr(torch, dtype).itemsize
    tensor = TensorSpec(name="a", dtype=dtype, shape=(words,), bucket=0, offset=0, nbytes=nbytes)
    return WeightManifest(
        run="run",
        version=NEXT,
        tensors=(tensor,),
        bucket_bytes=(256 << 20,) * (4 * gib),
        bucket_hashes=(),
    )


@pytest.mark.parametrize(
    ("asked", "gib", "free_gib", "chosen"),
    [
        ("auto", 14, 40.0, "device"),
        ("auto", 14, 15.5, "device"),  # to the byte: the version, two buckets, a GiB
        ("auto", 14, 15.49, "host"),
        ("auto", 140, 60.0, "host"),
        ("host", 1, 60.0, "host"),
        ("device", 14, 40.0, "device"),
        ("device", 14, 12.0, None),
        ("auto", 14, None, "device"),  # on a CPU as ever
        ("host", 14, None, "host"),
    ],
)
def test_the_plan_and_the_free_memory_choose(
    asked: Any, gib: int, free_gib: float | None, chosen: str | None
) -> None:
    free = None if free_gib is None else int(free_gib * GIB)
    if chosen is None:
        with pytest.raises(
            CapacityError, match=r"weight_staging is device, and .* 15\.5 GiB, 12\.0"
        ):
            choose(asked, plan(gib), torch.bfloat16, free)
    else:
        assert choose(asked, plan(gib), torch.bfloat16, free)[0] == chosen


def test_what_a_second_version_takes_is_counted_in_the_engines_type() -> None:
    buckets = 2 * (256 << 20)
    assert needed_bytes(plan(4, "float32"), torch.bfloat16) == 2 * GIB + buckets + HEADROOM


def test_free_is_what_torch_keeps_too_within_the_engines_share_and_without_the_caches_growth() -> (
    None
):
    gpu = {"total": 80 * GIB, "allocated": 20 * GIB, "reserved": 34 * GIB}
    assert free_of(free=40 * GIB, share=1.0, promised=0, **gpu) == 54 * GIB
    assert free_of(free=40 * GIB, share=0.5, promised=0, **gpu) == 20 * GIB
    assert free_of(free=40 * GIB, share=0.5, promised=15 * GIB, **gpu) == 5 * GIB
    assert free_of(free=0, share=0.2, promised=GIB, **gpu) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_written_over_a_version_it_is_the_one_that_is_built(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    old, new = (make_model(family, seed=seed, **FAMILIES[family]) for seed in (1, 2))
    old.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    live = stage("device", *pack(old, NEXT), architecture, dtype, CPU).serve(None, CPU)
    places = [tensor.data_ptr() for tensor in tensors(live)]
    served = stage("host", *pack(new, NEXT), architecture, dtype, CPU).serve(live, CPU)
    built = stage("device", *pack(new, NEXT), architecture, dtype, CPU).serve(None, CPU)
    assert [tensor.data_ptr() for tensor in tensors(served)] == places
    for one, other in zip(tensors(served), tensors(built), strict=True):
        assert torch.equal(one, other)


def tensors(weights: Weights) -> list[torch.Tensor]:
    """Every tensor of a version, those that are derived, too."""
    found: list[torch.Tensor] = []

    def walk(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, tuple):
            [walk(each) for each in part]
        elif part.__class__.__module__.startswith("meshrl"):
            fields = getattr(part, "__dict__", None) or {
                n: getattr(part, n) for n in part.__slots__
            }
            [walk(each) for each in fields.values()]

    walk(weights)
    return found


@pytest.fixture(scope="module")
def other() -> Any:
    return make_model("Qwen3", seed=9, head_dim=8, tie_word_embeddings=True)


async def test_auto_follows_the_devices_memory_and_says_so_once(
    qwen3: Checkpoint,
    other: Any,
    make_engine: EngineMaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger=torch_engine.log.name)
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    free = [2 * GIB, 2 * GIB, GIB, GIB, 2 * GIB]
    monkeypatch.setattr(torch_engine, "free_bytes", lambda device, promised: free[step])
    seen = []
    for step in range(len(free)):
        model = other if step % 2 == 0 else qwen3.model
        await engine.stage_weights(*pack(model, Version(1, step + 1)))
        await engine.commit_weights(Version(1, step + 1), OnUpdate.DRAIN)
        seen.append(engine.stats().staging)
        answer = await sample(engine, request("a", PROMPT, temperature=0.0, max_tokens=8))
        model.generation_config.eos_token_id = None
        assert answer.tokens.tolist() == greedy(model, PROMPT, 8)
    assert seen == ["device", "device", "host", "host", "device"]
    said = [each.getMessage() for each in caplog.records if "staged on the" in each.getMessage()]
    assert [line.split(", as ")[0] for line in said] == [
        "from weights 1.1 on: staged on the device",
        "from weights 1.3 on: staged on the host",
        "from weights 1.5 on: staged on the device",
    ]
    assert "1.0 GiB are free" in said[1]


async def test_what_is_asked_for_and_does_not_fit_is_refused_and_changes_nothing(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[], weight_staging="device")
    monkeypatch.setattr(torch_engine, "free_bytes", lambda device, promised: GIB)
    with pytest.raises(CapacityError, match="want auto or host"):
        await engine.stage_weights(*pack(other, NEXT))
    misfit = make_model("Qwen3", head_dim=16, tie_word_embeddings=True)
    engine = await make_engine(qwen3.path, eos_token_ids=[], weight_staging="host")
    with pytest.raises(UserError, match="misshapen"):
        await engine.stage_weights(*pack(misfit, NEXT))
    await engine.stage_weights(*pack(other, NEXT))
    await engine.discard_weights(NEXT)
    answer = await sample(engine, request("a", PROMPT, temperature=0.0, max_tokens=8))
    qwen3.model.generation_config.eos_token_id = None
    assert answer.tokens.tolist() == greedy(qwen3.model, PROMPT, 8)


async def test_an_engine_whose_served_version_was_half_written_over_answers_nothing_more(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[], weight_staging="host")
    await engine.stage_weights(*pack(other, NEXT))

    def broken(live: Weights, *rest: Any) -> None:
        live.embedding.zero_()
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(staging, "overwrite", broken)
    with pytest.raises(EngineGoneError, match="illegal memory access"):
        await engine.commit_weights(NEXT, OnUpdate.IN_FLIGHT)
    with pytest.raises(EngineGoneError, match="illegal memory access"):
        await sample(engine, request("a", PROMPT, max_tokens=8))


class Receiver:
    """A receiver that writes into memory lent by the engine."""

    memory = "stub"

    def __init__(self, gpu: str = GPU) -> None:
        self.gpu = gpu

    async def settle(self) -> None:
        pass

    async def reach(self, bucket: LentBucket) -> None:
        write(bucket, np.zeros(bucket.nbytes, np.uint8))


def write(lent: LentBucket, bucket: Uint8) -> None:
    with opened(bytes.fromhex(lent.handle), lent.nbytes) as memory:
        memory[:] = bucket.tobytes()


async def test_a_version_in_lent_memory_is_served_from_its_commit_on_and_the_memory_is_lent_again(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=torch_engine.log.name)
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    for model in (other, qwen3.model):
        model.generation_config.eos_token_id = None

    async def answers() -> Any:
        answer = await sample(engine, request("a", PROMPT, temperature=0.0, max_tokens=8))
        return answer.tokens.tolist()

    seen: list[Sequence[LentBucket]] = []
    for step, model in ((1, other), (2, qwen3.model)):
        manifest, buckets = pack(model, Version(1, step))
        served = await answers()
        lent = await engine.lend(manifest, Receiver())
        for memory, bucket in zip(lent, buckets, strict=True):
            write(memory, bucket)
        await engine.stage_lent(manifest, [digest(bucket) for bucket in buckets])
        assert await answers() == served  # not before the commit
        await engine.commit_weights(Version(1, step), OnUpdate.IN_FLIGHT)
        for memory, bucket in zip(lent, buckets, strict=True):
            write(memory, np.zeros_like(bucket))  # nor after it
        assert await answers() == greedy(model, PROMPT, 8) != served
        seen.append(lent)
    assert seen[0] == seen[1] and engine.stats().staging == "device"
    (said,) = [each.getMessage() for each in caplog.records if "arriving" in each.getMessage()]
    assert "from weights 1.1 on: arriving in memory of GPU 0000:00:00.0" in said
    await engine.close()
    with pytest.raises(RuntimeError, match="invalid handle"):
        write(seen[0][0], buckets[0])


@pytest.mark.parametrize(
    ("asked", "gpu", "free", "why"),
    [
        ("host", GPU, 40 * GIB, "rollout.engine.weight_staging says so"),
        ("auto", GPU, GIB, "1.0 GiB are free"),
        ("auto", "0000:01:00.0", 40 * GIB, "the receiver is on GPU 0000:01:00.0"),
        ("device", GPU, GIB, None),
    ],
)
async def test_nothing_is_lent_without_room_or_to_another_gpu(
    asked: str,
    gpu: str,
    free: int,
    why: str | None,
    qwen3: Checkpoint,
    other: Any,
    make_engine: EngineMaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger=torch_engine.log.name)
    engine = await make_engine(qwen3.path, eos_token_ids=[], weight_staging=asked)
    await engine.stage_weights(*pack(other, NEXT))
    await engine.commit_weights(NEXT, OnUpdate.DRAIN)
    monkeypatch.setattr(torch_engine, "free_bytes", lambda device, promised: free)
    manifest, _ = pack(other, Version(1, 2))
    if why is None:
        with pytest.raises(CapacityError, match="weight_staging is device"):
            await engine.lend(manifest, Receiver(gpu))
    else:
        assert await engine.lend(manifest, Receiver(gpu)) == []
        assert why in caplog.text
    with pytest.raises(NotFoundError, match="no memory is lent"):
        await engine.stage_lent(manifest, [])


@pytest.mark.parametrize(
    ("share", "weights", "cache"),
    [(None, 1, 20), (None, 16, 18), (0.5, 4, 10), (0.2, 6, 1.5), (0.1, 6, 0)],
)
def test_a_cache_leaves_room_for_the_weights_in_the_share_of_its_engine(
    share: float | None, weights: int, cache: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHRL_GPU_MEMORY_SHARE", raising=False)
    if share is not None:
        monkeypatch.setenv("MESHRL_GPU_MEMORY_SHARE", str(share))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 40 * GIB))
    found = torch_engine._default_cache_bytes(torch.device("cuda"), weights * GIB)
    assert found == pytest.approx(cache * GIB)
