"""The circuit breaker: when it opens, how it closes, whose fault a fault is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from meshrl.contract.errors import InfraError, UnavailableError, UserError
from meshrl.contract.types import GenerateDelta, GenerateRequest, SamplingParams, Uid, Version
from meshrl.rollout.circuit_breaker import (
    FIRST_PROBES,
    PROBES,
    SPARED,
    Breaker,
    BreakerState,
    WatchedGenerator,
)
from meshrl.rollout.config import BreakerConfig

ROW = Uid("run", "task", 0, 0)
SHORT = BreakerConfig(pause_s=0.001, longest_pause_s=0.001)
LONG = BreakerConfig(pause_s=1000.0, longest_pause_s=5000.0)


class Room:
    """A breaker and what it said to its worker."""

    def __init__(self, config: BreakerConfig) -> None:
        self.woken = asyncio.Event()
        self.gone = ""
        self.breaker = Breaker(config, wake=self.woken.set, give_up=self._gone)

    def _gone(self, fault: str) -> None:
        self.gone = fault

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.breaker.failed("InfraError: broken")

    async def until(self, state: BreakerState) -> None:
        while self.breaker.state is not state:
            self.woken.clear()
            await asyncio.wait_for(self.woken.wait(), 120)


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    made = Room(LONG)
    yield made
    made.breaker.close()


async def test_a_few_faults_among_many_answers_leave_it_closed(room: Room) -> None:
    for _ in range(100):
        room.breaker.succeeded()
        room.breaker.succeeded()
        room.fail(1)
    assert room.breaker.state is BreakerState.CLOSED
    assert 0.25 <= room.breaker.error_rate <= 0.4
    assert room.breaker.allows(3, 64) == 61


async def test_faults_alone_open_it_and_nothing_more_is_let_in(room: Room) -> None:
    room.fail(4)
    assert room.breaker.allows(0, 64) == 64
    room.fail(1)
    assert room.breaker.state is BreakerState.OPEN
    assert room.breaker.allows(0, 64) == 0
    assert room.woken.is_set()


async def test_after_a_pause_one_row_is_tried_and_an_answer_closes_it() -> None:
    room = Room(SHORT)
    room.fail(5)
    await room.until(BreakerState.HALF_OPEN)
    assert [room.breaker.allows(held, 64) for held in (0, 1)] == [1, 0]
    room.breaker.succeeded()
    assert room.breaker.state is BreakerState.CLOSED
    assert room.breaker.error_rate == 0.0


async def test_pauses_double_up_to_the_longest_and_are_short_again_after_a_good_window() -> None:
    config = BreakerConfig(pause_s=0.001, longest_pause_s=0.004)
    room = Room(config)
    pauses = []
    for _ in range(4):
        pauses.append(room.breaker.pause_s)
        room.fail(5)
        await room.until(BreakerState.HALF_OPEN)
        room.breaker.succeeded()
    assert pauses == [0.001, 0.002, 0.004, 0.004]
    for _ in range(config.window):
        room.breaker.succeeded()
    assert room.breaker.pause_s == 0.001


async def test_what_began_before_it_opened_changes_nothing(room: Room) -> None:
    room.fail(5)
    room.fail(50)
    room.breaker.succeeded()
    assert room.breaker.state is BreakerState.OPEN
    assert room.breaker.opened == 1


@pytest.mark.parametrize(("answers", "probes"), [(1, PROBES), (0, FIRST_PROBES)])
async def test_a_replica_that_fails_every_probe_is_given_up(answers: int, probes: int) -> None:
    room = Room(SHORT)
    for _ in range(answers):
        room.breaker.succeeded()
    room.fail(5)
    for _ in range(probes):
        assert not room.gone
        await room.until(BreakerState.HALF_OPEN)
        room.fail(1)
    assert room.gone == "InfraError: broken"
    room.breaker.close()


async def test_a_rows_first_fault_is_its_own_and_the_next_ones_are_the_replicas(room: Room) -> None:
    spared = []
    for _ in range(SPARED + 2):
        room.fail(1)
        spared.append(room.breaker.spares(ROW))
    assert spared == [False, True, True, True, False, False]


async def test_an_answer_between_two_faults_makes_both_the_rows_own(room: Room) -> None:
    for _ in range(2):
        room.fail(1)
        assert not room.breaker.spares(ROW)
        room.breaker.succeeded()


async def test_a_fault_under_an_open_breaker_is_the_replicas(room: Room) -> None:
    room.fail(5)
    assert room.breaker.spares(ROW)


class Scripted:
    """An engine that ends every request in one way."""

    version = Version(1, 0)

    def __init__(self, end: Exception | str) -> None:
        self.end = end

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        if isinstance(self.end, Exception):
            raise self.end
        tokens = np.array([1], dtype=np.int32)
        logprobs = np.zeros(1, dtype=np.float32)
        yield GenerateDelta(
            tokens=tokens, logprobs=logprobs, version=self.version, finish_reason=self.end
        )


@pytest.mark.parametrize(
    ("end", "rate"),
    [
        ("stop", 0.0),
        ("length", 0.0),
        (InfraError("no memory"), 1.0),
        (RuntimeError("a driver's own"), 1.0),
        ("abort", None),
        (UserError("prompt too long"), None),
        (UnavailableError("closed"), None),
    ],
    ids=str,
)
async def test_which_ends_of_a_request_count(
    room: Room, end: Exception | str, rate: float | None
) -> None:
    room.breaker.succeeded()
    room.fail(1)
    before = room.breaker.error_rate
    watched = WatchedGenerator(Scripted(end), room.breaker)
    request = GenerateRequest(
        request_id="r", prompt_ids=np.array([1], dtype=np.int32), sampling=SamplingParams()
    )
    try:
        async for _ in watched.generate(request):
            pass
    except Exception as error:
        assert error is end
    assert watched.faulted is (rate == 1.0)
    expected = before if rate is None else (1 + rate) / 3
    assert room.breaker.error_rate == pytest.approx(expected)
