"""Versions broadcast into a vLLM server by its native NCCL backend: against a server of ours, without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.contract.errors import ConfigError, InfraError, UserError
from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.engines.vllm import build
from meshrl.rollout.native_updates.vllm import pack as pack_pieces
from meshrl.rollout.native_updates.vllm import update_info
from meshrl.rollout.server_engine.checkpoint import ITEM_BYTES, TensorRange
from meshrl.rollout.server_engine.engine import ServerEngine
from tests.doubles import nccl as double

from ..unit.rollout.checkpoints import make_model, pack
from ..waiting import gone

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
FIRST, SECOND, THIRD = Version(1, 0), Version(1, 1), Version(1, 2)


def model_of(seed: int) -> Any:
    return make_model("Qwen3", seed=seed, head_dim=8, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model_of(0).save_pretrained(path)
    return path


@pytest.fixture
async def make(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """Starts an engine over a server of its own."""
    started: list[ServerEngine] = []

    async def engine(start: bool = True, **options: Any) -> ServerEngine:
        server: dict[str, Any] = options.pop("server", {})
        defaults = {
            "command": [sys.executable, "-m", "tests.doubles.vllm_server"],
            "env": {"FAKE_VLLM": json.dumps({"once": str(tmp_path / "struck"), **server})},
            "log": str(tmp_path / "log"),
            "update": "native",
            "nccl": double.settings(),
            "packed_bytes": 6000,
        }
        made = build({**defaults, **options}, model=checkpoint, slots=2)
        started.append(made)
        if start:
            await made.start()
        return made

    yield engine
    for each in started:
        await each.close()


async def commit(engine: ServerEngine, model: Any, version: Version, dtype: str) -> None:
    await engine.stage_weights(*pack(model, version, dtype))
    await engine.commit_weights(version, OnUpdate.DRAIN)


async def plugin_report(engine: ServerEngine) -> Any:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{engine.url}/fake")).json()


def hashes(model: Any, dtype: str) -> dict[str, list[Any]]:
    tensors = {n: p.detach().to(getattr(torch, dtype)) for n, p in model.named_parameters()}
    return {
        name: [
            dtype,
            list(tensor.shape),
            xxhash.xxh3_128_hexdigest(tensor.view(torch.uint8).numpy().data),
        ]
        for name, tensor in tensors.items()
    }


async def test_every_byte_arrives_in_every_worker_also_after_the_root_was_killed(make: Any) -> None:
    engine = await make(server={"world": 2})
    for dtype, version in (("float32", FIRST), ("bfloat16", SECOND)):
        await commit(engine, model_of(version.step), version, dtype)
        assert engine.version == version
        found = await plugin_report(engine)
        assert found["hashes"] == hashes(model_of(version.step), dtype)
    start = ["weight_info", "get_world_size", "init_weight_transfer_engine", "models", "metrics"]
    update = ["pause", "start_weight_update", "update_weights", "finish_weight_update"]
    update += ["weight_info", "resume"]
    assert found["calls"] == start + 2 * update
    root = engine._server.client._sender._root._process  # type: ignore[attr-defined]
    os.kill(root.pid, signal.SIGKILL)
    await root._process.wait()
    await commit(engine, model_of(2), THIRD, "bfloat16")
    found = await plugin_report(engine)
    assert found["hashes"] == hashes(model_of(2), "bfloat16")
    assert found["calls"] == start + 2 * update + start[1:3] + update
    await engine.close()
    await gone(*found["pids"])


async def test_an_error_of_the_server_ends_a_broadcast_that_waits_for_it(make: Any) -> None:
    engine = await make(server={"fault": "refuse"})
    with pytest.raises(
        InfraError, match=r"loading weights 1\.0 failed in vLLM: .*no such parameter"
    ):
        await commit(engine, model_of(1), FIRST, "float32")
    # The server is half loaded: its successor, and a communicator of its own, take the next version.
    await commit(engine, model_of(2), SECOND, "float32")
    assert (await plugin_report(engine))["hashes"] == hashes(model_of(2), "float32")


async def test_a_server_that_never_answers_is_abandoned_at_the_deadline(make: Any) -> None:
    engine = await make(server={"fault": "deaf"}, update_s=1.0)
    with pytest.raises(InfraError, match=r"loading weights 1\.0 failed in vLLM"):
        await commit(engine, model_of(1), FIRST, "float32")


async def test_a_server_that_dies_between_two_buckets_comes_back(make: Any) -> None:
    engine = await make(server={"fault": "die"})
    with pytest.raises(InfraError, match=r"loading weights 1\.0 failed in vLLM"):
        await commit(engine, model_of(1), FIRST, "float32")
    await commit(engine, model_of(2), SECOND, "float32")
    assert (await plugin_report(engine))["hashes"] == hashes(model_of(2), "float32")


async def test_a_root_that_stops_in_a_broadcast_is_killed_and_the_server_replaced(
    make: Any, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    fault = {"at": "middle", "nth": 2, "do": "stop", "once": str(stopped)}
    engine = await make(nccl=double.settings(faults=[fault]), update_s=4.0)
    with pytest.raises(InfraError, match=r"loading weights 1\.0 failed in vLLM"):
        await commit(engine, model_of(1), FIRST, "float32")
    await gone(int(stopped.read_text()))
    await commit(engine, model_of(2), SECOND, "float32")
    assert (await plugin_report(engine))["hashes"] == hashes(model_of(2), "float32")


async def test_a_server_without_the_backend_is_found_at_the_start(make: Any) -> None:
    engine = await make(start=False, server={"fault": "no_backend"})
    with pytest.raises(
        UserError, match=r"started without --weight-transfer-config .*nccl.*not configured"
    ):
        await engine.start()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nccl": {"librari": "cupy"}}, r"rollout\.engine\.nccl\.librari: .*mean 'library'"),
        ({"root": "meshrl.no.such"}, "cannot load 'meshrl.no.such'"),
        (
            {
                "update": "native",
                "nccl": {"env": {"NCCL_COMM_BLOCKING": "0"}, "library": "tests.doubles.nccl"},
            },
            "=0",
        ),
    ],
)
async def test_wrong_options_are_one_message(make: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await make(start=False, **options)


def cut(sizes: list[int], limit: int) -> list[list[int]]:
    """vLLM's rule, in its own words: break once the total is more than the limit."""
    buckets: list[list[int]] = []
    total = limit + 1
    for size in sizes:
        if total > limit:
            buckets.append([])
            total = 0
        buckets[-1].append(size)
        total += size
    return buckets


tensors = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 60)), min_size=1, max_size=40
)


def make_pieces(drawn: list[tuple[str, int]]) -> list[TensorRange]:
    pieces, start = [], 0
    for number, (dtype, items) in enumerate(drawn):
        end = start + items * ITEM_BYTES[dtype]
        pieces.append(
            TensorRange(name=f"t{number}", dtype=dtype, shape=(items,), start=start, end=end)
        )
        start = end
    return pieces


@given(drawn=tensors, limit=st.integers(1, 400))
@settings(deadline=None, max_examples=200)
def test_buckets_are_those_of_the_receiver_and_every_tensor_is_aligned(
    drawn: list[tuple[str, int]], limit: int
) -> None:
    pieces = make_pieces(drawn)
    buckets = pack_pieces(pieces, limit)
    sent = [piece for bucket in buckets for piece in bucket]
    assert sorted(sent, key=lambda piece: piece.start) == pieces
    assert cut([p.nbytes for p in sent], limit) == [[p.nbytes for p in b] for b in buckets]
    for bucket in buckets:
        offset = 0
        for piece in bucket:
            assert offset % ITEM_BYTES[piece.dtype] == 0
            offset += piece.nbytes
    assert update_info(buckets)["names"] == [piece.name for piece in sent]


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="no vLLM here: `make venv-vllm`")
def test_vllms_own_packing_cuts_the_same_buckets() -> None:
    random = np.random.default_rng(0)
    limit = 300
    drawn = [
        (str(random.choice(sorted(ITEM_BYTES))), int(random.integers(1, 60))) for _ in range(200)
    ]
    buckets = pack_pieces(make_pieces(drawn), limit)
    done = subprocess.run(
        [VLLM_PYTHON, "-c", THEIRS],
        input=json.dumps({**update_info(buckets), "limit": limit}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = [[piece.name for piece in bucket] for bucket in buckets]
    assert json.loads(done.stdout.splitlines()[-1]) == names


THEIRS = """
import json, sys, torch
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors
told = json.load(sys.stdin)
rows = zip(told["names"], told["dtype_names"], told["shapes"])
tensors = iter([(n, torch.zeros(s, dtype=getattr(torch, d))) for n, d, s in rows])
found = []
while (chunk := pack_tensors(tensors, lambda item: item[1], told["limit"])) is not None:
    found.append(chunk.names)
print(json.dumps(found))
"""
