"""A queue, an engine, a gateway and a worker in one process, for agents that know nothing of meshrl."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.common.sockets import Certificates
from meshrl.contract import rows
from meshrl.contract.types import (
    PARTS,
    POSTED_REWARD,
    ROLLOUT_COLUMNS,
    Columns,
    GenerateDelta,
    GenerateRequest,
    RunSpec,
    SamplingParams,
    Task,
    Trajectory,
    Uid,
    Version,
    reward_stage,
    rollout_stage,
)
from meshrl.http.gateway.answers import refusal
from meshrl.http.gateway.app import build_app
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.engines import torch
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.streams import closing
from meshrl.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.http_server import serving_http
from meshrl.rpc.identity import TokenStore
from meshrl.rpc.runtime import ServerSettings
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ..waiting import answered, resident

RUN = "agents"
FIRST = Version(1, 0)
MAX_BODY = 200_000


class Recorded:
    """An engine that records everything it samples, by request."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.deltas: dict[str, list[GenerateDelta]] = {}
        self.left: list[str] = []
        """Requests whose answer was not read to its end."""

    @property
    def version(self) -> Version:
        version: Version = self._engine.version
        return version

    def stats(self) -> Any:
        return self._engine.stats()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        deltas = self.deltas[request.request_id] = []
        try:
            async with closing(self._engine.generate(request)) as stream:
                async for delta in stream:
                    deltas.append(delta)
                    yield delta
        finally:
            if not deltas or not deltas[-1].finish_reason:
                self.left.append(request.request_id)

    def sampled(self, uid: Uid) -> list[GenerateDelta]:
        """Deltas of one row, in the order of its requests."""
        mine = [n for n in self.deltas if n == str(uid) or n.startswith(f"{uid}/")]
        return [delta for name in mine for delta in self.deltas[name]]


@dataclass
class Mesh:
    queue: TransferQueue
    engine: Recorded
    torch: Any
    tokenizer: HuggingFaceTokenizer
    sessions: SessionTable
    worker: RolloutWorker
    tasks: Sequence[Task]
    taken: dict[Uid, Columns] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.sessions.url

    async def rows(self, count: int) -> dict[Uid, Trajectory]:
        """Trajectories of the first `count` groups that are complete."""
        batch = await self.queue.take(RUN, epoch=1, step=0, groups=count, batch_id="b", wait_s=60)
        uids = [row.uid for row in batch.rows]
        has_parts = PARTS in (await self.queue.run_state(RUN)).spec.stages[0].writes
        columns = (*ROLLOUT_COLUMNS, POSTED_REWARD, *(PARTS,) * has_parts)
        found = await self.queue.fetch_rows(RUN, uids, columns)
        self.taken = dict(zip(uids, found, strict=True))
        return {uid: rows.trajectory(uid, columns) for uid, columns in self.taken.items()}

    def posted(self, uid: Uid) -> Any:
        return rows.column_posted(self.taken[uid][POSTED_REWARD])

    async def until(self, state: str, count: int) -> None:
        await resident(self.queue, RUN, state, count)

    async def dead(self) -> Any:
        return await answered(lambda: self.queue.dead_letters(RUN))


def make_tasks(tokenizer: HuggingFaceTokenizer, count: int, **changes: Any) -> list[Task]:
    sampling = {"max_tokens": 300, "temperature": 1.0, "seed": 5, **changes.pop("sampling", {})}
    return [
        Task(
            run=RUN,
            task_id=f"t{i}",
            prompt_ids=np.array(tokenizer.encode(f"U:{i}+1?<eos>A:"), dtype=np.int32),
            ground_truth=str(i + 1),
            program=changes.get("program", "openai"),
            extra_info=changes.get("extra_info", {}),
            group_size=changes.get("group_size", 1),
            deadline_s=changes.get("deadline_s", 60.0),
            sampling=SamplingParams(**sampling),
        )
        for i in range(count)
    ]


@asynccontextmanager
async def agents_mesh(
    path: Path,
    options: dict[str, Any],
    *,
    tasks: int = 1,
    max_attempts: int = 3,
    tokens: Path | None = None,
    prompt_tokens: int | None = 200,
    scored: bool = False,
    engine: Any = None,
    slots: int = 8,
    deterministic: bool = False,
    **changes: Any,
) -> AsyncIterator[Mesh]:
    """`path` has the model (tests/chat_model.py). With `scored` rows wait for a reward stage."""
    tokenizer = load_tokenizer(path)
    prompts = make_tasks(tokenizer, tasks, **changes)
    async with AsyncExitStack() as stack:
        queue = await TransferQueue.open(MemoryStore())
        stack.push_async_callback(queue.close)
        parts = options.get("branch") == "each"
        stages = [rollout_stage(posted=True, parts=parts), *[reward_stage(posted=True)] * scored]
        spec = RunSpec(
            run=RUN,
            group_size=prompts[0].group_size,
            batch_groups=tasks,
            max_staleness=0.0,
            lease_ttl_s=60.0,
            max_attempts=max_attempts,
            stages=tuple(stages),
        )
        await queue.open_run(spec)
        await queue.acquire(RUN, "trainer")
        await queue.publish(RUN, FIRST)
        await queue.admit(RUN, prompts, cursor="end", wait_s=5)
        await queue.close_feed(RUN)
        if engine is None:
            engine = torch.build(
                {"device": "cpu", "stream_interval": 1},
                model=path,
                slots=slots,
                tokenizer=tokenizer,
            )
            await engine.start()
            stack.push_async_callback(engine.close)
            await engine.serve_checkpoint(FIRST)
        recorded = Recorded(engine)
        sessions = SessionTable(prompt_tokens=prompt_tokens)
        external = bool(options.get("external"))
        identity = ServerSettings().identity(TokenStore(tokens) if tokens else None)
        app = build_app(
            sessions,
            tokenizer,
            max_body_bytes=MAX_BODY,
            identity=identity if external else None,
        )
        sessions.url = await stack.enter_async_context(
            serving_http(app, "127.0.0.1", 0, Certificates(), name="gateway", refuse=refusal)
        )
        programs = await stack.enter_async_context(
            ProgramCache(
                changes.get("program", "openai"),
                options,
                gateway=sessions,
                containers=changes.get("containers"),
            )
        )
        await programs.start()
        worker = RolloutWorker(
            queue,
            engine if deterministic else recorded,  # type: ignore[arg-type]
            tokenizer,
            runs=[RUN],
            worker="w0",
            schedule=RowSchedule(
                slots=slots,
                deterministic=deterministic,
                checkpoint=CheckpointIntervals(tokens=4, ms=5),
            ),
            programs=programs,
        )
        sessions.on_demand = worker.wake
        running = asyncio.create_task(worker.run(grace_s=0.2))
        try:
            yield Mesh(queue, recorded, engine, tokenizer, sessions, worker, prompts)
        finally:
            worker.drain()
            sessions.drain()
            await running


def check_exact(mesh: Mesh, uid: Uid, row: Trajectory) -> None:
    """The row's sampled tokens, log-probs and versions are those of the engine, in order, and no others."""
    deltas = mesh.engine.sampled(uid)
    mask = row.loss_mask.astype(bool)
    joined = [np.concatenate([getattr(d, name) for d in deltas]) for name in ("tokens", "logprobs")]
    np.testing.assert_array_equal(row.tokens[mask], joined[0])
    np.testing.assert_array_equal(row.rollout_logprobs[mask], joined[1])
    assert not row.rollout_logprobs[~mask].any()
    versions: list[Version | None] = [None] * len(row.tokens)
    for span in row.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    expected = [delta.version for delta in deltas for _ in delta.tokens]
    assert [v for v in versions if v is not None] == expected
    assert [v is not None for v in versions] == mask.tolist()
