"""One model that a caller trains: its files, what its requests do, and how a new process gets it back.

    models/MODEL/journal-*          requests and answers (`records.py`)
    models/MODEL/snapshot-NUMBER/   weights, AdamW's state and gradients before request NUMBER
    checkpoints/MODEL/weights/NAME/, …/sampler_weights/NAME/

A model is its newest snapshot and the requests behind it, done again: on the same machine that gives the same bits.
A request is done again until its answer is in the journal, so what it leaves outside, a checkpoint, says whose it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import xxhash

from meshrl.contract.codec import (
    pack_training,
    unpack_training_request,
    unpack_training_result,
)
from meshrl.contract.errors import (
    BusyError,
    ConflictError,
    MeshError,
    NotFoundError,
    UserError,
)
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    Json,
    LoadWeights,
    Pass,
    SaveWeights,
    TrainingRequest,
    TrainingResult,
    TrainingVerb,
    UnloadModel,
)
from meshrl.trainer.hosted import MODELS
from meshrl.trainer.hosted.bench import Bench, Model
from meshrl.trainer.hosted.records import EntryKind, Journal
from meshrl.trainer.hosted.storage import (
    SAMPLER,
    WEIGHTS,
    WRITING,
    Disk,
    facts_of,
    folder_of,
    path_of,
    stored,
)

log = logging.getLogger(__name__)
_SNAPSHOT = "snapshot-"


class HostedModel:
    """A model, its journal and its progress. The computing thread may call only the methods that say so."""

    def __init__(self, root: Path, name: str, bench: Bench, disk: Disk) -> None:
        """Read the journal; the weights are read at their first use.

        Raises:
            CorruptError: the journal is damaged.
        """
        self.name, self._root, self._bench, self._disk = name, root, bench, disk
        self.folder = root / MODELS / name
        disk.make(self.folder)
        for left in self.folder.glob(f"{WRITING}*"):  # a killed process's
            disk.remove(left)
        self.journal = journal = Journal(self.folder, disk)
        self.digests = {
            number: journal.read(EntryKind.REFUSAL, number)[: len(digest(b""))]
            for number in journal.numbers(EntryKind.REFUSAL)
        }
        """Hashes of the requests that were accepted, and whose answers are kept."""
        for number in journal.numbers(EntryKind.REQUEST):
            self.digests[number] = digest(journal.read(EntryKind.REQUEST, number))
        self.first = min(self.digests, default=0)
        """The request behind the newest snapshot."""
        if snapshots := self._snapshots():
            self.first = int(snapshots[-1].name.removeprefix(_SNAPSHOT))
        self.next = self.first
        """The request that is to be done now."""
        while self.known(self.next):
            self.next += 1
        self.behind = 0
        """Bytes of requests that were done since the snapshot."""
        self.steps = 0
        """Optimizer steps since then."""
        self.failed = ""
        """Why it cannot continue before a restart."""
        last = self.next - 1
        unloaded = journal.has(EntryKind.REQUEST, last) and isinstance(self.verb(last), UnloadModel)
        failed = self.answer(0).error if self.known(0) else None
        self.ended = unloaded or failed is not None
        """Whether it was unloaded, or never created."""
        self._restored = self.ended
        self._state: Model | None = None
        self._created: CreateModel | None = None
        self._absent = failed or ("it was unloaded" if unloaded else "it was not created")

    @property
    def ready(self) -> bool:
        """Whether the next request is there."""
        there = self.journal.has
        return not self.failed and (
            there(EntryKind.REQUEST, self.next) or there(EntryKind.REFUSAL, self.next)
        )

    @property
    def in_memory(self) -> bool:
        """Whether its weights are."""
        return self._state is not None

    def known(self, number: int) -> bool:
        """Whether a request has its answer."""
        return self.journal.has(EntryKind.ANSWER, number) or self.journal.has(
            EntryKind.REFUSAL, number
        )

    def answer(self, number: int) -> TrainingResult:
        """The answer of a request that has it."""
        journal = self.journal
        if journal.has(EntryKind.REFUSAL, number):
            data = journal.read(EntryKind.REFUSAL, number)[len(digest(b"")) :]
        else:
            data = journal.read(EntryKind.ANSWER, number)
        return unpack_training_result(data)

    def unanswered_load(self) -> int | None:
        """The request that a kill between its snapshot and its answer, which says nothing, has left without one."""
        last = self.first - 1
        return last if last >= 0 and self._snapshots() and not self.known(last) else None

    def problems(self) -> Iterator[str]:
        """Whatever would keep a new process from continuing as the last one did. Reads all files."""
        journal, snapshots = self.journal, self._snapshots()
        if self.first and not snapshots and not self.ended:
            yield f"its snapshot before request {self.first} is gone"
        if snapshots and not self.ended:
            unpack_training_request(bytes.fromhex(facts_of(snapshots[-1])["created"]))
        for number in range(self.first, self.next):
            if not (
                journal.has(EntryKind.REQUEST, number) or journal.has(EntryKind.REFUSAL, number)
            ):
                yield f"request {number} has an answer, and is gone"
        for number in journal.numbers(EntryKind.REQUEST):
            self.verb(number)
        for number in (*journal.numbers(EntryKind.ANSWER), *journal.numbers(EntryKind.REFUSAL)):
            self.answer(number)

    def perform(self, verb: TrainingVerb) -> TrainingResult:
        """Do the next request, which is `verb`. The thread's. Raises BusyError: other models must rest first."""
        if not self._restored:
            self._restore()
        self.behind += self.journal.length(self.next)
        try:
            return self._do(self.next, verb)
        except BusyError:
            raise
        except MeshError as error:
            asked = isinstance(error, UserError | NotFoundError | ConflictError)
            return TrainingResult(error=error.message, user_error=asked)
        except Exception as error:
            if not isinstance(verb, Pass | SaveWeights | CreateModel):
                raise  # half of it may be done
            log.exception("model %s, request %d", self.name, self.next)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return TrainingResult(error=reason, user_error=False)

    def rest(self) -> None:
        """Leave memory until the next request. The thread's."""
        self.close()
        self._restored = self.ended

    def snapshot(self, number: int) -> None:
        """Keep what the model is before request `number`; what came before is not done again. The thread's."""
        if self._state is None or self._created is None:
            return
        created = pack_training(TrainingRequest(model=self.name, number=0, verb=self._created))
        facts: dict[str, Json] = {"number": number, "created": created.hex()}
        self._disk.place(self.folder / f"{_SNAPSHOT}{number:012d}", facts, self._state.write)
        self.remove_snapshots(keep=1)

    def remove_snapshots(self, *, keep: int) -> None:
        """Remove all but the newest."""
        found = self._snapshots()
        for folder in found[: len(found) - keep]:
            self._disk.remove(folder)

    def forget_before(self, number: int, most_bytes: int) -> None:
        """There is a snapshot before request `number`: answers before it are kept in `most_bytes` of journal."""
        self.first, self.steps, self.behind = number, 0, 0
        self.journal.rotate(number)
        self.journal.trim(number, most_bytes)
        self.digests = {
            each: value
            for each, value in self.digests.items()
            if each >= self.next or self.known(each)
        }

    def close(self) -> None:
        """Free the weights. The thread's, or when it has ended."""
        if self._state is not None:
            self._state.close()
            self._state = None

    def _snapshots(self) -> list[Path]:
        return sorted(self.folder.glob(f"{_SNAPSHOT}*"))

    def verb(self, number: int) -> TrainingVerb:
        """The verb of a request."""
        return unpack_training_request(self.journal.read(EntryKind.REQUEST, number)).verb

    def _restore(self) -> None:
        """Load the newest snapshot, and do again what was answered since."""
        if snapshots := self._snapshots():
            created = bytes.fromhex(facts_of(snapshots[-1])["created"])
            verb = unpack_training_request(created).verb
            assert isinstance(verb, CreateModel)
            self._created, self._state = verb, self._bench.create(verb)
            self._state.read(snapshots[-1], with_optimizer=True, with_gradients=True)
        for number in range(self.first, self.next):
            self.behind += self.journal.length(number)
            if not self.journal.has(EntryKind.ANSWER, number):
                continue
            verb, error = self.verb(number), self.answer(number).error
            if error is None and isinstance(verb, CreateModel | AdamStep | Pass):
                if not isinstance(verb, Pass) or verb.backward:
                    self._do(number, verb)
            elif isinstance(verb, AdamStep) and self._state is not None:
                self._state.drop_gradients()
        self._restored = True

    def _do(self, number: int, verb: TrainingVerb) -> TrainingResult:
        if isinstance(verb, CreateModel):
            return self._create(verb)
        if self._state is None:
            raise UserError(f"model {self.name} does not exist: {self._absent}")
        match verb:
            case Pass():
                return self._state.forward_backward(verb)
            case AdamStep():
                self.steps += 1
                return self._state.step(verb)
            case SaveWeights():
                return self._save(self._state, number, verb)
            case LoadWeights():
                self._load(self._state, verb.path, with_optimizer=verb.with_optimizer)
            case UnloadModel():
                self.close()
                self.ended, self._absent = True, "it was unloaded"
        return TrainingResult()

    def _create(self, verb: CreateModel) -> TrainingResult:
        state = None
        try:
            if verb.load_from is not None:
                form = facts_of(stored(self._root, verb.load_from), verify=False)["form"]
                verb = replace(verb, **form)
            state = self._bench.create(verb)
            if verb.load_from is not None:
                self._load(state, verb.load_from, with_optimizer=verb.with_optimizer)
        except BusyError:
            raise
        except Exception as error:
            self.ended, self._absent = True, str(error)
            if state is not None:
                state.close()
            raise
        self._state, self._created = state, replace(verb, load_from=None)
        return TrainingResult()

    def _save(self, state: Model, number: int, verb: SaveWeights) -> TrainingResult:
        path = path_of(self.name, SAMPLER if verb.for_sampler else WEIGHTS, verb.name)
        folder = folder_of(self._root, path)
        own: dict[str, Json] = {"model": self.name, "number": number}
        if folder.exists() and not verb.overwrite:
            before = facts_of(folder, verify=False)
            if {key: before.get(key) for key in own} != own:
                raise ConflictError(f"there is {path} already; want another name, or overwrite")
            return TrainingResult(path=path)
        base = self._created.base_model if self._created else ""
        facts = {**own, "form": state.form, "base": state.base, "base_model": base}
        self._disk.place(folder, facts, state.export if verb.for_sampler else state.write)
        return TrainingResult(path=path)

    def _load(self, state: Model, path: str, *, with_optimizer: bool) -> None:
        folder = stored(self._root, path)
        if folder.parent.name != WEIGHTS:
            raise UserError(f"{path} is for samplers; want {path_of('MODEL', WEIGHTS, 'NAME')}")
        facts = facts_of(folder)
        if (facts["form"], facts["base"]) != (state.form, state.base):
            raise UserError(
                f"{path} is of another form, or another base model: it has {facts['form']} on {facts['base']}, the"
                f" model {state.form} on {state.base}"
            )
        state.read(folder, with_optimizer=with_optimizer)


def digest(request: bytes) -> bytes:
    """The hash that makes a repeated request the same one."""
    return xxhash.xxh3_128_digest(request)
