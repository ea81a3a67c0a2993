"""Whether all that callers' models have on disk is sound, and a copy of it; no server may be writing it meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from typing_extensions import override

from meshrl.contract.errors import ConflictError, CorruptError, MeshError
from meshrl.trainer.hosted import MODELS
from meshrl.trainer.hosted.bench import Bench
from meshrl.trainer.hosted.hosted_model import HostedModel
from meshrl.trainer.hosted.records import EntryKind
from meshrl.trainer.hosted.storage import LOCK, WRITING, Disk, copy_folder, facts_of, owned


@dataclass(slots=True, kw_only=True)
class HostedAudit:
    """The findings."""

    problems: list[str]
    """One sentence each."""
    models: int = 0
    requests: int = 0
    """Requests in journals."""
    unanswered: int = 0
    """Requests that a server would do now."""
    checkpoints: int = 0
    nbytes: int = 0


class _Untouched(Disk):
    """Changes nothing: a torn end stays where it is."""

    @override
    def make(self, folder: Path) -> None: ...

    @override
    def remove(self, path: Path) -> None: ...

    @override
    def truncate(self, path: Path, size: int) -> None: ...


def audit(folder: Path) -> HostedAudit:
    """Read every byte: frames of journals, hashes of snapshots and checkpoints, and whether each model can continue.

    Raises:
        UserError: a server has the folder.
    """
    found = HostedAudit(problems=[])
    with _nobody_has(folder):
        for model in sorted((folder / MODELS).iterdir()):
            found.models += 1
            try:
                _look_at(HostedModel(folder, model.name, cast(Bench, None), _Untouched()), found)
            except (MeshError, ValueError, OSError) as error:
                found.problems.append(f"model {model.name}: {error}")
        for checkpoint in sorted((folder / "checkpoints").glob("*/*/[!.]*")):
            found.checkpoints += 1
            try:
                facts_of(checkpoint)
            except CorruptError as error:
                found.problems.append(error.message)
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        found.nbytes = sum(file.st_size for file in files)
    return found


def _look_at(model: HostedModel, found: HostedAudit) -> None:
    requests = model.journal.numbers(EntryKind.REQUEST)
    found.requests += len(requests)
    found.unanswered += sum(not model.known(number) for number in requests)
    found.problems += [f"model {model.name}: {problem}" for problem in model.problems()]


def copy(source: Path, target: Path) -> None:
    """Copy a folder of models to a place where nothing is, durably and at once or not at all.

    Raises:
        ConflictError: something is there. UserError: a server has the source.
    """
    if target.exists():
        raise ConflictError(f"{target} exists, and is never overwritten; name another folder")
    with _nobody_has(source):
        copy_folder(source, target, LOCK, f"{WRITING}*")


@contextmanager
def _nobody_has(folder: Path) -> Iterator[None]:
    """Keep a server from starting; a backup has no lock, and none could start there."""
    lock = owned(folder) if (folder / LOCK).exists() else None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
