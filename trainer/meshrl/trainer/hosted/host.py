"""Requests of callers who train models of their own: journaled, done in their order, answered with the first answer.

submit ──▶ journal, synced ──▶ accepted      one thread: the next request of the model that has had least time
                                                └──▶ answer ──▶ journal, synced ──▶ result
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from meshrl.contract.codec import pack_training
from meshrl.contract.errors import (
    BusyError,
    CapacityError,
    ConflictError,
    InfraError,
    MeshError,
    NotFoundError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.ports import Training
from meshrl.contract.types import (
    CreateModel,
    LoadWeights,
    Refused,
    SaveWeights,
    TrainingRequest,
    TrainingResult,
    TrainingVerb,
)
from meshrl.trainer.hosted import MODELS
from meshrl.trainer.hosted.bench import Bench
from meshrl.trainer.hosted.hosted_model import HostedModel, digest
from meshrl.trainer.hosted.records import EntryKind
from meshrl.trainer.hosted.storage import Disk, check_name, folder_of, owned

log = logging.getLogger(__name__)
PAUSE_S = 1.0
"""Seconds between two tries to journal an answer on a full disk."""
CLOSE_S = 5.0
"""Answers that are not journaled by then are made again after the next start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostingLimits:
    """Bounds of what callers may ask for, and of what a restart does again."""

    request_bytes: int = 256 << 20
    models: int = 1024
    """At a time, those that were unloaded left out."""
    in_memory: int = 64
    """The others rest on disk until their next request."""
    waiting: int = 1024
    """Requests of a model that are not done yet."""
    waiting_bytes: int = 1 << 30
    """Their bytes, by model. The next one is taken always."""
    snapshot_steps: int = 16
    """Optimizer steps after which a model's state is kept: a restart does no more again."""
    snapshot_bytes: int = 64 << 20
    """Bytes of requests that were done, after which it is kept in any case."""
    answers_bytes: int = 256 << 20
    """Bytes of a model's journal that are kept for callers who ask again; older answers are gone."""
    unloaded: int = 256
    """Models that were unloaded whose answers are kept."""
    missing_s: float = 600.0
    """Seconds without a request of a model after which those that wait for a missing one are told."""


class _Turn:
    """A model's place in the order, and the calls that its answers wake."""

    def __init__(self, model: HostedModel, heard: float) -> None:
        self.model = model
        self.heard = heard
        """Time at which a request last came."""
        self.served = 0.0
        """Seconds of the thread that it has had, or the others had when it began to wait."""
        self.last = 0.0
        """Time of its last request."""
        self.accepting: dict[int, asyncio.Task[None]] = {}
        self.sizes: dict[int, int] = {}
        """Bytes of the requests that wait."""
        self.answers: list[tuple[EntryKind, int, bytes]] = []
        """Answers that are being journaled."""
        self.settling: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Wake the waiting clients."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return after the next `tell`."""
        await self._changed.wait()

    async def settled(self) -> None:
        """Return when all answers are journaled."""
        if self.settling is not None:
            await asyncio.wait([self.settling])


class HostedTraining(Training):
    """The port, over one bench and one folder; one process at a time."""

    def __init__(
        self,
        folder: Path,
        bench: Bench,
        *,
        disk: Disk | None = None,
        limits: HostingLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is read before `open`."""
        self.folder = folder
        self.limits = limits or HostingLimits()
        self._bench, self._disk, self._clock = bench, disk or Disk(), clock
        self._turns: dict[str, _Turn] = {}
        self._thread = ThreadPoolExecutor(1, "hosted training")
        self._work = asyncio.Event()
        self._now = 0.0
        """Seconds that the model whose turn it is had been served."""
        self._serving: asyncio.Task[None] | None = None
        self._lock = -1

    async def open(self) -> None:
        """Read the journals, and begin to work.

        Raises:
            UserError: another process has the folder.
            CorruptError: a journal is damaged.
        """
        self._disk.make(self.folder / MODELS)
        lock = owned(self.folder)
        try:
            for folder in sorted((self.folder / MODELS).iterdir()):
                model = HostedModel(self.folder, folder.name, self._bench, self._disk)
                if (number := model.unanswered_load()) is not None:
                    answer = pack_training(TrainingResult())
                    await model.journal.append((EntryKind.ANSWER, number, answer))
                if model.digests:
                    self._turns[folder.name] = _Turn(model, self._clock())
                else:  # its process was killed before it had a request
                    self._disk.remove(folder)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Stop after the request that is being done. What waits is done after the next start."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        await asyncio.to_thread(self._thread.shutdown)
        for turn in self._turns.values():
            unfinished = [*turn.accepting.values(), *filter(None, [turn.settling])]
            if unfinished:
                _, late = await asyncio.wait(unfinished, timeout=CLOSE_S)
                for task in late:
                    task.cancel()
            turn.tell()
            turn.model.close()
        os.close(self._lock)
        self._lock = -1

    @override
    async def submit(self, request: TrainingRequest) -> None:
        self._check_open()
        try:
            data = pack_training(request)
        except UserError as error:
            request = replace(request, verb=Refused(error=error.message))
            data = pack_training(request)
        number = request.number
        turn = self._turns.get(request.model)
        if turn is None:
            turn = self._begin(request, len(data))
        turn.heard = self._clock()
        model, known = turn.model, turn.model.digests.get(number)
        if model.failed:
            raise InfraError(f"model {model.name}: {model.failed}")
        if number < 0:
            raise UserError(f"request {number}: want a number from 0 on")
        if known is None and number < model.first:
            return  # so long ago that its answer is gone, too
        if known is not None and known != digest(data):
            raise ConflictError(f"model {model.name} has another request {number} already")
        if known is None:
            self._check_room(turn, number, len(data))
            model.digests[number], turn.sizes[number] = digest(data), len(data)
            turn.accepting[number] = asyncio.create_task(self._accept(turn, request, data))
        if number in turn.accepting:
            await asyncio.shield(turn.accepting[number])
        if model.journal.has(EntryKind.REFUSAL, number):
            raise UserError(model.answer(number).error or "refused")

    @override
    async def result(self, model: str, number: int, *, wait_s: float) -> TrainingResult:
        turn = self._turns.get(model)
        if turn is None:
            raise NotFoundError(f"there is no model {model}")
        hosted = turn.model
        if number not in hosted.digests and not hosted.known(number):
            why = "has an answer no longer" if number < hosted.first else "was not submitted"
            raise NotFoundError(f"request {number} of model {model} {why}")
        try:
            async with asyncio.timeout(wait_s):
                while not hosted.known(number):
                    self._check_open()
                    if hosted.failed:
                        raise InfraError(f"model {model}: {hosted.failed}")
                    await turn.changed()
        except TimeoutError:
            silence_s = self._clock() - turn.heard
            if hosted.next not in hosted.digests and silence_s > self.limits.missing_s:
                raise ConflictError(
                    f"request {number} of model {model} waits for request {hosted.next}, which"
                    f" never came: send that one again, or begin another model"
                ) from None
            raise WaitTimeoutError(
                f"request {number} of model {model} is not done; it is at {hosted.next}"
            ) from None
        return hosted.answer(number)

    def _check_open(self) -> None:
        if self._serving is None:
            raise UnavailableError("the training of callers' models has stopped; ask again")

    def _begin(self, request: TrainingRequest, nbytes: int) -> _Turn:
        """The place of a model that has no request yet."""
        if request.number or not isinstance(request.verb, CreateModel | Refused):
            raise NotFoundError(f"there is no model {request.model}; want its creation, request 0")
        check_name("model", request.model)
        if fault := self._fault(request, nbytes):
            raise UserError(fault)
        ended = [turn.model for turn in self._turns.values() if turn.model.ended]
        if len(self._turns) - len(ended) >= self.limits.models:
            raise BusyError(f"there are {self.limits.models} models; want one unloaded first")
        for model in ended[: max(0, len(ended) - self.limits.unloaded)]:
            del self._turns[model.name]
            self._disk.remove(model.folder)
        made = HostedModel(self.folder, request.model, self._bench, self._disk)
        self._turns[request.model] = turn = _Turn(made, self._clock())
        return turn

    def _check_room(self, turn: _Turn, number: int, nbytes: int) -> None:
        """Refuse a request that must wait and finds no room; one that others wait for is never refused."""
        model, most = turn.model, self.limits.waiting
        if number == model.next:
            return
        if number >= model.next + most:
            raise BusyError(
                f"model {model.name}: {most} requests may wait, and it is at {model.next}"
            )
        if sum(turn.sizes.values()) + nbytes > self.limits.waiting_bytes:
            raise BusyError(
                f"model {model.name}: requests of {self.limits.waiting_bytes} bytes may wait"
            )

    async def _accept(self, turn: _Turn, request: TrainingRequest, data: bytes) -> None:
        """Journal a request, or why it was refused."""
        model, number = turn.model, request.number
        idle = not model.ready
        entry = (EntryKind.REQUEST, number, data)
        try:
            # In a thread: pictures are read.
            if fault := await asyncio.to_thread(self._fault, request, len(data)):
                refusal = pack_training(TrainingResult(error=fault))
                entry = (EntryKind.REFUSAL, number, model.digests[number] + refusal)
            await model.journal.append(entry)
        except BaseException:
            del model.digests[number], turn.sizes[number]
            raise
        finally:
            del turn.accepting[number]
        if idle:
            turn.served = max(turn.served, self._now)
        turn.tell()
        self._work.set()

    def _fault(self, request: TrainingRequest, nbytes: int) -> str:
        """Why a request is refused; mostly empty."""
        verb, most = request.verb, self.limits.request_bytes
        try:
            if nbytes > most:
                raise UserError(f"a request of {nbytes} bytes; want at most {most}, or several")
            if isinstance(verb, Refused):
                raise UserError(verb.error)
            if isinstance(verb, CreateModel) != (request.number == 0):
                raise UserError("request 0 creates the model, and no other does")
            if isinstance(verb, SaveWeights):
                check_name("name", verb.name)
            source = verb.path if isinstance(verb, LoadWeights) else None
            if isinstance(verb, CreateModel):
                source = verb.load_from
            if source is not None:
                folder_of(self.folder, source)
            self._bench.check(verb)
        except UserError as error:
            return error.message
        return ""

    async def _serve(self) -> None:
        """One request after the other, each of the model that has had least."""
        while True:
            ready = [turn for turn in self._turns.values() if turn.model.ready]
            if not ready:
                self._work.clear()
                await self._work.wait()
                continue
            turn = min(ready, key=lambda each: each.served)
            self._now, begun = turn.served, self._clock()
            try:
                await self._advance(turn)
            except Exception as error:
                log.exception("model %s", turn.model.name)
                self._fail(turn, error)
            turn.last = self._clock()
            turn.served += turn.last - begun

    async def _advance(self, turn: _Turn) -> None:
        """Do the next request of a model."""
        model, number = turn.model, turn.model.next
        if not model.journal.has(EntryKind.REFUSAL, number):
            verb = await self._compute(lambda: model.verb(number))
            loads = isinstance(verb, LoadWeights) or getattr(verb, "load_from", None) is not None
            if loads or isinstance(verb, SaveWeights):
                # What is found outside may be changed by it, and what it finds may change: no answer that was given
                # before may have to be given again.
                await turn.settled()
            answer = await self._perform(turn, verb)
            if loads and answer.error is None:
                await self._keep(turn, number + 1)
            turn.answers.append((EntryKind.ANSWER, number, pack_training(answer)))
            if turn.settling is None or turn.settling.done():
                turn.settling = asyncio.create_task(self._settle(turn))
        model.next = number + 1
        turn.sizes.pop(number, None)
        steps, nbytes = self.limits.snapshot_steps, self.limits.snapshot_bytes
        if model.steps >= steps or model.behind >= nbytes or model.ended:
            await turn.settled()
            try:
                if not model.failed:
                    await self._keep(turn, number + 1)
            except OSError as error:
                log.warning("model %s: no snapshot, more is done again: %s", model.name, error)

    async def _perform(self, turn: _Turn, verb: TrainingVerb) -> TrainingResult:
        """Do the next request of a model; others that have been served least recently make room for it."""
        model = turn.model
        while True:
            others = [
                each for each in self._turns.values() if each.model.in_memory and each is not turn
            ]
            full = not model.in_memory and len(others) >= self.limits.in_memory
            try:
                if not full:
                    answer: TrainingResult = await self._compute(lambda: model.perform(verb))
                    return answer
            except BusyError as error:
                if not others:
                    return TrainingResult(error=error.message, user_error=False)
            await self._rest(min(others, key=lambda each: each.last))

    async def _rest(self, turn: _Turn) -> None:
        """Let a model leave memory, which is kept first where that spares work."""
        model = turn.model
        await turn.settled()
        if model.behind and not model.failed:
            await self._keep(turn, model.next)
        await self._compute(model.rest)

    async def _keep(self, turn: _Turn, number: int) -> None:
        """Keep a model's state before request `number`."""
        model = turn.model
        if model.ended:
            await self._compute(lambda: model.remove_snapshots(keep=0))
            return
        await self._compute(lambda: model.snapshot(number))
        model.forget_before(number, self.limits.answers_bytes)

    async def _settle(self, turn: _Turn) -> None:
        """Journal answers in their order, those of one sync together, however long the disk is full."""
        while (batch := list(turn.answers)) and not turn.model.failed:
            try:
                await turn.model.journal.append(*batch)
                del turn.answers[: len(batch)]
                turn.tell()
            except CapacityError as error:
                log.warning("model %s waits: %s", turn.model.name, error)
                await asyncio.sleep(PAUSE_S)
            except MeshError as error:
                self._fail(turn, error)

    def _fail(self, turn: _Turn, error: Exception) -> None:
        turn.model.failed = f"it cannot continue before a restart: {error}"
        turn.tell()

    async def _compute(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
