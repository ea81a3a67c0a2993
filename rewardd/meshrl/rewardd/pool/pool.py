"""A pool of scoring processes: one result per sample, whatever the functions do.

    score() ──▶ pending ──▶ slot 1 ⇄ process        a slot takes samples when its process has room,
                   ▲   └──▶ slot 2 ⇄ process        watches the deadline of the oldest one,
                   └── other samples of a dead one  and starts a fresh process when this one ends

consumes: samples. waits for: a process with room, a result. unblocked by: a result, the end of a process, a deadline.
produces: exactly one result per sample.

Which sample ended a process? Plain functions run in order, so it was the oldest unanswered sample; with `async def`
it may be any that ran. These suspects are scored again, each alone in a process. A suspect whose process ends again
gets a fault; all others get their scores. So a process killed from outside costs no score.
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
"""The process cancels an `async def` function at the deadline; only if that fails, the process is killed."""
TARGET_S = 0.05
"""A process gets about this many seconds of work at once, so that slow samples spread over all processes."""
START_TRIES = 5
"""After this many failed starts in a row, waiting samples are answered with a fault."""
OVERDUE_GRACE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one sample."""

    outcome: Outcome
    score: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    token_rewards: tuple[float, ...] | None = None
    """One per response token, if the function returns them."""


@dataclass(slots=True, eq=False)
class _Item:
    """One sample in the pool."""

    number: int
    encoded: bytes
    done: asyncio.Future[Result]
    deaths: int = 0
    """Processes that ended while this sample was a suspect."""


class _Slot:
    """One of the pool's `workers` slots: its current process and the samples of that process."""

    def __init__(self, index: int, sandbox: Sandbox) -> None:
        self.index = index
        self.wake = asyncio.Event()
        self.worker = Worker(f"judge-{index}", self.wake, sandbox)
        self.in_flight: dict[int, _Item] = {}
        self.since: dict[int, float] = {}
        """Time at which the deadline of each sample in flight began to run."""
        self.sent = 0
        """Number of samples in the last message to the process."""
        self.mean_s = TARGET_S
        """Seconds per sample, moving average."""


class ScoringPool:
    """Scores with one rule in `config.workers` processes, each in a sandbox of its own."""

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
        """Of the current processes."""
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
                item.done.cancel()  # no effect on a finished one; a cancelled one is not sent any more

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
        """Kill and reap every process; waiting samples are answered as cancelled. Idempotent."""
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
        """A slot's task ends by cancellation only. If it crashes, answer its samples and start another."""
        self._tasks.remove(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a worker slot of the judge crashed; it is started again", exc_info=error)
        for item in slot.in_flight.values():
            _finish(item, Result(outcome=Outcome.INFRA_FAULT, reason=f"judge: {error}"))
        slot.in_flight.clear()
        slot.since.clear()
        if not self._closed:
            self._start_serving(slot, fresh=False)

    async def _serve(self, slot: _Slot, *, fresh: bool) -> None:
        """Keep a process busy, and replace it when it ends; `fresh`: it has just been started."""
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
        """Send samples and record results until the process ends."""
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
                    "a function left %d processes behind: they are killed with its own", orphans
                )
                await self._on_exit(slot)
                return
            self._fill(slot)
            remaining = self._remaining(slot)
            if remaining <= 0:
                # The event loop itself may have been slow: what has arrived by now counts.
                await asyncio.sleep(OVERDUE_GRACE_S)
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
        """Send as many samples as the process should hold; a suspect only when it holds none."""
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
            return  # samples sent behind a slow one would wait for it, although another process may be idle
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
        """Finish a sample; False for an answer to no sample in flight."""
        item = slot.in_flight.pop(answer[0], None) if answer is not None else None
        if answer is None or item is None:
            return False
        now = time.monotonic()
        took_s = now - slot.since.pop(answer[0])
        if slot.worker.batched:
            took_s /= slot.sent
        elif not slot.worker.concurrent and slot.in_flight:
            slot.since[next(iter(slot.in_flight))] = now  # the next one has just begun
        slot.mean_s += 0.1 * (took_s - slot.mean_s)
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
        """Kill the process; the sample that it ran times out, or each of several suspects is scored alone."""
        line = await slot.worker.current_line()
        await slot.worker.kill()
        suspects = self._suspects_of(slot)
        if len(suspects) == 1:
            reason = f"no score after {self._deadline_s:g} s{line}"
            _finish(suspects.pop(), Result(outcome=Outcome.TIMEOUT, reason=reason))
        self._requeue(slot, suspects)

    async def _on_exit(self, slot: _Slot) -> None:
        """The process ended by itself: score its samples again, unless the only suspect has ended one before."""
        code = await slot.worker.kill()
        suspects = self._suspects_of(slot)
        why = slot.worker.exit_reason(code)
        if suspects:
            log.warning("a scoring process ended (%s) with %d samples", why, len(slot.in_flight))
        if code == -signal.SIGXCPU and len(suspects) == 1:
            reason = f"more than {self._sandbox.limits.cpu_s} s of CPU time"
            _finish(suspects.pop(), Result(outcome=Outcome.TIMEOUT, reason=reason))
        elif len(suspects) == 1 and suspects[0].deaths:
            reason = f"the function ended its process: {why}"
            _finish(suspects.pop(), Result(outcome=Outcome.INFRA_FAULT, reason=reason))
        self._requeue(slot, suspects)

    def _suspects_of(self, slot: _Slot) -> list[_Item]:
        """Samples that may have run when the process ended: the oldest for plain functions, else all."""
        held = list(slot.in_flight.values())
        return held if slot.worker.concurrent or slot.worker.batched else held[:1]

    def _requeue(self, slot: _Slot, suspects: list[_Item]) -> None:
        for item in suspects:
            item.deaths += 1
            self._suspects.append(item)
        others = [
            item
            for item in slot.in_flight.values()
            if item not in suspects and not item.done.done()
        ]
        self._pending.extendleft(reversed(others))
        slot.in_flight.clear()
        slot.since.clear()
        for other in self._slots:
            other.wake.set()


def _answer(message: Json) -> tuple[int, Result] | None:
    """The sample's number and its result; None for bytes that a function wrote into the pipe itself."""
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
