"""How many files and functions one row passes: a real disk queue behind gRPC, the echo engine, a reward function.

    .venv/bin/python benchmarks/hops.py
    .venv/bin/python benchmarks/hops.py --version
    .venv/bin/python benchmarks/hops.py --take

A task of one row goes through admission, rollout, reward and the trainer's calls while every call of a Python
function is noted; a row before it warms up what happens only once. Files and functions under `meshrl` are counted:
no generated code, no comprehensions. Everything but the reward function's own process runs in this one, so that both
ends of each call are seen. `--files` lists the files; `--check`, part of `make check`, fails beyond MOST, or if a
version passes more than MOST_OF_VERSION. The last line is JSON.

`--version` counts what a version of the weights passes, from the trainer's `publish` to two engines that serve it, by
`shm` and by `gloo`, and lists the files of the weight plane; those of other rooms are counted beside them.

`--take` follows a take, and a lease, through the queue, as its reader does: each function where it is first called,
by its place (PLACES), and how often the place changes; `files` counts changes of the file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import grpc
import numpy as np
from fleet_bench.parts import FIRST, RUN, serve_version

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ of the checkout

from meshrl.config.weights import WeightsConfig
from meshrl.contract.types import (
    REWARD_STAGE,
    ROLLOUT_STAGE,
    RunSpec,
    SamplingParams,
    Task,
    Version,
)
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.reward_stage import RewardStage
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.testing.engines.echo import build
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores import build as build_store
from meshrl.transferqueue.stores.memory import MemoryStore
from meshrl.weights.carrier import RunPaths
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.replica_controller import ReplicaController, ServedEngine
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.transport import load_transport
from tests.doubles.weights import HashSink, StubSource

HOPS = ("admit", "stages", "train")
MOST = {"files": 44, "functions": 408}
"""Files and functions that one row may pass."""
MOST_OF_VERSION = 10
"""Files of the weight plane that one version may pass."""
MOST_OF_TAKE = 8
"""Changes of place of one take."""
PLACES = {
    "queue": "waiting",
    "signals": "waiting",
    "model": "state",
    "sampling": "state",
    "samplers": "state",
    "store": "storing",
    "payload": "storing",
    "stores": "storing",
}
"""The place of each module and folder of the queue: how calls wait, a run's state, what is kept and read back."""
TRIES = 3
"""Rows that `--check` counts at most: what all of them called is what a row must pass."""
COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "reward")


C = TypeVar("C", bound="Calls")


class Numbers:
    """A tokenizer without words."""

    def decode(self, ids: Any) -> str:
        return "#### 4"


class Calls:
    """Code objects under `meshrl`, by the hop in which they were called."""

    def __init__(self, *hops: str) -> None:
        self.hop = ""
        self._code: dict[str, set[CodeType]] = {hop: set() for hop in hops}

    def enter(self, hop: str) -> None:
        """Calls count to `hop` from here on; to none if it is empty."""
        self.hop = hop

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self.hop:
            self._code[self.hop].add(frame.f_code)

    def keep(self, other: Calls) -> None:
        """Only what another row called too: a busy machine's timers come between one row and not the next."""
        called: set[CodeType] = set().union(*other._code.values())
        for codes in self._code.values():
            codes &= called

    def counts(self) -> dict[str, dict[str, int]]:
        """Hop to files and functions; `row` is all of them together."""
        every = {**self._code, "row": set().union(*self._code.values())}
        counted = {}
        for hop, codes in every.items():
            ours = {(code.co_filename, code.co_qualname) for code in codes if _is_ours(code)}
            counted[hop] = {"files": len({file for file, _ in ours}), "functions": len(ours)}
        return counted

    def files(self) -> list[str]:
        """Every file that was passed."""
        every: set[CodeType] = set().union(*self._code.values())
        return sorted({code.co_filename for code in every if _is_ours(code)})


def _is_ours(code: CodeType) -> bool:
    """Functions of the product; comprehensions and generator expressions belong to theirs."""
    file = code.co_filename
    return (
        "/meshrl/" in file
        and "_pb2" not in file
        and "/testing/" not in file
        and not code.co_name.startswith("<")
    )


async def pass_rows(folder: Path, calls: Calls) -> None:
    """One row to warm up, so that what happens once is not counted, then the one that is."""
    async with _mesh(folder) as queue:
        await _pass_row(queue, step=0, enter=lambda hop: None)
        await _pass_row(queue, step=1, enter=calls.enter)
        assert (await queue.ledger(RUN)).trained == 2


async def _pass_row(queue: QueueClient, *, step: int, enter: Callable[[str], None]) -> None:
    """From `admit` to `commit`; the stages work beside it, so what they do counts to the hop of that moment."""
    task = Task(
        run=RUN,
        task_id=f"t{step}",
        prompt_ids=np.arange(8, dtype=np.int32),
        group_size=1,
        data_source="openai/gsm8k",
        ground_truth="4",
        sampling=SamplingParams(max_tokens=8),
    )
    enter("admit")
    await queue.admit(RUN, [task], cursor=str(step), wait_s=10)
    enter("stages")
    batch_id = f"b{step}"
    batch = await queue.take(RUN, epoch=1, step=step, groups=1, batch_id=batch_id, wait_s=60)
    enter("train")
    await queue.fetch_rows(RUN, [row.uid for row in batch.rows], COLUMNS)
    await queue.settle(RUN, epoch=1, step=step, batch_id=batch_id)
    await queue.commit(RUN, epoch=1, step=step + 1)
    enter("")


@asynccontextmanager
async def _mesh(folder: Path) -> AsyncIterator[QueueClient]:
    """Queue, rollout worker and reward stage, at work."""
    config = QueueConfig()
    core = await TransferQueue.open(build_store(config, folder))
    settings = ServerSettings(port=0, metrics_port=None)
    async with GrpcServer(settings, [QueueServicer(core)]) as server:
        await server.ready()
        async with QueueClient(f"127.0.0.1:{server.port}") as queue:
            spec = RunSpec(
                run=RUN,
                group_size=1,
                batch_groups=1,
                max_staleness=math.inf,
                stages=(ROLLOUT_STAGE, REWARD_STAGE),
            )
            await queue.open_run(spec)
            await queue.acquire(RUN, "trainer")
            await queue.publish(RUN, FIRST)
            engine = build({"tokens_per_s": 1000.0}, model=folder, slots=1)
            await engine.start()
            await serve_version(engine, FIRST)
            rollout = RolloutWorker(
                queue,
                engine,
                Numbers(),
                runs=[RUN],
                worker="rollout-0",
                schedule=RowSchedule(slots=1, checkpoint=CheckpointIntervals(tokens=4, ms=1)),
            )
            judge = build_judge(
                RewardConfig.model_validate({"functions": [{"name": "gsm8k"}], "workers": 1})
            )
            await judge.start()
            reward = RewardStage(queue, [RUN], judge, worker="reward-0")
            try:
                async with asyncio.TaskGroup() as stages:
                    stages.create_task(rollout.run(grace_s=5))
                    stages.create_task(reward.run(grace_s=5))
                    yield queue
                    rollout.drain()
                    reward.drain()
            finally:
                await judge.close()
                await engine.close()
    await core.close()


async def pass_versions(folder: Path, calls: Calls, carrier: str) -> None:
    """Some versions to two engines in this process; the last one counts, for the first ones open channels."""
    # No deadline is near: no heartbeat comes between.
    config = WeightsConfig(carrier=carrier, base_s=600, silence_s=3000)
    paths, run = RunPaths(directory=folder), f"hops-{carrier}"
    committed: asyncio.Queue[Version] = asyncio.Queue()
    coordinator = WeightCoordinator(
        config,
        run=run,
        epoch=1,
        transport=load_transport(config, paths),
        on_committed=committed.put,
    )
    settings = ServerSettings(port=0, metrics_port=None, drain_grace_s=0)
    async with coordinator, GrpcServer(settings, [WeightsServicer(coordinator)]) as server:
        engines = [HashSink() for _ in range(2)]
        controllers = [
            ReplicaController(
                config,
                run=run,
                replica=f"rollout-{number}",
                engine=ServedEngine(engine, config),
                transport=load_transport(config, paths),
                connect=lambda: grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"),
            )
            for number, engine in enumerate(engines)
        ]
        running = [asyncio.create_task(controller.run()) for controller in controllers]
        while len(coordinator.fleet().replicas) < len(engines):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for step in range(3):
            source = StubSource(run, Version(1, step), buckets=2)
            calls.enter("version" if step == 2 else "")
            await coordinator.publish(source)
            await committed.get()
            await coordinator.drained()
            calls.enter("")
            assert {engine.version for engine in engines} == {Version(1, step)}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def noted(work: Callable[[Path, Calls], Coroutine[Any, Any, None]], calls: C) -> C:
    """`calls`, with those of one row, or of one version."""
    threading.setprofile(calls.note)
    sys.setprofile(calls.note)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(work(Path(folder), calls))
    sys.setprofile(None)
    threading.setprofile(None)
    return calls


def version() -> int:
    """Count what a version passes; 1 if that is too much, and `--check` is asked for."""
    logging.getLogger("meshrl.weights").setLevel(logging.ERROR)  # the replicas leave at the end
    counts, most = {}, 0
    for carrier in ("shm", "gloo"):
        calls = noted(partial(pass_versions, carrier=carrier), Calls("version"))
        plane = [file for file in calls.files() if "/meshrl/weights/" in file]
        if "--version" in sys.argv:
            print(*(f"{carrier}: {file.partition('/meshrl/')[2]}" for file in plane), sep="\n")
        every = calls.counts()["version"]
        counts[carrier] = {"files": len(plane), "files_of_other_rooms": every["files"] - len(plane)}
        counts[carrier]["functions"] = every["functions"]
        most = max(most, len(plane))
        print(
            f"{carrier:8} {len(plane):4} files of the weight plane, {every['files'] - len(plane)} of other rooms,"
            f" {every['functions']} functions"
        )
    if "--check" in sys.argv and most > MOST_OF_VERSION:
        print(f"one version may pass {MOST_OF_VERSION} files of the weight plane")
        return 1
    if "--version" in sys.argv:
        print(json.dumps(counts))
    return 0


class Walk:
    """Functions of the queue in the order in which one call first comes to them; other tasks are left out."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._files: dict[CodeType, str] = {}

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        code, room = frame.f_code, "/meshrl/transferqueue/"
        if event != "call" or room not in code.co_filename or not _is_ours(code):
            return
        if asyncio.current_task() is self._task:
            self._files.setdefault(code, code.co_filename.partition(room)[2])

    def files(self) -> list[str]:
        """The files in order, without repetitions of one that follows itself."""
        return [file for file, _ in groupby(self._files.values())]

    def places(self) -> list[str]:
        """The same, by PLACES."""
        names = (file.partition("/")[0].removesuffix(".py") for file in self._files.values())
        return [place for place, _ in groupby(PLACES.get(name, name) for name in names)]


async def _walks() -> dict[str, Walk]:
    """A lease and a take of a queue in memory; those of the step before warm up."""
    queue = await TransferQueue.open(MemoryStore())
    actors, walks = Actors(queue), {}
    await actors.start(spec(batch_groups=4, max_staleness=4.0))
    await actors.feed(tasks(8))
    for step in range(2):
        walks["lease"] = Walk()
        sys.setprofile(walks["lease"].note)
        lease = await actors.lease(limit=4)
        sys.setprofile(None)
        await actors.write(lease)
        await actors.write(await actors.lease("reward"))
        walks["take"] = Walk()
        sys.setprofile(walks["take"].note)
        await actors.take(step, 1)
        sys.setprofile(None)
    await queue.close()
    return walks


def take() -> int:
    """Follow a lease and a take; 1 if the take changes places too often, and `--check` is asked for."""
    walks = asyncio.run(_walks())
    counts = {}
    for name, walk in walks.items():
        places, files = walk.places(), walk.files()
        counts[name] = {"places": len(places) - 1, "files": len(files) - 1}
        print(f"{name:8} {len(places) - 1:4} changes of place: {' > '.join(places)}")
        print(f"{name:8} {len(files) - 1:4} changes of file, between {len(set(files))}")
    if "--check" in sys.argv and counts["take"]["places"] > MOST_OF_TAKE:
        print(f"one take may change places {MOST_OF_TAKE} times")
        return 1
    print(json.dumps(counts))
    return 0


def fits(calls: Calls) -> bool:
    """Within MOST."""
    return all(calls.counts()["row"][what] <= most for what, most in MOST.items())


def main() -> int:
    if "--version" in sys.argv:
        return version()
    if "--take" in sys.argv:
        return take()
    calls, checks = noted(pass_rows, Calls(*HOPS)), "--check" in sys.argv
    for _ in range(TRIES - 1):
        if not checks or fits(calls):
            break
        calls.keep(noted(pass_rows, Calls(*HOPS)))
    if "--files" in sys.argv:
        print(*calls.files(), sep="\n")
    counts = calls.counts()
    for hop, numbers in counts.items():
        print(f"{hop:8} {numbers['files']:4} files {numbers['functions']:5} functions")
    if checks and not fits(calls):
        print(f"one row may pass {MOST['files']} files and {MOST['functions']} functions")
        return 1
    if checks and version():
        return 1
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
