"""The fake's scheduler: requests join, get one token a step, leave. It pauses, retracts and labels as SGLang does.

With `overlap` a step is recorded after the next one has begun, so that a pause in place leaves a sampled step
unrecorded: its tokens are then labelled with the version that is loaded later, as in SGLang.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.testing.sglang_server.weights import logprob

LABEL_AT_START = "default"


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One running request."""

    rid: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    salt: str
    out: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)
    """An event is ready; True with the last one."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(label, number of tokens) at each change of the weights."""
    sampled: int = 0
    """Number of tokens, the unrecorded one included."""
    notified: int = 0
    cache_mark: int | None = None
    """Mark of the weights that computed its cache; None: it has no cache."""
    finish: dict[str, Any] | None = None
    closing_label: str = ""


class Scheduler:
    """The state and the steps of the server."""

    def __init__(
        self, *, slots: int, overlap: bool, vocabulary: int, eos: Sequence[int], step_s: float
    ) -> None:
        self.label = LABEL_AT_START
        self.mark = 0
        self.step_s = step_s
        self.stalled = False
        self.holds: deque[tuple[int, str]] = deque()
        """(tokens, label): after so many recorded tokens no step runs until the version label is `label`."""
        self.die_at: int | None = None
        """The process is killed when so many tokens have been recorded."""
        self.paused = False
        self.tokens_are_marks = True
        """Tokens equal the mark; else they vary with request and position."""
        self.requests: dict[str, Request] = {}
        self.tokens = 0
        self._changed = asyncio.Condition()
        self._slots = slots
        self._overlap = overlap
        self._vocabulary = vocabulary
        self._eos = frozenset(eos)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._unrecorded: list[tuple[Request, int, float]] = []
        self._prefixes: dict[tuple[str, tuple[int, ...]], int] = {}
        self._work = asyncio.Event()

    # Called by the routes

    def add(self, request: Request) -> None:
        """Queue a request for a slot."""
        self.requests[request.rid] = request
        self._waiting.append(request)
        self._work.set()

    def abort(self, rid: str, *, everything: bool, reason: dict[str, Any]) -> None:
        """End every request whose id begins with `rid`, or all."""
        for request in list(self.requests.values()):
            if everything or request.rid.startswith(rid):
                self._finish(request, dict(reason))

    def pause(self, mode: str) -> None:
        """`in_place` leaves requests where they are; `retract` records the unrecorded step and frees all slots."""
        self.paused = True
        if mode == "retract":
            self._record(self._unrecorded)
            self._unrecorded = []
            for request in self._running:
                request.cache_mark = None
            self._waiting.extendleft(reversed(self._running))
            self._running = []

    def resume(self) -> None:
        """Run steps again."""
        self.paused = False
        self._work.set()

    def flush(self) -> bool:
        """Drop cached prefixes; refused while requests run, or wait without a pause."""
        if self._running or self._unrecorded or (self._waiting and not self.paused):
            return False
        self._prefixes.clear()
        return True

    def relabel(self, label: str) -> None:
        """Label tokens with `label` from now on."""
        if label == self.label:
            return
        for request in (*self._running, *self._waiting):
            if request.tokens:
                request.changes.append((self.label, len(request.tokens)))
        self.label = label
        self._work.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; checked whenever a request has left or a pause has ended."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def notify(self) -> None:
        """Make waiting tasks check their condition again."""
        async with self._changed:
            self._changed.notify_all()

    # Steps

    async def run(self) -> None:
        """Run steps for ever."""
        while True:
            busy = self._running or self._waiting or self._unrecorded
            if self.paused or self.stalled or self._held() or not busy:
                self._work.clear()
                await self._work.wait()
                continue
            gone = len(self.requests)
            self._step()
            if len(self.requests) < gone:
                await self.notify()
            await asyncio.sleep(self.step_s)

    def _held(self) -> bool:
        while self.holds and self.label == self.holds[0][1]:
            self.holds.popleft()
        return bool(self.holds) and self.tokens >= self.holds[0][0]

    def _step(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            self._prefill(self._waiting.popleft())
        launched = [(request, *self._sample(request)) for request in self._running]
        if self._overlap:
            launched, self._unrecorded = self._unrecorded, launched
        self._record(launched)
        self._running = [request for request in self._running if request.finish is None]

    def _prefill(self, request: Request) -> None:
        """A cached prefix keeps the mark of the weights that computed it."""
        prefix = (request.salt, request.prompt)
        request.cache_mark = self._prefixes.setdefault(prefix, self.mark)
        request.sampled = len(request.tokens)
        self._running.append(request)

    def _sample(self, request: Request) -> tuple[int, float]:
        position = request.sampled
        request.sampled += 1
        assert request.cache_mark is not None
        token = self.mark % self._vocabulary
        if not self.tokens_are_marks:
            # The draws of a greedy continuation equal those of the whole; others start again with their seed.
            seed = request.params.get("sampling_seed") if request.params["temperature"] else 0
            at = position if request.params["temperature"] else position + len(request.prompt)
            name = f"{self.mark}:{seed}:{at}".encode()
            token = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) % self._vocabulary
        return token, logprob(self.mark, request.cache_mark)

    def _record(self, launched: Sequence[tuple[Request, int, float]]) -> None:
        for request, token, value in launched:
            if request.finish is not None:
                continue
            request.tokens.append(token)
            request.logprobs.append(value)
            self.tokens += 1
            if self.tokens == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self._check_end(request, token)
            unsent = len(request.tokens) - request.notified
            if request.finish is None and (
                request.notified == 0 or unsent >= (request.params.get("stream_interval") or 1)
            ):
                request.notified = len(request.tokens)
                request.out.put_nowait(False)

    def _check_end(self, request: Request, token: int) -> None:
        params = request.params
        stops = self._eos | set(params.get("stop_token_ids") or ())
        if not params.get("ignore_eos") and token in stops:
            self._finish(request, {"type": "stop", "matched": token})
        elif len(request.tokens) >= params["max_new_tokens"]:
            self._finish(request, {"type": "length", "length": params["max_new_tokens"]})

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish = reason
        request.closing_label = self.label
        self.requests.pop(request.rid, None)
        self._running = [each for each in self._running if each is not request]
        self._waiting = deque(each for each in self._waiting if each is not request)
        request.out.put_nowait(True)


def spans(request: Request) -> list[dict[str, Any]]:
    """Which label is stamped on which tokens of a finished request."""
    total = len(request.tokens)
    found: list[dict[str, Any]] = []
    for label, end in [*request.changes, (request.closing_label, total)]:
        start = found[-1]["end"] if found else 0
        if found and end <= start:
            continue
        found.append({"version": label, "start": start, "end": min(end, total)})
    return found
