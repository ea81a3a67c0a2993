"""The engine's thread: takes commands between two decode steps and never during one.

    event loop                                  this thread
    ──────────                                  ───────────
    post(Submit | Abort | Swap | Stop) ──▶ inbox ─▶ swap? ─▶ admit ─▶ step ─┐
    Row.deliver(delta) ◀── call_soon_threadsafe ◀── flush ◀─────────────────┘

consumes: commands. waits for: a command, when nothing runs. unblocked by: `post`.
produces: deltas, every `stream_interval` steps, at a request's end and before weights change.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from meshrl.contract.errors import EngineGoneError, FencedError, InfraError, MeshError
from meshrl.contract.types import GenerateDelta, OnUpdate, Version
from meshrl.rollout.engines.torch.batch import DecodeBatch, DecodeRow
from meshrl.rollout.engines.torch.staging import StagedVersion
from meshrl.rollout.engines.torch.weights import Weights
from meshrl.rollout.ports import UNSERVED

log = logging.getLogger(__name__)

FLUSH_S = 0.5
"""Tokens of a slow model are delivered at least this often, however few they are."""
RATE_WINDOW_S = 2.0
"""Span over which `tokens_per_s` is measured."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Requests that start together, in this order, as far as slots allow."""

    rows: Sequence[DecodeRow]


@dataclass(frozen=True, slots=True)
class Abort:
    """A consumer has closed its stream."""

    row: DecodeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """New weights. `done` may be cancelled until the swap begins."""

    version: Version
    staged: StagedVersion
    on_update: OnUpdate
    done: Future[None] = field(default_factory=Future)
    posted: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Free the device's memory, or, with `wake`, take it again; rows stay. A swap wakes too."""

    wake: bool = False
    done: Future[None] = field(default_factory=Future)


class Stop:
    """Abort everything and end the thread."""


Command: TypeAlias = Submit | Abort | Swap | Sleep | Stop


class DecodeThread:
    """Owns the batch and the serving weights; other code sends it commands with `post`."""

    def __init__(
        self, batch: DecodeBatch, loop: asyncio.AbstractEventLoop, *, stream_interval: int
    ) -> None:
        self.version = UNSERVED
        self.tokens_generated = 0
        self.tokens_per_s = 0.0
        self.updates = 0
        self.update_pause_s = 0.0
        self.asleep = False
        """Weights are on the host, and nothing is sampled."""
        self._batch = batch
        self._loop = loop
        self._stream_interval = stream_interval
        self._weights: Weights | None = None
        self._waiting: deque[DecodeRow] = deque()
        self._swaps: deque[Swap] = deque()
        self._steps = 0
        self._flushed_at = self._rated_at = time.perf_counter()
        self._rated_tokens = 0
        self._inbox: list[Command] = []
        self._wake = threading.Condition()
        self._ended: str | None = None
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._batch)

    def start(self) -> None:
        """Start to process commands."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Send a command; callable from any thread.

        Raises:
            EngineGoneError: the thread has ended; says why.
        """
        with self._wake:
            if self._ended is not None:
                raise EngineGoneError(f"the engine has stopped: {self._ended}")
            self._inbox.append(command)
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False when it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        ended: str = "closed"
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except Exception as error:
            # Whatever failed, no request may wait for a response that will not come.
            log.exception("the engine's thread crashed")
            ended = f"its thread crashed: {type(error).__name__}: {error}"
        self._end(ended, crashed=ended != "closed")

    def _turn(self) -> bool:
        """Commands, then one decode step; False after Stop."""
        with self._wake:
            while not self._inbox and not self._can_work():
                self._wake.wait()
            commands, self._inbox = self._inbox, []
        for command in commands:
            match command:
                case Submit(rows):
                    self._waiting.extend(rows)
                case Abort(row):
                    self._abort(row)
                case Swap():
                    self._swaps.append(command)
                case Sleep():
                    self._sleep(command)
                case Stop():
                    return False
        self._swap_if_due()
        if self._weights is not None and not self.asleep:
            if not self._swaps:
                self._flush(self._batch.admit(self._weights, self._waiting))
            self._steps += 1
            self._flush(self._batch.step(self._weights))
        return True

    def _can_work(self) -> bool:
        if self.asleep:
            return bool(self._swaps)
        startable = bool(self._waiting) and self._weights is not None
        return len(self._batch) > 0 or startable or bool(self._swaps)

    def _abort(self, row: DecodeRow) -> None:
        self._batch.remove([row])
        if row in self._waiting:
            self._waiting.remove(row)

    def _swap_if_due(self) -> None:
        """Change the weights; a draining change waits until no request runs, and new requests wait for it."""
        while self._swaps:
            swap = self._swaps[0]
            running = len(self._batch) > 0 and not self.asleep
            if swap.on_update is OnUpdate.DRAIN and running and not swap.done.cancelled():
                return
            # It stays at the head until it is done, so that a crash meanwhile answers it.
            if swap.done.set_running_or_notify_cancel():
                self._swap(swap)
            self._swaps.popleft()

    def _swap(self, swap: Swap) -> None:
        if swap.version < self.version:
            message = f"version {swap.version} is older than the serving {self.version}"
            swap.done.set_exception(FencedError(message))
            return
        draining = swap.on_update is OnUpdate.DRAIN
        begin = swap.posted if draining else time.perf_counter()
        self._flush([], everything=True)
        self._weights = swap.staged.serve(self._weights, self._batch.device)
        self.version = swap.version
        if swap.on_update is OnUpdate.INTERRUPT or self.asleep:
            self._batch.recompute(self._weights)
        self.asleep = False
        self.updates += 1
        self.update_pause_s = time.perf_counter() - begin
        swap.done.set_result(None)

    def _sleep(self, command: Sleep) -> None:
        """Fall asleep or wake. Its waiting callers are answered also when this crashes the thread."""
        if not command.done.set_running_or_notify_cancel():
            return
        try:
            if self.asleep is command.wake and self._weights is not None:
                self._flush([], everything=True)
                device = self._batch.device if command.wake else torch.device("cpu")
                self._weights = self._weights.to(device)
                if command.wake:
                    self._batch.recompute(self._weights)
                else:
                    self._batch.release_cache()
            self.asleep = not command.wake
        except Exception as error:
            command.done.set_exception(EngineGoneError(f"the engine has stopped: {error}"))
            raise
        command.done.set_result(None)

    def _flush(self, done: Sequence[DecodeRow], *, everything: bool = False) -> None:
        """Deliver what is due: requests that ended, and at intervals what the others have sampled."""
        now = time.perf_counter()
        due = self._steps % self._stream_interval == 0 or now - self._flushed_at > FLUSH_S
        rows = list(done)
        if everything or due:
            self._flushed_at = now
            rows += [row for row in self._batch.rows if row.fresh_logprobs]
        events = [(row, row.error or row.take_fresh(self.version)) for row in rows]
        self.tokens_generated += sum(
            len(event.tokens) for _, event in events if isinstance(event, GenerateDelta)
        )
        if now - self._rated_at > RATE_WINDOW_S:
            fresh = self.tokens_generated - self._rated_tokens
            self.tokens_per_s = fresh / (now - self._rated_at)
            self._rated_at, self._rated_tokens = now, self.tokens_generated
        if events:
            self._deliver(events)

    def _deliver(self, events: Sequence[tuple[DecodeRow, GenerateDelta | MeshError]]) -> None:
        try:
            self._loop.call_soon_threadsafe(_dispatch, events)
        except RuntimeError:
            # The event loop is closed, and with it every consumer: there is no reason to decode.
            log.warning("the event loop is closed; %d deltas dropped", len(events))
            self._waiting.clear()
            self._batch.remove(list(self._batch.rows))

    def _end(self, reason: str, *, crashed: bool) -> None:
        """Answer every waiting request: with `abort` after a close, with InfraError after a crash."""
        with self._wake:
            self._ended = reason
            commands, self._inbox = self._inbox, []
        rows = [*self._batch.rows, *self._waiting]
        swaps: list[Swap | Sleep] = list(self._swaps)
        for command in commands:
            if isinstance(command, Submit):
                rows += command.rows
            elif isinstance(command, Swap | Sleep):
                swaps.append(command)
        for row in rows:
            row.finish_reason = "abort"
        if crashed:
            error = InfraError(f"the engine has stopped: {reason}")
            self._deliver([(row, error) for row in rows])
        else:
            self._deliver([(row, row.take_fresh(self.version)) for row in rows])
        for swap in swaps:
            if not swap.done.done():
                swap.done.set_exception(EngineGoneError(f"the engine has stopped: {reason}"))
        self._batch.remove(list(self._batch.rows))
        self._waiting.clear()


def _dispatch(events: Sequence[tuple[DecodeRow, GenerateDelta | MeshError]]) -> None:
    for row, event in events:
        row.deliver(event)
