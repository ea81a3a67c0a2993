"""Every port but the queue's, through its servicer and client, over a real server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from meshrl.contract import errors
from meshrl.contract.types import (
    EngineStats,
    Outcome,
    Sample,
    Score,
    TrainerPhase,
    TrainerStatus,
    Uid,
    Version,
)
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rpc.clients.base import Connection
from meshrl.rpc.clients.services import JudgeClient, RewardTable, RolloutClient, TrainerClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings, Servicer
from meshrl.rpc.servicers import RewardServicer, RolloutServicer, TrainerServicer
from meshrl.rpc.transport import MAX_MESSAGE_BYTES
from meshrl.v1 import queue_pb2, reward_pb2, trajectory_pb2

SETTINGS = ServerSettings(metrics_port=None, drain_grace_s=1)


@asynccontextmanager
async def serving(servicer: Servicer, port: int = 0) -> AsyncIterator[GrpcServer]:
    async with GrpcServer(SETTINGS.model_copy(update={"port": port}), [servicer]) as server:
        await server.ready()
        yield server


def sample(number: int, solution: str = "42") -> Sample:
    return Sample(
        uid=Uid("run", f"task-{number}", 0),
        data_source="math",
        solution=solution,
        ground_truth={"answer": 42},
        extra_info={},
    )


class LengthJudge:
    """Scores a solution by its length; raises `error` when it has one."""

    reward_hash = "abc123"

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls = 0
        self.error = error

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        self.calls += 1
        if self.error:
            raise self.error
        return [
            Score(
                uid=s.uid,
                outcome=Outcome.OK,
                score=float(len(s.solution)),
                components={"answer": float(s.ground_truth["answer"])},
                reward_hash=self.reward_hash,
            )
            for s in samples
        ]

    async def close(self) -> None:
        self.error = None


async def test_a_judge_scores_over_grpc_as_it_does_locally() -> None:
    judge = LengthJudge()
    samples = [sample(number, "x" * number) for number in range(5)]
    async with serving(RewardServicer(judge)) as server, JudgeClient(server.address) as client:
        assert client.reward_hash == "abc123"
        assert list(await client.score(samples)) == list(await judge.score(samples))
        assert await client.score([]) == []


async def test_many_samples_are_scored_in_messages_of_a_mebibyte_and_come_back_in_order() -> None:
    judge = LengthJudge()
    samples = [sample(number, "x" * 300_000) for number in range(10)]
    async with serving(RewardServicer(judge)) as server, JudgeClient(server.address) as client:
        scores = await client.score(samples)
    assert [score.uid for score in scores] == [s.uid for s in samples]
    assert judge.calls == 4


@pytest.mark.parametrize("kind", sorted(set(errors.BY_CODE.values()), key=lambda k: k.code))
async def test_an_error_of_the_service_is_raised_unchanged_by_the_client(
    kind: type[errors.MeshError],
) -> None:
    judge = LengthJudge(kind("what was wrong", uid="run/t/0.0", wanted=3))
    async with (
        serving(RewardServicer(judge)) as server,
        JudgeClient(server.address, retry_s=0) as client,
    ):
        with pytest.raises(kind, match="what was wrong") as raised:
            await client.score([sample(0)])
    assert type(raised.value) is kind
    assert raised.value.details == {"uid": "run/t/0.0", "wanted": "3"}


async def test_a_crash_in_the_service_is_an_infra_error_in_the_client_and_later_calls_work() -> (
    None
):
    judge = LengthJudge(ZeroDivisionError("division by zero"))
    async with serving(RewardServicer(judge)) as server, JudgeClient(server.address) as client:
        with pytest.raises(errors.InfraError, match="ZeroDivisionError: division by zero"):
            await client.score([sample(0)])
        judge.error = None
        assert len(await client.score([sample(0)])) == 1


async def test_a_mistake_of_the_caller_is_raised_before_anything_is_sent() -> None:
    async with client_of_no_service() as client:
        with pytest.raises(errors.UserError, match="this sample cannot be sent"):
            await client.score([replace(sample(0), ground_truth=object())])


@asynccontextmanager
async def client_of_no_service() -> AsyncIterator[JudgeClient]:
    client = JudgeClient("127.0.0.1:1", retry_s=0.2)
    try:
        yield client
    finally:
        await client.close()


async def test_a_missing_service_is_named_when_the_retry_budget_is_used_up() -> None:
    async with client_of_no_service() as client:
        with pytest.raises(errors.UnavailableError, match=r"reward at 127\.0\.0\.1:1"):
            await client.open()


async def test_a_client_of_another_service_says_so() -> None:
    async with serving(RolloutServicer(IdleEngine())) as server:
        client = JudgeClient(server.address)
        with pytest.raises(errors.InfraError, match="is it that service"):
            await client.open()
        await client.close()


async def status_of_call(server: GrpcServer, method: str, data: bytes) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(server.address) as channel:
        call: Any = channel.unary_unary(method)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(data, timeout=60)
        return raised.value.code()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        reward_pb2.ScoreRequest(samples=[reward_pb2.Sample()]).SerializeToString(),
        reward_pb2.ScoreRequest(
            samples=[
                reward_pb2.Sample(uid=trajectory_pb2.Uid(run="r", task="t"), ground_truth_json="{")
            ]
        ).SerializeToString(),
    ],
    ids=["no message", "no uid", "no json"],
)
async def test_a_malformed_message_is_the_callers_mistake(data: bytes) -> None:
    async with serving(RewardServicer(LengthJudge())) as server:
        status = await status_of_call(server, "/meshrl.v1.Reward/Score", data)
    assert status is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    async with serving(RewardServicer(LengthJudge())) as server:
        status = await status_of_call(server, "/meshrl.v1.Reward/Praise", b"")
    assert status is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_that_is_too_large_names_the_sizes() -> None:
    huge = sample(0, "x" * (MAX_MESSAGE_BYTES + 1))
    async with (
        serving(RewardServicer(LengthJudge())) as server,
        JudgeClient(server.address) as client,
    ):
        with pytest.raises(errors.CapacityError, match=str(MAX_MESSAGE_BYTES)) as raised:
            await client.score([huge])
        assert int(raised.value.details["size"]) > MAX_MESSAGE_BYTES
        assert len(await client.score([sample(0)])) == 1


class IdleEngine:
    """Says how it does."""

    def stats(self) -> EngineStats:
        return EngineStats(
            version=Version(1, 2),
            running=3,
            capacity=4,
            tokens_generated=5,
            tokens_per_s=6.5,
            updates=7,
            update_pause_s=8.5,
        )


async def test_an_engine_is_asked_how_it_does() -> None:
    engine = IdleEngine()
    async with serving(RolloutServicer(engine)) as server, RolloutClient(server.address) as client:
        assert await client.stats() == engine.stats()


class SteppingTrainer:
    """Takes one step per watched status, the last one once `go_on` is set."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.step = 0
        self.at_the_end = asyncio.Event()
        self.go_on = asyncio.Event()

    def status(self) -> TrainerStatus:
        done = self.step >= self.total
        return TrainerStatus(
            step=self.step,
            total_steps=self.total,
            version=Version(1, self.step),
            phase=TrainerPhase.DONE if done else TrainerPhase.TRAINING,
            staleness={0: 3, 2: 1},
            metrics={"loss": 0.5},
        )

    async def watch(self, every_s: float) -> AsyncGenerator[TrainerStatus, None]:
        while True:
            status = self.status()
            yield status
            if status.phase.ended:
                return
            self.step += 1
            if self.step == self.total:
                self.at_the_end.set()
                await self.go_on.wait()


async def test_a_remote_trainer_is_asked_and_watched() -> None:
    trainer = SteppingTrainer(total=3)
    trainer.go_on.set()
    async with serving(TrainerServicer(trainer)) as server, TrainerClient(server.address) as client:
        assert await client.status() == trainer.status()
        assert [status.step async for status in client.watch()] == [0, 1, 2, 3]


async def test_a_long_wait_is_cut_into_polls() -> None:
    request, ready = queue_pb2.TakeRequest(), asyncio.Event()
    deadlines: asyncio.Queue[float] = asyncio.Queue()

    async def attempt(*, wait_s: float) -> str:
        assert request.wait_s == wait_s
        deadlines.put_nowait(wait_s)
        try:
            async with asyncio.timeout(wait_s):
                await ready.wait()
        except TimeoutError:
            raise errors.WaitTimeoutError("no batch yet") from None
        return "batch"

    connection = Connection("queue", "127.0.0.1:1", retry_s=0, poll_s=0.05)
    with pytest.raises(errors.WaitTimeoutError, match="no batch yet"):
        await connection.poll(request, attempt, 0.2)
    polls = deadlines.qsize()
    assert polls > 2
    waiting = asyncio.create_task(connection.poll(request, attempt, 60))
    for _ in range(polls + 3):
        assert await deadlines.get() <= 0.05
    ready.set()
    assert await waiting == "batch"
    await connection.close()


async def test_a_draining_service_ends_long_waits_and_a_watcher_finds_its_successor() -> None:
    trainer = SteppingTrainer(total=3)
    seen: list[int] = []

    async def watch(client: TrainerClient) -> None:
        async for status in client.watch():
            seen.append(status.step)

    async with serving(TrainerServicer(trainer)) as server:
        client = TrainerClient(server.address, retry_s=60)
        watching = asyncio.create_task(watch(client))
        await trainer.at_the_end.wait()
    trainer.go_on.set()
    async with serving(TrainerServicer(trainer), port=server.port), asyncio.timeout(120):
        await watching
    await client.close()
    assert seen == [0, 1, 2, 3]


async def test_a_negative_wait_is_refused() -> None:
    trainer = SteppingTrainer(total=3)
    async with serving(TrainerServicer(trainer)) as server, TrainerClient(server.address) as client:
        with pytest.raises(errors.UserError, match="wait_s is -1"):
            async for _ in client.watch(every_s=-1):
                pass


async def test_a_service_that_hangs_is_unavailable() -> None:
    class Hanging(LengthJudge):
        async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
            await asyncio.sleep(600)
            raise AssertionError

    async with serving(RewardServicer(Hanging())) as server:
        connection = Connection("reward", server.address, retry_s=0.2, answer_s=0.05)
        ask = RewardTable.methods["Score"]
        with pytest.raises(errors.UnavailableError, match="has not answered within"):
            await connection.call(ask, reward_pb2.ScoreRequest(), lambda answer: answer)
        await connection.close()


GUARD = {"retries": 1, "pause_s": 0.001, "deadline_s": 20}


def judged_at(address: str) -> RewardConfig:
    judge = {"kind": "grpc", "weight": 2, "options": {"address": address, "guard": GUARD}}
    return RewardConfig.model_validate({"judges": [judge]})


async def test_the_scores_of_a_judge_elsewhere_are_a_component_and_its_end_is_a_fault() -> None:
    async with serving(RewardServicer(LengthJudge())) as server:
        judge = build_judge(judged_at(server.address))
        await judge.start()
        (score,) = await judge.score([sample(0, "four")])
        assert (score.outcome, score.score) == (Outcome.OK, 8.0)
        assert score.components["grpc"] == 4.0
    (score,) = await judge.score([sample(0, "four")])
    assert score.outcome is Outcome.INFRA_FAULT
    assert "(2 tries)" in score.reason
    await judge.close()


async def test_a_judge_elsewhere_that_is_down_at_start_is_named() -> None:
    judge = build_judge(judged_at("127.0.0.1:9"))
    with pytest.raises(errors.UnavailableError, match=r"the judge at 127\.0\.0\.1:9"):
        await judge.start()
    await judge.close()
