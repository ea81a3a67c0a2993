"""A pool of scoring processes: samples in, results out, whatever the functions do.

    score() ──▶ pending ──▶ worker 1 ⇄ process      a worker takes samples when its process has room,
                   ▲   └──▶ worker 2 ⇄ process      watches the deadline of the oldest one,
                   └── innocents of a dead process  and starts a fresh process when this one is gone

consumes: samples. waits for: a process with room, a result. unblocked by: a result, a process's death, a deadline.
produces: one result per sample, always.

Who is to blame when a process dies: plain functions run in order, so it is the oldest unanswered sample; with
`async def` it may be any that runs. Suspects are scored again, each alone in a process; who kills that one too is
guilty, all others get their scores. A process killed from outside therefore costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.contract.errors import MeshError, UnavailableError
from meshrl.contract.types import Json, Outcome
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.pool.rule import Rule
from meshrl.rewardd.pool.worker import MAX_REASON, Worker
from meshrl.rewardd.sandbox.sandbox import Sandbox

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""An `async def` function is cancelled inside its process at the deadline; only if that fails it is killed."""
TARGET_S = 0.05
"""A process is handed about this much work at once, so that slow samples spread over all processes."""
START_TRIES = 5
"""Failed starts in a row after which waiting samples are given back as faults."""
LAST_LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one sample."""

    outcome: Outcome
    score: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    token_rewards: tuple[float, ...] | None = None
    """One per response token, where the function gives them."""


@dataclass(slots=True, eq=False)
class _Item:
    """One sample on its way."""

    number: int
    encoded: bytes
    done: asyncio.Future[Result]
    deaths: int = 0
    """Processes that died while this sample was a suspect."""


class _Slot:
    """One worker's place in the pool: its process of the moment and what that one holds."""

    def __init__(self, index: int, sandbox: Sandbox) -> None:
        self.index = index
        self.wake = asyncio.Event()
        self.worker = Worker(f"judge-{index}", self.wake, sandbox)
        self.in_flight: dict[int, _Item] = {}
        self.since: dict[int, float] = {}
        """When the clock of each sample in flight started."""
        self.sent = 0
        """How many samples were handed over last."""
        self.mean_s = TARGET_S
        """Of one sample, moving."""


class ScoringPool:
    """Scores with one rule in `config.workers` processes, each in a cell of its own."""

    def __init__(self, rule: Rule, config: RewardConfig, sandbox: Sandbox) -> None:
        self._rule = rule
        self._config = config
        self._sandbox = sandbox
        self._deadline_s = sandbox.limits.deadline_s
        self._pending: deque[_Item] = deque()
        self._suspects: deque[_Item] = deque()
        self._slots: list[_Slot] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._closed = False
        self._number = 0

    @property
    def pids(self) -> list[int]:
        """Of the processes, as they are now."""
        return [slot.worker.pid for slot in self._slots]

    async def start(self) -> None:
        """Start every process; idempotent.

        Raises:
            ConfigError: a function cannot be loaded.
            UnavailableError: the pool is closed.
        """
        async with self._starting:
            if self._closed:
                raise UnavailableError("the judge is closed")
            if self._slots:
                return
            if self._sandbox.prepare is not None:
                await asyncio.to_thread(self._sandbox.prepare)
            slots = [_Slot(index, self._sandbox) for index in range(self._config.workers)]
            starts = [asyncio.create_task(s.worker.start(self._rule)) for s in slots]
            try:
                await asyncio.gather(*starts)
            except BaseException:
                for start in starts:
                    start.cancel()
                await asyncio.gather(*starts, return_exceptions=True)
                for slot in slots:
                    await slot.worker.kill()
                raise
            self._slots = slots
            for slot in slots:
                self._start_serving(slot, fresh=True)

    async def score(self, samples: Sequence[Mapping[str, Json]]) -> list[Result]:
        """One result per sample, in order.

        Raises:
            ConfigError, UnavailableError: as `start`.
        """
        await self.start()
        items = [self._admit(sample) for sample in samples]
        for slot in self._slots:
            slot.wake.set()
        try:
            return list(await asyncio.gather(*(item.done for item in items)))
        finally:
            for item in items:
                item.done.cancel()  # does nothing to a finished one; a cancelled one is not handed out any more

    def _admit(self, sample: Mapping[str, Json]) -> _Item:
        self._number += 1
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        item = _Item(self._number, b"", done)
        try:
            item.encoded = json.dumps({"id": self._number, **sample}).encode()
        except (TypeError, ValueError) as error:
            reason = f"ground_truth or extra_info is not JSON: {error}"
            done.set_result(Result(outcome=Outcome.INFRA_FAULT, reason=reason))
        else:
            self._pending.append(item)
        return item

    async def close(self) -> None:
        """Kill and reap every process; what waits is answered as cancelled. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            await slot.worker.kill()
            self._pending.extend(slot.in_flight.values())
            slot.in_flight.clear()
        self._answer_all(Result(outcome=Outcome.CANCELLED, reason="the judge was closed"))

    def _answer_all(self, result: Result) -> None:
        for waiting in (self._pending, self._suspects):
            while waiting:
                _finish(waiting.popleft(), result)

    def _start_serving(self, slot: _Slot, *, fresh: bool) -> None:
        task = asyncio.create_task(self._serve(slot, fresh=fresh), name=f"judge-{slot.index}")
        task.add_done_callback(lambda task: self._on_served(slot, task))
        self._tasks.append(task)

    def _on_served(self, slot: _Slot, task: asyncio.Task[None]) -> None:
        """A worker's task ends by cancellation only; should it crash, nobody may wait for it, now or later."""
        self._tasks.remove(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a judge's worker ended; another takes its place", exc_info=error)
        for item in slot.in_flight.values():
            _finish(item, Result(outcome=Outcome.INFRA_FAULT, reason=f"judge: {error}"))
        slot.in_flight.clear()
        slot.since.clear()
        if not self._closed:
            self._start_serving(slot, fresh=False)

    async def _serve(self, slot: _Slot, *, fresh: bool) -> None:
        """Keep a process at work, and replace it when it is gone; `fresh`: it has just been started."""
        if not fresh:
            await slot.worker.kill()
            await self._restart(slot)
        while True:
            await self._feed(slot)
            await self._restart(slot)

    async def _restart(self, slot: _Slot) -> None:
        failures = 0
        while True:
            slot.worker = Worker(f"judge-{slot.index}", slot.wake, self._sandbox)
            try:
                await slot.worker.start(self._rule)
            except (MeshError, OSError) as error:
                await slot.worker.kill()
                failures += 1
                log.warning("scoring process did not start (%d): %s", failures, error)
                if failures >= START_TRIES:
                    reason = f"no scoring process can be started: {error}"
                    self._answer_all(Result(outcome=Outcome.INFRA_FAULT, reason=reason))
                await asyncio.sleep(min(0.1 * 2**failures, 5.0))
            except BaseException:
                await slot.worker.kill()
                raise
            else:
                return

    async def _feed(self, slot: _Slot) -> None:
        """Hand out samples and take results until the process is gone."""
        messages = slot.worker.messages
        while True:
            while messages:
                message = messages.popleft()
                if message is None:
                    await self._on_exit(slot)
                    return
                if not self._record_answer(slot, _answer(message)):
                    slot.worker.kill_for("wrote into the pipe of the scoring process")
            if not slot.in_flight and slot.sent and (orphans := slot.worker.orphans) > 0:
                slot.sent = 0
                log.warning(
                    "a function left %d processes behind: they are ended with its own", orphans
                )
                await self._on_exit(slot)
                return
            self._fill(slot)
            remaining = self._remaining(slot)
            if remaining <= 0:
                # The loop itself may have been slow: what has arrived by now counts.
                await asyncio.sleep(LAST_LOOK_S)
                if not messages:
                    await self._overdue(slot)
                    return
                continue
            slot.wake.clear()
            try:
                async with asyncio.timeout(None if math.isinf(remaining) else remaining):
                    await slot.wake.wait()
            except TimeoutError:
                continue

    def _fill(self, slot: _Slot) -> None:
        """Hand the process as many samples as it should hold; a suspect only when it holds none."""
        if any(item.deaths for item in slot.in_flight.values()):
            return
        if not slot.in_flight:
            while self._suspects:
                item = self._suspects.popleft()
                if not item.done.done():
                    self._send(slot, [item])
                    return
        config = self._config
        if slot.worker.concurrent:
            free = config.concurrency - len(slot.in_flight)
        elif slot.in_flight:
            return  # what was sent behind a slow sample would wait for it, though another process may be idle
        else:
            free = min(config.batch_size, max(1, int(TARGET_S / max(slot.mean_s, 1e-6))))
        share = math.ceil(len(self._pending) / len(self._slots))
        batch: list[_Item] = []
        while self._pending and len(batch) < min(free, share):
            item = self._pending.popleft()
            if not item.done.done():
                batch.append(item)
        if batch:
            self._send(slot, batch)

    def _send(self, slot: _Slot, batch: list[_Item]) -> None:
        now = time.monotonic()
        slot.sent = len(batch)
        for item in batch:
            slot.in_flight[item.number] = item
            slot.since[item.number] = now
        slot.worker.score([item.encoded for item in batch])

    def _record_answer(self, slot: _Slot, answer: tuple[int, Result] | None) -> bool:
        """Finish a sample; False for an answer that nobody asked for."""
        item = slot.in_flight.pop(answer[0], None) if answer is not None else None
        if answer is None or item is None:
            return False
        now = time.monotonic()
        took_s = now - slot.since.pop(answer[0])
        if slot.worker.batched:
            took_s /= slot.sent
        elif not slot.worker.concurrent and slot.in_flight:
            slot.since[next(iter(slot.in_flight))] = now  # the next one starts now
        slot.mean_s += 0.1 * (took_s - slot.mean_s)
        slot.worker.answered()
        _finish(item, answer[1])
        return True

    def _remaining(self, slot: _Slot) -> float:
        """Seconds until a sample in flight is overdue; negative when one is."""
        if not slot.in_flight:
            return math.inf
        began = slot.since[next(iter(slot.in_flight))]  # the oldest: insertion order
        grace = GRACE_S if slot.worker.concurrent else 0.0
        return began + self._deadline_s + grace - time.monotonic()

    async def _overdue(self, slot: _Slot) -> None:
        """Kill the process; the sample it is stuck on times out, or each suspect gets a process of its own."""
        where = await slot.worker.where()
        await slot.worker.kill()
        suspects = self._suspects_of(slot)
        if len(suspects) == 1:
            reason = f"no score after {self._deadline_s:g} s{where}"
            _finish(suspects.pop(), Result(outcome=Outcome.TIMEOUT, reason=reason))
        self._requeue(slot, suspects)

    async def _on_exit(self, slot: _Slot) -> None:
        """The process ended by itself: score its samples elsewhere, unless one has done this before."""
        code = await slot.worker.kill()
        suspects = self._suspects_of(slot)
        exit_reason = slot.worker.exit_reason(code)
        if suspects:
            log.warning(
                "a scoring process ended (%s) with %d samples", exit_reason, len(slot.in_flight)
            )
        if code == -signal.SIGXCPU and len(suspects) == 1:
            reason = f"more than {self._sandbox.limits.cpu_s} s of CPU time"
            _finish(suspects.pop(), Result(outcome=Outcome.TIMEOUT, reason=reason))
        elif len(suspects) == 1 and suspects[0].deaths:
            reason = f"the function ended its process: {exit_reason}"
            _finish(suspects.pop(), Result(outcome=Outcome.INFRA_FAULT, reason=reason))
        self._requeue(slot, suspects)

    def _suspects_of(self, slot: _Slot) -> list[_Item]:
        """What may have run when the process ended: the oldest of plain functions, any of others."""
        held = list(slot.in_flight.values())
        return held if slot.worker.concurrent or slot.worker.batched else held[:1]

    def _requeue(self, slot: _Slot, suspects: list[_Item]) -> None:
        for item in suspects:
            item.deaths += 1
            self._suspects.append(item)
        innocent = [
            item
            for item in slot.in_flight.values()
            if item not in suspects and not item.done.done()
        ]
        self._pending.extendleft(reversed(innocent))
        slot.in_flight.clear()
        slot.since.clear()
        for other in self._slots:
            other.wake.set()


def _answer(message: Json) -> tuple[int, Result] | None:
    """The sample's number and its result; None for what a function wrote into a pipe that it found."""
    try:
        number = int(message["id"])
        if "score" not in message:
            fault, reason = Outcome(message["fault"]), str(message["reason"])[:MAX_REASON]
            return None if fault.trainable else (number, Result(outcome=fault, reason=reason))
        score = float(message["score"])
        outcome = Outcome(message.get("outcome", Outcome.OK))
        components = {str(key): float(value) for key, value in message["components"].items()}
        tokens = message.get("token_rewards")
        token_rewards = None if tokens is None else tuple(map(float, tokens))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None
    numbers = (score, *components.values(), *(token_rewards or ()))
    if not outcome.trainable or not all(map(math.isfinite, numbers)):
        return None
    return number, Result(
        outcome=outcome, score=score, components=components, token_rewards=token_rewards
    )


def _finish(item: _Item, result: Result) -> None:
    if not item.done.done():
        item.done.set_result(result)
