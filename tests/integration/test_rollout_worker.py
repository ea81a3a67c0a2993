"""The rollout worker between a real queue and a real engine, also where the engine misbehaves."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from meshrl.common import tracing
from meshrl.contract import rows
from meshrl.contract.errors import ConfigError, InfraError, UnavailableError
from meshrl.contract.types import (
    ROLLOUT_COLUMNS,
    ROLLOUT_STAGE,
    DeadLetter,
    OnUpdate,
    Outcome,
    RunSpec,
    SamplingParams,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
    WeightManifest,
)
from meshrl.rollout.circuit_breaker import CircuitState
from meshrl.rollout.config import CircuitBreakerConfig, RowSchedule
from meshrl.rollout.engines import torch
from meshrl.rollout.ports import Generator, Rollout
from meshrl.rollout.programs import ProgramCache, single_turn
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.worker import RolloutWorker
from meshrl.testing.engines import echo
from meshrl.testing.engines.echo import Behaviour
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ..unit.rollout.checkpoints import forced_logprobs, make_model
from ..waiting import answered, resident, until

RUN = "demo"
EIGHT = RowSchedule(slots=8)
GROUP = 4
FIRST = Version(1, 0)


class Words:
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


def tasks(count: int, *, run: str = RUN, group_size: int = GROUP, **changes: Any) -> list[Task]:
    sampling = changes.pop("sampling", SamplingParams(max_tokens=32))
    return [
        Task(
            run=run,
            task_id=f"t{i:03}",
            prompt_ids=np.arange(3, 7 + i % 5, dtype=np.int32),
            group_size=group_size,
            sampling=sampling,
            **changes,
        )
        for i in range(count)
    ]


async def open_run(queue: TransferQueue, prompts: Sequence[Task], **changes: Any) -> None:
    """A run with `prompts` admitted and its first version published."""
    run = prompts[0].run
    options = {"batch_groups": len(prompts), "max_staleness": 0.0, "lease_ttl_s": 5.0} | changes
    gated = bool(options.get("gated", True))
    spec = RunSpec(run=run, group_size=prompts[0].group_size, stages=(ROLLOUT_STAGE,), **options)
    await queue.open_run(spec)
    if gated:
        await queue.acquire(run, "trainer")
        await queue.publish(run, FIRST)
    assert await queue.admit(run, prompts, cursor="end", wait_s=5) == len(prompts)
    await queue.close_feed(run)


async def commit(engine: Any, version: Version = FIRST) -> None:
    manifest = WeightManifest(
        run=RUN, version=version, tensors=(), bucket_bytes=(), bucket_hashes=()
    )
    await engine.stage_weights(manifest, [])
    await engine.commit_weights(version, OnUpdate.DRAIN)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[echo.EchoEngine]:
    built = echo.build({"tokens_per_s": 10_000}, model=tmp_path, slots=8)
    await built.start()
    yield built
    await built.close()


@asynccontextmanager
async def working(
    queue: TransferQueue, engine: Any, *, runs: Sequence[str] = (RUN,), **options: Any
) -> AsyncIterator[RolloutWorker]:
    """A worker that runs, and is drained at the end."""
    programs = options.pop("programs", None)
    worker = RolloutWorker(
        queue,
        engine,
        Words(),
        runs=runs,
        worker="w0",
        schedule=RowSchedule(**{"slots": 8} | options),
        programs=programs,
    )
    task = asyncio.create_task(worker.run(grace_s=5))
    try:
        yield worker
    finally:
        worker.drain()
        await task


async def until_dead(queue: TransferQueue) -> Sequence[DeadLetter]:
    """Wait for the first rows that are given up."""
    dead = await answered(lambda: queue.dead_letters(RUN))
    assert (await queue.ledger(RUN)).balanced
    return dead


async def trajectories(queue: TransferQueue, run: str, groups: int) -> list[Trajectory]:
    batch = await queue.take(run, epoch=1, step=0, groups=groups, batch_id="b", wait_s=60)
    uids = [row.uid for row in batch.rows]
    columns = await queue.fetch_rows(run, uids, ROLLOUT_COLUMNS)
    return [rows.trajectory(uid, each) for uid, each in zip(uids, columns, strict=True)]


async def test_every_row_comes_back_as_a_trajectory(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(10))
    await commit(engine)
    async with working(queue, engine) as worker:
        done = await trajectories(queue, RUN, 10)
    assert len({row.uid for row in done}) == 40
    assert worker.stats.written == 40
    for row in done:
        prompt = row.prompt_length
        assert row.tokens[:prompt].tolist() == row.tokens[prompt:].tolist()
        assert row.response_text == Words().decode(row.tokens[prompt:])
        assert row.replica == "w0"
        assert row.spans == (VersionSpan(version=FIRST, start=prompt, end=len(row.tokens)),)
        assert not row.rollout_logprobs[:prompt].any()
        assert (row.rollout_logprobs[prompt:] < 0).all()


async def test_no_row_is_leased_before_the_engine_has_a_version(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(2))
    async with working(queue, engine) as worker:
        await asyncio.sleep(0.15)
        assert worker.stats.leased == 0
        await commit(engine)
        await resident(queue, RUN, "ready", 8)


async def test_a_worker_drained_before_the_first_version_just_ends(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(2))
    async with working(queue, engine):
        await asyncio.sleep(0)


async def test_a_response_cut_by_max_tokens_is_truncated_and_trainable(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(3, sampling=SamplingParams(max_tokens=2)))
    await commit(engine)
    async with working(queue, engine):
        batch = await queue.take(RUN, epoch=1, step=0, groups=3, batch_id="b", wait_s=60)
    assert {row.outcome for row in batch.rows} == {Outcome.TRUNCATED}


async def test_rows_that_an_engine_fault_hit_are_delivered_again(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(2), max_attempts=1000)
    await commit(engine)
    engine.behave(Behaviour.FAIL)
    async with working(queue, engine) as worker:
        await until(lambda: worker.stats.failed + worker.stats.returned >= 8)
        engine.behave(Behaviour.ANSWER)
        ledger = await resident(queue, RUN, "ready", 8)
    assert ledger.balanced
    assert ledger.dead_lettered == {}


async def test_a_replica_that_fails_fast_neither_takes_rows_nor_uses_up_their_attempts(
    queue: TransferQueue, engine: echo.EchoEngine, tmp_path: Path
) -> None:
    await open_run(queue, tasks(64), max_attempts=3)
    broken = echo.build({"tokens_per_s": 1e6}, model=tmp_path, slots=8)
    await broken.start()
    broken.behave(Behaviour.FAIL)
    await commit(broken)
    worker = RolloutWorker(queue, broken, Words(), runs=[RUN], worker="broken", schedule=EIGHT)
    running = asyncio.create_task(worker.run())
    assert worker.breaker is not None
    await until(lambda: worker.breaker.opened)
    await commit(engine)
    async with working(queue, engine) as healthy:
        ledger = await resident(queue, RUN, "ready", 256)
    assert ledger.dead_lettered == {}
    assert healthy.stats.written == 256
    assert worker.stats.written == 0
    assert worker.breaker.error_rate == 1.0
    assert "the engine was told to fail" in worker.breaker.last_fault
    broken.behave(Behaviour.ANSWER)
    worker.drain()
    await running
    await broken.close()


async def test_a_replica_that_recovers_leases_rows_again(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(8), max_attempts=3)
    await commit(engine)
    engine.behave(Behaviour.FAIL)
    async with working(queue, engine, breaker=CircuitBreakerConfig(pause_s=0.01)) as worker:
        assert worker.breaker is not None
        await until(lambda: worker.breaker.opened)
        engine.behave(Behaviour.ANSWER)
        ledger = await resident(queue, RUN, "ready", 32)
        assert worker.breaker.state is CircuitState.CLOSED
    assert ledger.dead_lettered == {}


async def test_an_engine_that_fails_every_probe_must_be_replaced(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(8), max_attempts=1000)
    await commit(engine)
    engine.behave(Behaviour.FAIL)
    fast = CircuitBreakerConfig(pause_s=0.0001)
    schedule = RowSchedule(slots=8, breaker=fast)
    worker = RolloutWorker(queue, engine, Words(), runs=[RUN], worker="w0", schedule=schedule)
    with pytest.raises(InfraError, match=r"fails every request.*told to fail.*restarted"):
        await worker.run()
    assert (await queue.ledger(RUN)).resident.get("leased", 0) == 0


async def test_a_row_that_breaks_every_request_is_abandoned_in_the_end(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(1, group_size=1), max_attempts=3)
    await commit(engine)
    engine.behave(Behaviour.FAIL)
    async with working(queue, engine, breaker=CircuitBreakerConfig(pause_s=0.001)):
        dead = await until_dead(queue)
    assert {letter.outcome for letter in dead} == {Outcome.INFRA_FAULT}


@pytest.mark.parametrize(
    "raised", [RuntimeError("no such tool"), UnavailableError("no such tool here: no route")]
)
async def test_an_exception_of_a_program_neither_opens_the_breaker_nor_ends_the_worker(
    queue: TransferQueue,
    engine: echo.EchoEngine,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
) -> None:
    async def raising(*given: object) -> Rollout:
        raise raised

    program = ModuleType("raising.program")
    program.run = raising  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, program.__name__, program)
    await open_run(queue, tasks(4, program=program.__name__), max_attempts=2)
    await commit(engine)
    programs = ProgramCache(program.__name__)
    async with working(queue, engine, programs=programs) as worker:
        async with asyncio.timeout(120):
            # The first of each group takes its siblings with it.
            while len(dead := await queue.dead_letters(RUN)) < 4:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.01)
        assert all("no such tool" in letter.reason for letter in dead)
        assert worker.breaker is not None and not worker.breaker.opened
    assert worker.stats.returned == 0


async def test_a_rollout_past_its_deadline_is_a_timeout_not_a_row(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(1, deadline_s=0.05), max_attempts=2)
    await commit(engine)
    engine.behave(Behaviour.STALL)
    async with working(queue, engine):
        dead = await until_dead(queue)
    assert {letter.outcome for letter in dead} == {Outcome.TIMEOUT}
    assert {letter.reason for letter in dead} == {"no result within 0.05 s"}


async def test_when_the_engine_has_stopped_the_worker_ends_and_another_takes_over(
    queue: TransferQueue, engine: echo.EchoEngine, tmp_path: Path
) -> None:
    await open_run(queue, tasks(10))
    await commit(engine)
    engine.behave(Behaviour.CRASH)
    worker = RolloutWorker(queue, engine, Words(), runs=[RUN], worker="w0", schedule=EIGHT)
    with pytest.raises(InfraError, match="the engine has stopped"):
        await worker.run(grace_s=5)
    ledger = await queue.ledger(RUN)
    assert ledger.resident.get("leased", 0) == 0
    second = echo.build({}, model=tmp_path, slots=8)
    await second.start()
    await commit(second)
    async with working(queue, second):
        ledger = await resident(queue, RUN, "ready", 40)
    assert ledger.balanced
    await second.close()


async def test_a_drain_whose_grace_is_over_releases_rows_unchanged(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(2), max_attempts=1)
    await commit(engine)
    engine.behave(Behaviour.STALL)
    worker = RolloutWorker(queue, engine, Words(), runs=[RUN], worker="w0", schedule=EIGHT)
    running = asyncio.create_task(worker.run(grace_s=0.05))
    await resident(queue, RUN, "leased", 8)
    worker.drain()
    await running
    ledger = await queue.ledger(RUN)
    assert ledger.dead_lettered == {}
    engine.behave(Behaviour.ANSWER)
    async with working(queue, engine):
        await resident(queue, RUN, "ready", 8)


async def test_evaluation_is_served_before_training(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(6))
    await open_run(
        queue, tasks(2, run=f"{RUN}.eval"), gated=False, priority=1, max_staleness=float("inf")
    )
    await commit(engine)
    engine.behave(Behaviour.STALL)
    async with working(queue, engine, runs=[RUN, f"{RUN}.eval"]):
        await resident(queue, f"{RUN}.eval", "leased", 8)
        assert (await queue.ledger(RUN)).resident.get("leased", 0) == 0
        engine.behave(Behaviour.ANSWER)
        await resident(queue, f"{RUN}.eval", "ready", 8)
        await resident(queue, RUN, "ready", 24)


async def test_a_row_with_an_unknown_program_fails_and_names_the_known_ones(
    queue: TransferQueue, engine: echo.EchoEngine
) -> None:
    await open_run(queue, tasks(1, program="single_trun"), max_attempts=1)
    await commit(engine)
    async with working(queue, engine):
        dead = await until_dead(queue)
    assert "did you mean 'single_turn'" in dead[0].reason


delays = random.Random(0)
"""How late each program of the dotted-path program below asks; reseeded by the test."""


async def run(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout:
    """A program that dawdles before its only request; named by its dotted path."""
    await asyncio.sleep(delays.random() * 0.02)
    return await single_turn.run(task, uid, engine, tokenizer)


async def deterministic_run(path: Path, seed: int) -> dict[Uid, tuple[bytes, bytes]]:
    """All bits of a run of 12 groups, in sync batches of 8 rows, under the delays of `seed`."""
    delays.seed(seed)
    queue = await TransferQueue.open(MemoryStore())
    options = {"device": "cpu", "stream_interval": 3}
    engine = torch.build(options, model=path, slots=8)
    await engine.start()
    await engine.serve_checkpoint(FIRST)
    await open_run(
        queue, tasks(12, program=__name__, sampling=SamplingParams(max_tokens=40, seed=7))
    )
    async with working(queue, engine, deterministic=True, programs=ProgramCache(__name__)):
        done = await trajectories(queue, RUN, 12)
    await engine.close()
    await queue.close()
    return {row.uid: (row.tokens.tobytes(), row.rollout_logprobs.tobytes()) for row in done}


async def test_two_runs_with_other_delays_are_equal_bit_by_bit(tmp_path: Path) -> None:
    model = make_model("Qwen3", head_dim=8, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    first = await deterministic_run(tmp_path, seed=1)
    tracing.start(tmp_path / "spans", "rollout-0", 1.0)
    try:
        second = await deterministic_run(tmp_path, seed=2)
    finally:
        tracing.stop()
    assert len(first) == 48
    assert first == second
    lines = (tmp_path / "spans" / "rollout-0.jsonl").read_text().splitlines()
    spans = {span["span"]: span for span in map(json.loads, lines)}
    turns = [span for span in spans.values() if span["name"] == "generate"]
    assert len(turns) == 48
    parents = [spans[turn["parent"]] for turn in turns]
    assert {(span["name"], span["attributes"]["uid"]) for span in parents} == {
        ("rollout", str(uid)) for uid in first
    }
    tokens = {uid: np.frombuffer(bits[0], dtype=np.int32) for uid, bits in first.items()}
    assert len({each.tobytes() for each in tokens.values()}) > 40
    uid = next(iter(first))
    prompt = np.arange(3, 7 + int(uid.task[1:]) % 5).tolist()
    response = tokens[uid][len(prompt) :].tolist()
    logprobs = np.frombuffer(first[uid][1], dtype=np.float32)[len(prompt) :]
    np.testing.assert_allclose(logprobs, forced_logprobs(model, prompt, response), atol=1e-4)


async def test_a_worker_leases_only_what_the_engines_cache_holds(
    queue: TransferQueue, tmp_path: Path
) -> None:
    make_model("Qwen3", head_dim=8, tie_word_embeddings=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    heads = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 8 * 4
    options = {"device": "cpu", "max_model_len": 96, "kv_cache_bytes": 2 * 96 * heads}
    engine = torch.build(options, model=tmp_path, slots=8)
    await engine.start()
    await engine.serve_checkpoint(FIRST)
    assert engine.stats().capacity == 2  # while any length is possible
    await open_run(queue, tasks(12))  # at most 8 + 32 tokens, so 64 positions: three of them
    async with working(queue, engine) as worker:
        held = set()
        async with asyncio.timeout(120):
            while (await queue.ledger(RUN)).resident.get("ready", 0) < 48:
                held.add(worker.held)
                await asyncio.sleep(0.001)
        assert max(held) <= 3
        assert engine.stats().capacity == 3
    await engine.close()


class LonelyEngine:
    """An engine of a third party without `generate_together`: only what the constructor looks at."""

    version = FIRST


async def test_sync_batches_need_an_engine_that_starts_requests_together(
    queue: TransferQueue,
) -> None:
    with pytest.raises(ConfigError, match=r"LonelyEngine.*rollout\.name=torch"):
        RolloutWorker(
            queue,
            LonelyEngine(),  # type: ignore[arg-type]
            Words(),
            runs=[RUN],
            worker="w",
            schedule=RowSchedule(slots=1, deterministic=True),
        )
