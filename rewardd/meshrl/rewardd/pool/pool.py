"""The judge on a pool of scoring processes: one score per sample, whatever the functions do.

    score() ──▶ pending ──▶ slot 1 ⇄ process        a slot takes samples when its process has room,
                   ▲   └──▶ slot 2 ⇄ process        watches the deadline of the oldest one,
                   └── other samples of a dead one  and starts a fresh process when this one ends

consumes: samples. waits for: a process with room, an answer. unblocked by: an answer, the end of a process, a
deadline. produces: exactly one score per sample.

A policy cannot hide from its score: a response on which built-in rewards twice run out of time or memory is scored
as an empty one, and at most 0 (a policy fault). So with functions of the user's own if `reward.own_timeout` says so.

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshrl.contract.errors import MeshError, UnavailableError
from meshrl.contract.types import Json, Outcome, Sample, Score, Uid, name_fault
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.pool.messages import (
    MAX_COMPONENTS,
    MAX_FLOAT32,
    MAX_TEXT,
    MAX_TEXTS,
    DroppedKeys,
    printable,
)
from meshrl.rewardd.pool.rule import RewardRule
from meshrl.rewardd.pool.worker import ScoringWorker
from meshrl.sandbox.sandbox import Sandbox, open_sandbox

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""The process cancels an `async def` function at the deadline; only if that fails, the process is killed."""
TARGET_S = 0.05
"""A process gets about this many seconds of work at once, so that slow samples spread over all processes."""
BATCH_SIZE = 64
"""Samples handed to a process at once; fewer while they are slow."""
START_TRIES = 5
"""After this many failed starts in a row, waiting samples are answered with a fault."""
OVERDUE_GRACE_S = 0.05


@dataclass(slots=True, eq=False)
class _PoolSample:
    """One sample in the pool."""

    number: int
    uid: Uid
    done: asyncio.Future[Score]
    encoded: bytes = b""
    tokens: int | None = None
    """Length of the response, if the caller counted it."""
    deaths: int = 0
    """Processes that ended while this sample was a suspect."""
    blamed: str = ""
    """Why the response is scored as an empty one; empty: it is not."""


class _Slot:
    """One of the pool's `workers` slots: its current process and the samples of that process."""

    def __init__(self, index: int, sandbox: Sandbox) -> None:
        self.index = index
        self.wake = asyncio.Event()
        self.worker = ScoringWorker(f"judge-{index}", self.wake, sandbox)
        self.in_flight: dict[int, _PoolSample] = {}
        self.since: dict[int, float] = {}
        """Time at which the deadline of each sample in flight began to run."""
        self.sent = 0
        """Number of samples in the last message to the process."""
        self.mean_s = TARGET_S
        """Seconds per sample, moving average."""
        self.crashes = 0
        """Crashes on the slot's own task since its process answered last."""


class PoolJudge:
    """Implements the Judge port for one rule: `config.workers` processes, each in a sandbox of its own."""

    def __init__(
        self,
        rule: RewardRule,
        config: RewardConfig,
        *,
        reward_hash: str = "",
        sandbox: Sandbox | None = None,
    ) -> None:
        """Keep the parts; `reward_hash` names a submitted version, else the rule's own hash counts.

        Without a `sandbox` the functions are the recipe's own, and `reward.recipe_sandbox` sets their isolation.

        Raises:
            ConfigError: this machine cannot give the wanted isolation.
        """
        self.reward_hash = reward_hash or rule.reward_hash
        """Content hash of sources, names, arguments and weights."""
        self._rule = rule
        self._config = config
        self._sandbox = sandbox = sandbox or _recipe_sandbox(rule, config)
        self._deadline_s = sandbox.limits.deadline_s
        built_in = all(function.is_built_in for function in rule.functions)
        self._policy_answers = built_in or config.own_timeout == "policy_fault"
        """Whether a sample that takes too much time or memory is the policy's fault."""
        self._pending: deque[_PoolSample] = deque()
        self._suspects: deque[_PoolSample] = deque()
        self._slots: list[_Slot] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._closed = False
        self._dropped = DroppedKeys()
        self._number = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the current scoring processes."""
        return [slot.worker.pid for slot in self._slots]

    async def start(self) -> None:
        """Start the processes and load the functions; otherwise the first `score` does so. Idempotent.

        Raises:
            ConfigError: a function cannot be loaded or called; says what is wanted.
            UnavailableError: the pool is closed.
        """
        async with self._starting:
            if self._closed:
                raise UnavailableError("the judge is closed")
            if self._slots:
                return
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

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order. A sample that cannot be scored comes back with its fault.

        Raises:
            ConfigError, UnavailableError: as `start`.
        """
        await self.start()
        items: list[_PoolSample] = []
        for sample in samples:
            self._number += 1
            item = _PoolSample(self._number, sample.uid, asyncio.get_running_loop().create_future())
            items.append(item)
            arguments = {
                "id": self._number,
                "data_source": sample.data_source,
                "solution_str": sample.solution,
                "ground_truth": sample.ground_truth,
                "extra_info": dict(sample.extra_info),
            }
            try:
                item.encoded = json.dumps(arguments).encode()
                length = sample.extra_info.get("response_length")
                item.tokens = length if isinstance(length, int) else None
            except (TypeError, ValueError) as error:
                reason = f"ground_truth or extra_info is not JSON: {error}"
                self._fail(item, Outcome.INFRA_FAULT, reason, lasting=True)
            else:
                self._pending.append(item)
        for slot in self._slots:
            slot.wake.set()
        try:
            return list(await asyncio.gather(*(item.done for item in items)))
        finally:
            for item in items:
                item.done.cancel()  # no effect on a finished one; a cancelled one is not sent any more

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
        self._fail_all(Outcome.CANCELLED, "the judge was closed")

    def _fail_all(self, outcome: Outcome, reason: str) -> None:
        for waiting in (self._pending, self._suspects):
            while waiting:
                self._fail(waiting.popleft(), outcome, reason)

    def _fail(
        self, item: _PoolSample, outcome: Outcome, reason: str, *, lasting: bool = False
    ) -> None:
        if not item.done.done():
            fault = Score(
                uid=item.uid,
                outcome=outcome,
                reason=reason,
                reward_hash=self.reward_hash,
                lasting=lasting,
            )
            item.done.set_result(fault)

    def _start_serving(self, slot: _Slot, *, fresh: bool) -> None:
        task = asyncio.create_task(self._serve(slot, fresh=fresh), name=f"judge-{slot.index}")
        task.add_done_callback(lambda task: self._on_served(slot, task))
        self._tasks.append(task)

    def _on_served(self, slot: _Slot, task: asyncio.Task[None]) -> None:
        """Restart a slot whose task crashed (a healthy one ends by cancellation only), and answer its samples."""
        self._tasks.remove(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a worker slot of the judge crashed; it is started again", exc_info=error)
        for item in slot.in_flight.values():
            self._fail(item, Outcome.INFRA_FAULT, f"judge: {error}")
        slot.in_flight.clear()
        slot.since.clear()
        slot.crashes += 1
        if slot.crashes >= START_TRIES:
            self._fail_all(Outcome.INFRA_FAULT, f"judge: {error}")
        if not self._closed:
            self._start_serving(slot, fresh=False)

    async def _serve(self, slot: _Slot, *, fresh: bool) -> None:
        """Keep a process busy, and replace it when it ends; `fresh`: it has just been started."""
        if not fresh:
            await slot.worker.kill()
            await asyncio.sleep(_backoff_s(slot.crashes))
            await self._restart(slot)
        while True:
            await self._feed(slot)
            await self._restart(slot)

    async def _restart(self, slot: _Slot) -> None:
        failures = 0
        while True:
            slot.worker = ScoringWorker(f"judge-{slot.index}", slot.wake, self._sandbox)
            try:
                await slot.worker.start(self._rule)
            except (MeshError, OSError) as error:
                await slot.worker.kill()
                failures += 1
                log.warning("scoring process did not start (%d): %s", failures, error)
                if failures >= START_TRIES:
                    reason = f"no scoring process can be started: {error}"
                    self._fail_all(Outcome.INFRA_FAULT, reason)
                await asyncio.sleep(_backoff_s(failures))
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
                if not self._record_answer(slot, message):
                    slot.worker.kill_for("wrote into the pipe of the scoring process")
            if not slot.in_flight and slot.sent and (orphans := slot.worker.orphans) > 0:
                slot.sent = 0
                log.warning(
                    "a function left %d processes behind: they are killed with its own", orphans
                )
                await self._on_exit(slot)
                return
            self._fill(slot)
            remaining = math.inf
            if slot.in_flight:
                began = slot.since[next(iter(slot.in_flight))]  # the oldest: insertion order
                grace = GRACE_S if slot.worker.concurrent else 0.0
                remaining = began + self._deadline_s + grace - time.monotonic()
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
        batch: list[_PoolSample] = []
        while self._suspects and not slot.in_flight and not batch:
            item = self._suspects.popleft()
            if not item.done.done():
                batch.append(item)
        if not batch:
            if slot.worker.concurrent:
                free = self._config.concurrency - len(slot.in_flight)
            elif slot.in_flight:
                return  # samples sent behind a slow one would wait for it, although another process may be idle
            else:
                free = min(BATCH_SIZE, max(1, int(TARGET_S / max(slot.mean_s, 1e-6))))
            share = math.ceil(len(self._pending) / len(self._slots))
            while self._pending and len(batch) < min(free, share):
                item = self._pending.popleft()
                if not item.done.done():
                    batch.append(item)
        if not batch:
            return
        now = time.monotonic()
        slot.sent = len(batch)
        for item in batch:
            slot.in_flight[item.number] = item
            slot.since[item.number] = now
        slot.worker.score([item.encoded for item in batch])

    def _record_answer(self, slot: _Slot, message: Json) -> bool:
        """Finish a sample; False for bytes that a function wrote into the pipe itself."""
        try:
            item = slot.in_flight[message["id"]]
        except (KeyError, TypeError):
            return False
        score = _score(message, item, self.reward_hash)
        dropped = message.get("dropped", {})
        if score is None or not _is_texts(dropped, MAX_COMPONENTS):
            return False
        if dropped:
            self._dropped.tell(dropped)
        del slot.in_flight[item.number]
        slot.crashes = 0
        now = time.monotonic()
        took_s = now - slot.since.pop(item.number)
        if slot.worker.batched:
            took_s /= slot.sent
        elif not slot.worker.concurrent and slot.in_flight:
            slot.since[next(iter(slot.in_flight))] = now  # the next one has just begun
        slot.mean_s += 0.1 * (took_s - slot.mean_s)
        if score.outcome is Outcome.TIMEOUT or message.get("exceeded"):
            suspects = [item]
            self._exceeded(suspects, score.outcome, score.reason)
            self._suspect(suspects)
            return True
        if not item.done.done():
            item.done.set_result(self._blamed(score, item.blamed) if item.blamed else score)
        return True

    async def _overdue(self, slot: _Slot) -> None:
        """Kill the process; the sample that it ran times out, or each of several suspects is scored alone."""
        line = await slot.worker.current_line()
        await slot.worker.kill()
        suspects = self._suspects_of(slot)
        if len(suspects) == 1:
            reason = f"no score after {self._deadline_s:g} s{line}"
            self._exceeded(suspects, Outcome.TIMEOUT, reason)
        self._requeue(slot, suspects)

    async def _on_exit(self, slot: _Slot) -> None:
        """Score the samples of an ended process again, unless its only suspect has ended one before."""
        code = await slot.worker.kill()
        suspects = self._suspects_of(slot)
        why = slot.worker.exit_reason(code)
        if suspects:
            log.warning("a scoring process ended (%s) with %d samples", why, len(slot.in_flight))
        if code == -signal.SIGXCPU and len(suspects) == 1:
            reason = f"more than {self._sandbox.limits.cpu_s} s of CPU time"
            self._exceeded(suspects, Outcome.TIMEOUT, reason)
        elif len(suspects) == 1 and suspects[0].deaths:
            reason = f"the function ended its process: {why}"
            self._exceeded(suspects, Outcome.INFRA_FAULT, reason)
        self._requeue(slot, suspects)

    def _exceeded(self, suspects: list[_PoolSample], outcome: Outcome, reason: str) -> None:
        """Answer the only suspect with its fault, or leave it to be scored once more: as it is, then as if empty."""
        (item,) = suspects
        if not self._policy_answers:
            lasting = outcome is Outcome.INFRA_FAULT
            self._fail(suspects.pop(), outcome, reason, lasting=lasting)
        elif item.blamed:
            suspects.pop()
            if not item.done.done():
                fault = Score(uid=item.uid, outcome=outcome, reward_hash=self.reward_hash)
                item.done.set_result(self._blamed(fault, item.blamed))
        elif item.deaths:
            item.blamed = reason
            item.encoded = json.dumps({**json.loads(item.encoded), "solution_str": ""}).encode()

    def _blamed(self, score: Score, why: str) -> Score:
        """The score of a response that took too much, from that of an empty one."""
        fault = not score.outcome.trainable
        return replace(
            score,
            outcome=Outcome.POLICY_FAULT,
            score=0.0 if fault else min(score.score, 0.0),
            components=dict.fromkeys((f.component for f in self._rule.functions), 0.0)
            if fault
            else score.components,
            token_rewards=None,
            reason="",
            texts={"policy_fault": why},
        )

    def _suspects_of(self, slot: _Slot) -> list[_PoolSample]:
        """Samples that may have run when the process ended: the oldest for plain functions, else all."""
        held = list(slot.in_flight.values())
        return held if slot.worker.concurrent or slot.worker.batched else held[:1]

    def _suspect(self, items: Sequence[_PoolSample]) -> None:
        for item in items:
            item.deaths += 1
            self._suspects.append(item)

    def _requeue(self, slot: _Slot, suspects: list[_PoolSample]) -> None:
        self._suspect(suspects)
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


def _backoff_s(failures: int) -> float:
    return min(0.1 * 2.0 ** min(failures, 10), 5.0)


def _is_texts(value: Json, most: int) -> bool:
    """Whether it is an object with few enough texts, none too long."""
    return (
        isinstance(value, dict)
        and len(value) <= most
        and all(isinstance(text, str) and len(text) <= MAX_TEXT for text in value.values())
    )


def _score(message: Json, item: _PoolSample, reward_hash: str) -> Score | None:
    """The score that an answer gives; None for one that our code does not send: a function wrote it into the pipe."""
    uid = item.uid
    try:
        if "score" not in message:
            fault, reason = Outcome(message["fault"]), message["reason"]
            if fault.trainable or not isinstance(reason, str):
                return None
            return Score(
                uid=uid,
                outcome=fault,
                reason=printable(reason),
                reward_hash=reward_hash,
                lasting=fault is Outcome.INFRA_FAULT,
            )
        outcome = Outcome(message.get("outcome", Outcome.OK))
        components, tokens = message["components"], message.get("token_rewards")
        names, numbers = list(components), [message["score"], *components.values(), *(tokens or ())]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if not outcome.trainable or len(names) > MAX_COMPONENTS or any(map(name_fault, names)):
        return None
    if not all(isinstance(n, int | float) and abs(n) <= MAX_FLOAT32 for n in numbers):
        return None
    texts = message.get("texts", {})
    if not _is_texts(texts, MAX_TEXTS) or any(map(name_fault, texts)):
        return None
    if tokens is not None and item.tokens not in (None, len(tokens)):
        return None
    return Score(
        uid=uid,
        outcome=outcome,
        score=float(message["score"]),
        components={name: float(value) for name, value in components.items()},
        reward_hash=reward_hash,
        token_rewards=None if tokens is None else tuple(map(float, tokens)),
        texts={name: printable(text) for name, text in texts.items()},
    )


def _recipe_sandbox(rule: RewardRule, config: RewardConfig) -> Sandbox:
    """The sandbox of the rule's functions; at level `strict` they see the folders of their files, for imports."""
    folders = {Path(function.path).parent for function in rule.functions if function.source}
    return open_sandbox(config.recipe_sandbox, config.recipe_limits, readable=sorted(folders))
