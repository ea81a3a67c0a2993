"""Pictures that go through a store: from a task to a worker, a reference and a trainer, over a real queue service."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import CorruptError, UnavailableError
from meshrl.contract.picture_store import PictureFolders, PictureStore, path_of
from meshrl.contract.rows import trajectory, with_media
from meshrl.contract.types import (
    MEDIA,
    ROLLOUT_COLUMNS,
    ROLLOUT_STAGE,
    ROW_MEDIA,
    Columns,
    Float32,
    Int32,
    Media,
    Outcome,
    RunSpec,
    SamplingParams,
    StageSpec,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.rollout.ports import Rollout
from meshrl.rollout.worker import ProgramCache, RolloutWorker
from meshrl.rpc.clients import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers.queue import QueueServicer
from meshrl.testing.engines import echo
from meshrl.trainer.reference import ReferenceStage, Seen
from meshrl.transferqueue.operations.pictures import PictureRemover
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from .test_rollout_worker import FIRST, Words, commit

RUN, GROUPS, GROUP = "demo", 4, 4
A, B = Media.of(b"a" * 5000), Media.of(b"b" * 5000)
SEEN = Media.of(b"seen" * 1000)
REFERENCE = StageSpec(name="reference", reads=("tokens",), writes=("ref_logprobs",))


async def play(task: Task, uid: Uid, *_: object) -> Rollout:
    """A row that an environment has answered with one more picture, and with the first one again."""
    assert task.media == (A, B)
    tokens = np.concatenate([task.prompt_ids, np.full(4, 9, np.int32)])
    mask = np.array([0] * len(task.prompt_ids) + [1] * 4, np.uint8)
    row = Trajectory(
        uid=uid,
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=-0.5 * mask.astype(np.float32),
        spans=(VersionSpan(version=FIRST, start=len(task.prompt_ids), end=len(tokens)),),
    )
    media = (*task.media, SEEN, A)
    return Rollout(trajectory=row, outcome=Outcome.OK, finish_reason="stop", media=media)


@dataclass
class Mesh:
    """A queue that serves, a client of it, and the store beside it."""

    queue: TransferQueue
    client: QueueClient
    pictures: PictureStore
    folders: PictureFolders
    engine: echo.EchoEngine
    saw: dict[Uid, tuple[Media, ...]] = field(default_factory=dict)
    """What the reference saw."""

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """A rollout worker and a reference, drained at the end."""
        programs = ProgramCache("pictures.program")
        worker = RolloutWorker(
            *(self.client, self.engine, Words()),
            runs=[RUN],
            worker="w",
            slots=8,
            programs=programs,
            pictures=self.pictures,
        )
        stage = ReferenceStage(
            *(self.client, [RUN], self.judged),
            worker="r",
            together=False,
            pictures=True,
            stored=self.pictures,
        )
        running = [asyncio.create_task(each.run(grace_s=5)) for each in (worker, stage)]
        try:
            yield
        finally:
            worker.drain()
            stage.drain()
            await asyncio.gather(*running)

    async def judged(
        self, rows: Sequence[Int32], seen: Sequence[Seen], *, temperature: float
    ) -> Sequence[Columns]:
        assert all(each.media == (A, B, SEEN, A) for each in seen)
        self.saw |= {Uid(RUN, "t", len(self.saw) + at): each.media for at, each in enumerate(seen)}
        logprobs: list[Float32] = [np.zeros(len(row), np.float32) for row in rows]
        return [{"ref_logprobs": each} for each in logprobs]

    async def feed(self, **changes: Any) -> None:
        options = {"batch_groups": GROUPS, "max_staleness": 0.0, **changes}
        stages = (ROLLOUT_STAGE, REFERENCE)
        await self.client.open_run(RunSpec(run=RUN, group_size=GROUP, stages=stages, **options))
        await self.client.acquire(RUN, "trainer")
        await self.client.publish(RUN, FIRST)
        tasks = [
            Task(
                run=RUN,
                task_id=f"t{number}",
                prompt_ids=np.arange(3, 8, dtype=np.int32),
                group_size=GROUP,
                sampling=SamplingParams(max_tokens=4),
                program="pictures.program",
                media=(A, B),
            )
            for number in range(GROUPS)
        ]
        assert await self.client.admit(RUN, tasks, cursor="end", wait_s=5) == GROUPS
        await self.client.close_feed(RUN)

    async def rows(self, uids: Sequence[Uid]) -> list[Trajectory]:
        """As the trainer reads them."""
        asked = (*ROLLOUT_COLUMNS, MEDIA, ROW_MEDIA)
        columns = await self.client.fetch(RUN, uids, asked)
        return with_media([trajectory(*each) for each in zip(uids, columns, strict=True)])


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    program = ModuleType("pictures.program")
    program.run = play  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, program.__name__, program)
    folders = PictureFolders(str(tmp_path / "pictures"))
    pictures = PictureStore(folders, inline_bytes=1, cached_bytes=0)
    queue = await TransferQueue.open(MemoryStore(), pictures=PictureRemover(folders, alone=True))
    engine = echo.build({"tokens_per_s": 10_000}, model=tmp_path, slots=8)
    await engine.start()
    await commit(engine)
    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    async with (
        GrpcServer(settings, [QueueServicer(queue)]) as server,
        QueueClient(server.address, retry_s=5) as client,
    ):
        client.pictures = pictures
        yield Mesh(queue, client, pictures, folders, engine)
    await engine.close()
    await queue.close()
    pictures.close()


async def test_pictures_reach_worker_reference_and_trainer_and_leave_with_their_rows(
    mesh: Mesh,
) -> None:
    await mesh.feed()
    assert mesh.queue.open_runs[0].open_bytes < 2000  # of tasks with 40,000 bytes of pictures
    async with mesh.working():
        batch = await mesh.client.take(RUN, epoch=1, step=0, groups=GROUPS, batch_id="b", wait_s=60)
    uids = [row.uid for row in batch.rows]
    assert len(mesh.saw) == len(uids) == GROUPS * GROUP
    kept: Mapping[str, int] = {each.sha256: len(each.data) for each in (A, B, SEEN)}
    for number in range(GROUPS):  # each once a group, not once a row
        assert mesh.folders.pictures(RUN, f"t{number}") == kept
    assert all(row.media == (A, B, SEEN, A) for row in await mesh.rows(uids))

    # One that is another picture fails its own rows, by name, and no others.
    mesh.folders._store.write(path_of(RUN, "t2", SEEN.sha256), b"other")
    with pytest.raises(CorruptError, match=r"t2/.* has other data than its name says"):
        await mesh.rows(uids)
    assert len(await mesh.rows([uid for uid in uids if uid.task != "t2"])) == 3 * GROUP

    await mesh.client.settle(RUN, epoch=1, step=0, batch_id="b")
    await mesh.client.publish(RUN, Version(1, 1))
    await mesh.client.commit(RUN, epoch=1, step=1)
    async with asyncio.timeout(20):
        while mesh.folders.tasks(RUN):  # noqa: ASYNC110 (a thread removes)
            await asyncio.sleep(0.01)
    ledger = await mesh.client.ledger(RUN)
    assert ledger.balanced and ledger.trained == GROUPS * GROUP


async def test_a_task_whose_picture_is_missing_is_a_dead_letter_and_the_others_go_on(
    mesh: Mesh,
) -> None:
    await mesh.feed(max_attempts=2)
    mesh.folders._store.remove(path_of(RUN, "t1", B.sha256))
    async with mesh.working():
        batch = await mesh.client.take(RUN, epoch=1, step=0, groups=GROUPS, batch_id="b", wait_s=60)
    assert {row.uid.task for row in batch.rows} == {"t0", "t2", "t3"}
    (letter,) = await mesh.client.dead_letters(RUN)
    assert letter.uid.task == "t1" and "is missing" in letter.reason and letter.attempts == 2
    assert (await mesh.client.ledger(RUN)).balanced


async def test_rows_are_given_back_while_the_store_is_away(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while their engine is away: it is no attempt of theirs."""
    await mesh.feed(max_attempts=1)
    mesh.pictures._give_up_s = 0.05
    read, failed = mesh.folders.read, []

    def away(run: str, task: str, media: Media) -> Media:
        if len(failed) < 40:
            failed.append(task)
            raise UnavailableError("the store is away")
        return read(run, task, media)

    monkeypatch.setattr(mesh.folders, "read", away)
    async with mesh.working():
        batch = await mesh.client.take(RUN, epoch=1, step=0, groups=GROUPS, batch_id="b", wait_s=60)
    assert len(batch.rows) == GROUPS * GROUP and len(failed) == 40
    assert not await mesh.client.dead_letters(RUN)
