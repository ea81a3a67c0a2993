"""The circuit breaker: when it opens, how it closes, whose fault a fault is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from meshrl.contract.errors import EngineGoneError, InfraError, UnavailableError, UserError
from meshrl.contract.types import GenerateDelta, GenerateRequest, SamplingParams, Uid, Version
from meshrl.rollout.circuit_breaker import (
    FIRST_PROBES,
    PROBES,
    SPARED,
    CircuitBreaker,
    CircuitState,
    WatchedGenerator,
)
from meshrl.rollout.config import CircuitBreakerConfig

ROW = Uid("run", "task", 0, 0)
SHORT = CircuitBreakerConfig(pause_s=0.0001)
LONG = CircuitBreakerConfig(pause_s=1000.0)


class BreakerWorker:
    """A breaker, and what it reported to its worker."""

    def __init__(self, config: CircuitBreakerConfig) -> None:
        self.woken = asyncio.Event()
        self.gone = ""
        self.breaker = CircuitBreaker(config, wake=self.woken.set, give_up=self._gone)

    def _gone(self, fault: str) -> None:
        self.gone = fault

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.breaker.failed("InfraError: broken")

    async def until(self, state: CircuitState) -> None:
        while self.breaker.state is not state:
            self.woken.clear()
            await asyncio.wait_for(self.woken.wait(), 120)


@pytest.fixture
async def worker() -> AsyncIterator[BreakerWorker]:
    made = BreakerWorker(LONG)
    yield made
    made.breaker.close()


async def test_a_few_faults_among_many_successes_leave_it_closed(worker: BreakerWorker) -> None:
    for _ in range(100):
        worker.breaker.succeeded()
        worker.breaker.succeeded()
        worker.fail(1)
    assert worker.breaker.state is CircuitState.CLOSED
    assert 0.25 <= worker.breaker.error_rate <= 0.4
    assert worker.breaker.allows(3, 64) == 61


async def test_faults_alone_open_it_and_no_row_is_admitted(worker: BreakerWorker) -> None:
    worker.fail(4)
    assert worker.breaker.allows(0, 64) == 64
    worker.fail(1)
    assert worker.breaker.state is CircuitState.OPEN
    assert worker.breaker.allows(0, 64) == 0
    assert worker.woken.is_set()


async def test_after_a_pause_one_row_is_tried_and_a_success_closes_it() -> None:
    worker = BreakerWorker(SHORT)
    worker.fail(5)
    await worker.until(CircuitState.HALF_OPEN)
    assert [worker.breaker.allows(held, 64) for held in (0, 1)] == [1, 0]
    worker.breaker.succeeded()
    assert worker.breaker.state is CircuitState.CLOSED
    assert worker.breaker.error_rate == 0.0


async def test_pauses_double_up_to_the_longest_and_are_short_again_after_a_good_window() -> None:
    config = CircuitBreakerConfig(pause_s=0.0005)
    worker = BreakerWorker(config)
    pauses = []
    for _ in range(8):
        pauses.append(worker.breaker.pause_s)
        worker.fail(5)
        await worker.until(CircuitState.HALF_OPEN)
        worker.breaker.succeeded()
    assert pauses == [0.0005 * times for times in (1, 2, 4, 8, 16, 32, 60, 60)]
    for _ in range(config.window):
        worker.breaker.succeeded()
    assert worker.breaker.pause_s == 0.0005


async def test_requests_that_began_before_it_opened_change_nothing(worker: BreakerWorker) -> None:
    worker.fail(5)
    worker.fail(50)
    worker.breaker.succeeded()
    assert worker.breaker.state is CircuitState.OPEN
    assert worker.breaker.opened == 1


@pytest.mark.parametrize(("answers", "probes"), [(1, PROBES), (0, FIRST_PROBES)])
async def test_a_replica_that_fails_every_probe_is_abandoned(answers: int, probes: int) -> None:
    worker = BreakerWorker(SHORT)
    for _ in range(answers):
        worker.breaker.succeeded()
    worker.fail(5)
    for _ in range(probes):
        assert not worker.gone
        await worker.until(CircuitState.HALF_OPEN)
        worker.fail(1)
    assert worker.gone == "InfraError: broken"
    worker.breaker.close()


async def test_the_first_fault_of_a_row_is_attributed_to_it_and_the_next_to_the_replica(
    worker: BreakerWorker,
) -> None:
    spared = []
    for _ in range(SPARED + 2):
        worker.fail(1)
        spared.append(worker.breaker.spares(ROW))
    assert spared == [False, True, True, True, False, False]


async def test_two_faults_with_a_success_between_them_are_attributed_to_the_row(
    worker: BreakerWorker,
) -> None:
    for _ in range(2):
        worker.fail(1)
        assert not worker.breaker.spares(ROW)
        worker.breaker.succeeded()


async def test_a_fault_while_the_breaker_is_open_is_attributed_to_the_replica(
    worker: BreakerWorker,
) -> None:
    worker.fail(5)
    assert worker.breaker.spares(ROW)


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
        (EngineGoneError("closed"), None),
        (UnavailableError("an engine's own server is away"), 1.0),
    ],
    ids=str,
)
async def test_which_ends_of_a_request_count(
    worker: BreakerWorker, end: Exception | str, rate: float | None
) -> None:
    worker.breaker.succeeded()
    worker.fail(1)
    before = worker.breaker.error_rate
    watched = WatchedGenerator(Scripted(end), worker.breaker)
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
    assert worker.breaker.error_rate == pytest.approx(expected)
