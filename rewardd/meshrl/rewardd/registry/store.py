"""Stores versions and names on disk. A kill at any byte leaves each file either old or new.

    <dir>/versions/<hash>/manifest.json, source.py | reward.whl, tests.json     written once, never changed
    <dir>/names/<name>.json                                                     replaced by rename

A version is written to a temporary folder, synced, and renamed; only then a name points to it. At worst a kill leaves
a version that no name has, and the next start removes it. One process at a time writes: it holds `lock`.
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

from meshrl.common.files import sync
from meshrl.contract.errors import CapacityError, CorruptError, NotFoundError, UserError
from meshrl.rewardd.registry.types import Case, Manifest, Name, Submission, content_hash

SOURCE, WHEEL, MANIFEST, TESTS = "source.py", "reward.whl", "manifest.json", "tests.json"


class SubmissionStore:
    """The files under `directory`. Its methods block, briefly."""

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
            if draft.is_dir():
                shutil.rmtree(draft)
            else:
                draft.unlink()

    def close(self) -> None:
        """Let another process write. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def full(self) -> bool:
        """Whether there are as many versions as may be."""
        return len(list(self._versions.iterdir())) >= self._max_versions

    def directory(self, version: str) -> Path:
        """Folder of a version. Raises NotFoundError."""
        path = self._versions / version
        if not version or not path.is_dir():
            raise NotFoundError(f"no reward version {version!r}")
        return path

    def add(self, submission: Submission) -> Manifest:
        """Write a version, unless it exists.

        Raises:
            CapacityError: there are too many versions.
        """
        version = content_hash(submission)
        if (self._versions / version).is_dir():
            return self.manifest(version)
        if self.full:
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
        except OSError:  # the same content was added meanwhile, or the disk failed
            shutil.rmtree(draft)
            return self.manifest(version)
        sync(self._versions)
        return manifest

    def remove(self, version: str) -> None:
        """Delete a version; no error if there is none."""
        path = self._versions / version
        if path.is_dir():
            draft = self._draft(version)
            path.rename(draft)
            shutil.rmtree(draft)

    def delete_all_but(self, versions: Collection[str]) -> None:
        """Delete every version except these."""
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
        """The submitted file."""
        return (self.directory(version) / self.manifest(version).content).read_bytes()

    def names(self) -> dict[str, Name]:
        """Every name. Raises CorruptError."""
        names = (Name.from_json(_read(path)) for path in sorted(self._names.glob("*.json")))
        return {name.name: name for name in names}

    def save(self, name: Name) -> None:
        """Durable on return."""
        draft = self._names / f".{name.name}.json"
        _write(draft, _json(name.to_json()))
        draft.rename(self._names / f"{name.name}.json")
        sync(self._names)

    def remove_name(self, name: str) -> None:
        """Delete a name, whose versions may be deleted then."""
        (self._names / f"{name}.json").unlink(missing_ok=True)
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
