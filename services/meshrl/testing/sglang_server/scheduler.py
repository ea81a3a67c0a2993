"""The fake's scheduler: requests join, get one token a step, leave. It pauses, retracts and labels as SGLang does.

With `overlap` a step is recorded after the next one has begun, so that a pause in place leaves a sampled step
unrecorded: its tokens are then labelled with the version that is loaded later, as in SGLang. Its weights are one
number, the *mark*, which is the first number of the first tensor of a version; `Updates` loads them.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import signal
import struct
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.rollout.engines.vllm import PLUGIN_DIR
from meshrl.rollout.server_engine.staging import ARRIVED, ASKED

WIDTH = {"F32": 4, "BF16": 2, "F16": 2}
MARKS = 256
"""Marks are smaller than this."""
GARBAGE = MARKS - 1
"""The mark of weights that are half one version and half another."""
OUTSIDE = "{route} must run between begin_weight_update() and end_weight_update()"
Answer = tuple[bool, str]


def read_mark(directory: Path) -> int:
    """The mark of the version in `directory`.

    Raises:
        FileNotFoundError: there is none, as the loader of a real worker would.
        ValueError: the file is not whole.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    with files[0].open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max(entry["data_offsets"][1] for entry in header.values())
        if files[0].stat().st_size != 8 + length + end:
            raise ValueError(f"{files[0]} is not whole")
        first = min(header.values(), key=lambda entry: entry["data_offsets"][0])
        file.seek(8 + length + first["data_offsets"][0])
        return mark_of(first["dtype"], file.read(WIDTH[first["dtype"]]))


def load_staged(directory: Path) -> int:
    """The mark that our loader finds, which is the real one where memory is asked for or weights arrived there."""
    if not any((directory / name).is_file() for name in (ASKED, ARRIVED)):
        return read_mark(directory)
    import torch  # takes seconds, and few servers need it

    if str(PLUGIN_DIR) not in sys.path:
        sys.path.append(str(PLUGIN_DIR))
    loader = importlib.import_module("meshrl_staged")
    (_, first), *_ = list(loader.tensors(directory))
    mark = int(abs(float(first.view(-1)[0]))) % MARKS
    loader.lend(directory, torch.device("cpu"))
    return mark


def mark_of(dtype: str, raw: bytes) -> int:
    """The mark in the little-endian bytes of a number; `dtype` is the safetensors name."""
    if dtype == "BF16":
        raw = b"\0\0" + raw
    value = float(np.frombuffer(raw, dtype="<f2" if dtype == "F16" else "<f4")[0])
    return int(abs(value)) % MARKS


def logprob(mark: int, cache_mark: int) -> float:
    """A log-prob that encodes both marks exactly in float32."""
    return -(MARKS * mark + cache_mark) / MARKS**2


def marks_of(value: float) -> tuple[int, int]:
    """The marks of the weights that sampled, and of those that computed the cache."""
    both = round(-value * MARKS**2)
    return both // MARKS, both % MARKS


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
        """(tokens, label): after `tokens` recorded tokens no step runs until the version label is `label`."""
        self.die_at: int | None = None
        """Recorded tokens at which the process is killed."""
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
        """Compute the prompt; a cached prefix keeps the mark of the weights that computed it."""
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


class Died(Exception):
    """An exception that ends the scheduler, and with it the server."""


class Updates:
    """One weight-update session at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        loaders: Collection[str],
    ) -> None:
        self.partial = False
        """The next load stops halfway."""
        self._scheduler = scheduler
        self._loaders = loaders
        self._open = False

    async def begin(self) -> Answer:
        """Open the session; if not paused, wait until no request runs."""
        await self._quiet()
        if self._open:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self._open = True
        return True, "Success"

    async def end(self) -> Answer:
        """Close the session."""
        if not self._open:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._open = False
        return True, "Success"

    async def from_loader(self, load_format: str | None, directory: Path) -> Answer:
        """A registered loader reads `directory`. Its exceptions are not caught."""
        if not self._open:
            return False, OUTSIDE.format(route="update_weights_from_tensor")
        if load_format not in self._loaders:
            raise Died(f"NotImplementedError: Unknown load_format={load_format}")
        try:
            self._take(load_staged(directory))
        except Exception as error:
            raise Died(f"{type(error).__name__}: {error}") from error
        return True, "Success"

    async def from_disk(self, directory: Path) -> Answer:
        """Load `directory`; needs no session, and catches exceptions."""
        await self._quiet()
        try:
            self._take(read_mark(directory))
        except Exception as error:
            return False, f"Failed to get weights iterator: {error}."
        return True, "Succeeded to update model weights."

    def _take(self, mark: int) -> None:
        if self.partial:
            self._scheduler.mark = GARBAGE
            raise RuntimeError("the tensor ends too soon")
        self._scheduler.mark = mark

    async def _quiet(self) -> None:
        """Paused, or no request runs: the real server takes a lock that running requests hold."""
        scheduler = self._scheduler
        await scheduler.until(lambda: scheduler.paused or not scheduler.requests)
