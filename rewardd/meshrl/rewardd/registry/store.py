"""Versions and names on disk. A kill at any byte leaves each file as it was before or as it is after.

    <dir>/versions/<hash>/manifest.json, source.py | reward.whl, tests.json     written once, never changed
    <dir>/names/<name>.json                                                     replaced whole, by rename

A version is written beside its place, synced, and renamed; only then a name points to it. What a kill leaves is at
worst a version that no name has, which the next start removes. One process at a time writes: it holds `lock`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrl.contract.errors import CapacityError, CorruptError, NotFoundError, UserError
from meshrl.contract.files import sync
from meshrl.rewardd.registry.types import Case, Manifest, Name, Submission, content_hash

SOURCE, WHEEL, MANIFEST, TESTS = "source.py", "reward.whl", "manifest.json", "tests.json"


class VersionStore:
    """The files under `directory`; synchronous and small."""

    def __init__(self, directory: Path, max_versions: int) -> None:
        """Open, and remove what a kill left half written.

        Raises:
            UserError: another process writes here.
        """
        self._versions = directory / "versions"
        self._names = directory / "names"
        self._max_versions = max_versions
        for path in (self._versions, self._names):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise UserError(
                f"{directory} is in use by another reward service; give each a reward.registry.dir of its own"
            ) from error
        for draft in (*self._versions.glob(".*"), *self._names.glob(".*")):
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()

    def close(self) -> None:
        """Let another process write. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def directory(self, version: str) -> Path:
        """Of a version. Raises NotFoundError."""
        path = self._versions / version
        if not version or not path.is_dir():
            raise NotFoundError(f"no reward version {version!r}")
        return path

    def add(self, submission: Submission) -> Manifest:
        """Write a version; one that is there stays as it is.

        Raises:
            CapacityError: there are too many.
        """
        version = content_hash(submission)
        if (self._versions / version).is_dir():
            return self.manifest(version)
        if len(list(self._versions.iterdir())) >= self._max_versions:
            raise CapacityError(f"there are {self._max_versions} versions; no room for another")
        manifest = Manifest(
            name=submission.name,
            hash=version,
            entry_point=submission.entry_point,
            kind=submission.kind,
            content=WHEEL if submission.wheel else SOURCE,
            deps=submission.deps,
            limits=submission.limits,
        )
        draft = self._draft(version)
        draft.mkdir()
        _write(draft / manifest.content, submission.wheel or submission.source.encode())
        _write(draft / TESTS, _json([asdict(case) for case in submission.cases]))
        _write(draft / MANIFEST, _json(manifest.to_json()))
        sync(draft)
        try:
            draft.rename(self._versions / version)
        except OSError:  # the same content was added meanwhile, or the disk fails
            shutil.rmtree(draft)
            return self.manifest(version)
        sync(self._versions)
        return manifest

    def remove(self, version: str) -> None:
        """Forget a version to which nothing points; one that is not there is no error."""
        path = self._versions / version
        if path.is_dir():
            draft = self._draft(version)
            path.rename(draft)
            shutil.rmtree(draft)

    def keep(self, versions: Collection[str]) -> None:
        """Forget every version but these."""
        for path in list(self._versions.iterdir()):
            if path.name not in versions:
                self.remove(path.name)

    def _draft(self, version: str) -> Path:
        return self._versions / f".{version}.{secrets.token_hex(4)}"

    def manifest(self, version: str) -> Manifest:
        """Raises NotFoundError, CorruptError."""
        return Manifest.from_json(_read(self.directory(version) / MANIFEST))

    def cases(self, version: str) -> tuple[Case, ...]:
        """The tests that it was accepted with."""
        return tuple(Case(**case) for case in _read(self.directory(version) / TESTS))

    def content(self, version: str) -> bytes:
        """Of the file that was submitted."""
        return (self.directory(version) / self.manifest(version).content).read_bytes()

    def names(self) -> dict[str, Name]:
        """Every name. Raises CorruptError."""
        found = (Name.from_json(_read(path)) for path in sorted(self._names.glob("*.json")))
        return {name.name: name for name in found}

    def save(self, name: Name) -> None:
        """Durable on return."""
        draft = self._names / f".{name.name}.json"
        _write(draft, _json(name.to_json()))
        draft.rename(self._names / f"{name.name}.json")
        sync(self._names)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CorruptError(f"{path} cannot be read: {error}") from error


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
