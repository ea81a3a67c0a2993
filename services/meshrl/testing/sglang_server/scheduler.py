"""The fake's scheduler: requests join, get one token a step, leave; it pauses, retracts and stamps as SGLang does.

With `overlap` a step is booked after the next one was begun, so that a pause in place leaves a sampled step unbooked:
its tokens are then stamped with what is loaded later. That is SGLang's own behaviour.
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
    """One request on its way."""

    rid: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    salt: str
    out: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)
    """Something is to be sent; True with the last of it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(label, number of tokens) at each change of the weights."""
    sampled: int = 0
    """Tokens, the unbooked one included."""
    notified: int = 0
    cache_mark: int | None = None
    """Of the weights that computed its cache; None: it has none."""
    finish: dict[str, Any] | None = None
    closing_label: str = ""


class Scheduler:
    """Everything that a real one keeps in its process."""

    def __init__(
        self, *, slots: int, overlap: bool, vocabulary: int, eos: Sequence[int], step_s: float
    ) -> None:
        self.label = LABEL_AT_START
        self.mark = 0
        self.step_s = step_s
        self.stalled = False
        self.holds: deque[tuple[int, str]] = deque()
        """(tokens, label): once so many tokens have been booked nothing is computed until the label is that."""
        self.die_at: int | None = None
        """The process is killed when so many tokens have been booked."""
        self.paused = False
        self.says_mark = True
        """Tokens are the mark; else they vary with request and position."""
        self.requests: dict[str, Request] = {}
        self.tokens = 0
        self._changed = asyncio.Condition()
        self._slots = slots
        self._overlap = overlap
        self._vocabulary = vocabulary
        self._eos = frozenset(eos)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_hand: list[tuple[Request, int, float]] = []
        self._prefixes: dict[tuple[str, tuple[int, ...]], int] = {}
        self._work = asyncio.Event()

    # What routes ask for

    def add(self, request: Request) -> None:
        """It waits for a slot."""
        self.requests[request.rid] = request
        self._waiting.append(request)
        self._work.set()

    def abort(self, rid: str, *, everything: bool, reason: dict[str, Any]) -> None:
        """End every request whose id begins with `rid`, or all."""
        for request in list(self.requests.values()):
            if everything or request.rid.startswith(rid):
                self._finish(request, dict(reason))

    def pause(self, mode: str) -> None:
        """`in_place` leaves everything as it is; `retract` books the step in hand and gives all slots back."""
        self.paused = True
        if mode == "retract":
            self._book(self._in_hand)
            self._in_hand = []
            for request in self._running:
                request.cache_mark = None
            self._waiting.extendleft(reversed(self._running))
            self._running = []

    def resume(self) -> None:
        """Compute again."""
        self.paused = False
        self._work.set()

    def flush(self) -> bool:
        """Forget cached prefixes; refused while anything runs, or waits without a pause."""
        if self._running or self._in_hand or (self._waiting and not self.paused):
            return False
        self._prefixes.clear()
        return True

    def relabel(self, label: str) -> None:
        """From here on tokens are stamped `label`."""
        if label == self.label:
            return
        for request in (*self._running, *self._waiting):
            if request.tokens:
                request.changes.append((self.label, len(request.tokens)))
        self.label = label
        self._work.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; looked at whenever a request has left or a pause has ended."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def notify(self) -> None:
        """Have those who wait look again."""
        async with self._changed:
            self._changed.notify_all()

    # Steps

    async def run(self) -> None:
        """Steps, for ever."""
        while True:
            busy = self._running or self._waiting or self._in_hand
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
            launched, self._in_hand = self._in_hand, launched
        self._book(launched)
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
        if not self.says_mark:
            # The draws of a greedy continuation are those of the whole; others begin anew with their seed.
            seed = request.params.get("sampling_seed") if request.params["temperature"] else 0
            at = position if request.params["temperature"] else position + len(request.prompt)
            name = f"{self.mark}:{seed}:{at}".encode()
            token = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) % self._vocabulary
        return token, logprob(self.mark, request.cache_mark)

    def _book(self, launched: Sequence[tuple[Request, int, float]]) -> None:
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
