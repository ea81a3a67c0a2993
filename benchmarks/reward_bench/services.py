"""A queue and a reward service as processes, as `meshrl up` would start them, and how long people wait for them.

submit     POST /v1/rewards with a source not seen before, then POST /v1/rewards/NAME/score with one sample
stored     `meshrl reward rescore`: rows of a file to the service and back
resident   `meshrl reward rescore-run`: rows in the queue lose their score and get it again
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import yaml

from meshrl.config.loading import load_recipe
from meshrl.config.stages import train_spec
from meshrl.contract.ports import Queue
from meshrl.contract.rows import rollout_write
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    Outcome,
    RowWrite,
    Sample,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.launcher.address_book import ServiceAddress, free_port
from meshrl.launcher.service import is_serving
from meshrl.rpc import credentials
from meshrl.rpc.clients.operators import RewardRegistryClient
from meshrl.rpc.clients.queue import QueueClient

RUN, GROUP, LEASED = "bench", 8, 1024
PART = 2048
"""Stored rows on their way at once, as the command has them."""
SOURCE = """
# {number}
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.partition("#### ")[2] == ground_truth)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The addresses of the two services."""

    queue: Queue
    registry: RewardRegistryClient
    http: str


@asynccontextmanager
async def mesh(groups: int) -> AsyncIterator[Mesh]:
    """Two processes; the run is open, and empty."""
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "base.py").write_text(SOURCE.format(number="base"))
        recipe = directory / "recipe.yaml"
        sections = {
            "run": {"name": RUN, "dir": str(directory / "run")},
            "model": {"path": "not-needed"},
            "data": {"train_batch_size": groups},
            "rollout": {"n": GROUP},
            "actor": {"use_kl_loss": False},
            "reward": {"custom_reward_function": {"path": str(directory / "base.py")}},
        }
        recipe.write_text(yaml.safe_dump(sections))
        async with serving("queue", recipe) as queue_at, _client(directory, queue_at) as queue:
            await queue.open_run(train_spec(load_recipe(recipe, check=False)))
            async with (
                serving("reward", recipe, "--queue", queue_at) as reward_at,
                RewardRegistryClient(reward_at) as registry,
            ):
                http = (await registry.names()).http_address
                yield Mesh(queue=queue, registry=registry, http=http)


def _client(directory: Path, address: str) -> QueueClient:
    """A client with the credential of the run's queue; later clients present it too."""
    credentials.use_run_directory(directory / "run")
    return QueueClient(address)


@asynccontextmanager
async def serving(kind: str, recipe: Path, *options: str) -> AsyncIterator[str]:
    """One service, until the end of the body; its address."""
    port = free_port("127.0.0.1")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "meshrl.cli",
        "serve",
        kind,
        str(recipe),
        "--port",
        str(port),
        "--log-level",
        "ERROR",
        *options,
    )
    entry = ServiceAddress(kind=kind, host="127.0.0.1", port=port, metrics_port=0)
    try:
        while not await is_serving(entry):
            if process.returncode is not None:
                raise SystemExit(f"the {kind} service ended with {process.returncode}")
            await asyncio.sleep(0.02)
        yield entry.address
    finally:
        process.terminate()
        await process.wait()


async def submit_s(found: Mesh, times: int) -> list[float]:
    """Seconds from a submission to its first score, the service being warm."""
    took: list[float] = []
    credential = credentials.in_use()  # of the run: `_client` has set it
    headers = dict(credential.metadata()) if credential is not None else {}
    async with httpx.AsyncClient(base_url=found.http, headers=headers, timeout=60) as http:
        for number in range(times + 1):
            began = time.perf_counter()
            body = {"name": "reward", "source": SOURCE.format(number=number)}
            accepted = (await http.post("/v1/rewards", json=body)).raise_for_status().json()
            sample = {"solution": "#### 7", "ground_truth": "7"}
            answer = await http.post("/v1/rewards/reward/score", json={"samples": [sample]})
            (score,) = answer.raise_for_status().json()
            took.append(time.perf_counter() - began)
            assert (score["score"], score["reward_hash"]) == (1.0, accepted["hash"])
    return took[1:]


async def stored_per_s(found: Mesh, rows: int) -> float:
    """Rows of a file that are scored again in a second."""
    samples = [
        Sample(
            uid=Uid("stored", "rows", number),
            data_source="openai/gsm8k",
            solution=f"so it is {number}\n#### {number}",
            ground_truth=str(number),
            extra_info={},
        )
        for number in range(rows)
    ]
    began = time.perf_counter()
    for start in range(0, rows, PART):
        scores = await found.registry.score("reward", "", samples[start : start + PART])
        assert all(score.score == 1.0 for score in scores)
    return rows / (time.perf_counter() - began)


async def fill(found: Mesh, groups: int) -> None:
    """Answered rows, all scored once."""
    version = Version((await found.queue.acquire(RUN, "bench")).epoch, 0)
    await found.queue.publish(RUN, version)
    for start in range(0, groups, LEASED // GROUP):
        numbers = range(start, min(groups, start + LEASED // GROUP))
        tasks = [
            Task(
                run=RUN, task_id=str(number), prompt_ids=np.arange(64, dtype=np.int32),
                data_source="openai/gsm8k", ground_truth=str(number), group_size=GROUP,
            )
            for number in numbers
        ]  # fmt: skip
        await found.queue.admit(RUN, tasks, cursor=str(start), wait_s=60)
        left = len(tasks) * GROUP
        while left:
            lease = await found.queue.lease(
                [RUN], ROLLOUT_STAGE.name, worker="w", limit=left, version=version, wait_s=60
            )
            tokens = {row.uid: row.token for row in lease.rows}
            writes = [_answered(uid, version) for uid in tokens]
            await found.queue.write_rows(RUN, ROLLOUT_STAGE.name, tokens, writes)
            left -= len(writes)
    await _ready(found, groups * GROUP)


def _answered(uid: Uid, version: Version) -> RowWrite:
    answer = Trajectory(
        uid=uid,
        tokens=np.arange(128, dtype=np.int32),
        loss_mask=np.repeat(np.array([0, 1], dtype=np.uint8), 64),
        rollout_logprobs=np.zeros(128, dtype=np.float32),
        spans=(VersionSpan(version=version, start=64, end=128),),
        response_text=f"so it is {uid.task}\n#### {uid.task}",
    )
    return rollout_write(answer, Outcome.OK, "stop", version)


async def _ready(found: Mesh, rows: int) -> None:
    while (await found.queue.ledger(RUN)).resident["ready"] < rows:  # noqa: ASYNC110 - a ledger sends no event
        await asyncio.sleep(0.02)


async def resident_per_s(found: Mesh, rows: int) -> float:
    """Rows in the queue that are scored again in a second."""
    began = time.perf_counter()
    assert await found.queue.redo(RUN, "reward", ()) == rows
    await _ready(found, rows)
    return rows / (time.perf_counter() - began)


async def measure(rows: int, repeats: int) -> dict[str, float]:
    """Medians of `repeats` rounds after one that warms up."""
    groups = rows // GROUP
    async with mesh(groups) as found:
        submitted = await submit_s(found, repeats)
        await fill(found, groups)
        stored, resident = list[float](), list[float]()
        for _ in range(repeats + 1):
            stored.append(await stored_per_s(found, rows))
            resident.append(await resident_per_s(found, groups * GROUP))
    return {
        "submit_to_first_score_s": statistics.median(submitted),
        "slowest_submit_s": max(submitted),
        "stored_rows_per_min": 60 * statistics.median(stored[1:]),
        "resident_rows_per_min": 60 * statistics.median(resident[1:]),
    }


if __name__ == "__main__":
    print(asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2]))))
