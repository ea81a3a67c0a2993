"""Files that survive a kill: appended to a journal, or a whole folder put in place by a rename.

append   write, sync                                                        a kill leaves a part of it, or all
place    .writing-NAME ──fill, facts.json with each file's hash, sync──▶ NAME         a kill leaves none, or all
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshrl.common.files import sync
from meshrl.contract.errors import CorruptError, NotFoundError, UserError
from meshrl.contract.types import Json
from meshrl.trainer.checkpoint.checkpoint import hash_of

LOCK = "owner.lock"
FACTS = "facts.json"
WRITING = ".writing-"
SCHEME = "tinker://"
WEIGHTS, SAMPLER = "weights", "sampler_weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class Disk:
    """Changes files so that they are durable on return."""

    def append(self, path: Path, at: int, data: bytes) -> None:
        """Write behind the first `at` bytes, which are all that counts of the file.

        Raises:
            OSError: the disk refuses. Nothing of `data` counts then.
        """
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                written = 0
                while written < len(data):
                    written += os.pwrite(file, data[written:], at + written)
                os.fsync(file)
            except OSError:
                os.ftruncate(file, at)
                raise
        finally:
            os.close(file)
        if not at:
            sync(path.parent)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a torn end off."""
        os.truncate(path, size)
        sync(path)

    def place(self, target: Path, facts: Mapping[str, Json], fill: Callable[[Path], None]) -> None:
        """Put a folder with what `fill` writes in place of one of this name.

        Raises:
            OSError: the disk refuses; what was there is there still.
        """
        draft = target.with_name(WRITING + target.name)
        self.remove(draft)
        self.make(target.parent)
        draft.mkdir()
        try:
            fill(draft)
            files = [path for path in sorted(draft.rglob("*")) if path.is_file()]
            hashes = {str(path.relative_to(draft)): hash_of(path) for path in files}
            text = json.dumps({"facts": facts, "files": hashes}, indent=1, sort_keys=True)
            (draft / FACTS).write_text(text)
            for path in (*draft.rglob("*"), draft):
                sync(path)
        except BaseException:
            self.remove(draft)
            raise
        self.remove(target)
        draft.rename(target)
        sync(target.parent)

    def make(self, folder: Path) -> None:
        """Make a folder and its parents."""
        if not folder.is_dir():
            self.make(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            sync(folder.parent)

    def remove(self, path: Path) -> None:
        """Remove a file or a folder, if it is there."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            with suppress(FileNotFoundError):
                path.unlink()


def copy_folder(source: Path, target: Path, *ignored: str) -> None:
    """Copy a folder to a name that is free, durably, and all of it or nothing; `ignored` are patterns of names."""
    draft = target.with_name(WRITING + target.name)
    shutil.rmtree(draft, ignore_errors=True)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copytree(source, draft, ignore=shutil.ignore_patterns(*ignored))
    for path in (*draft.rglob("*"), draft):
        sync(path)
    draft.rename(target)
    sync(target.parent)


def owned(folder: Path) -> int:
    """The lock of the one process that may change a folder of models, which frees it by `os.close`, or its end.

    Raises:
        UserError: another process has the folder.
    """
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UserError(f"{folder} is in use by another process; stop it first") from error
    return lock


def facts_of(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """The facts of a folder that `place` recorded; with `verify` each file is compared with its hash.

    Raises:
        CorruptError: it is not what was written.
    """
    try:
        record = json.loads((folder / FACTS).read_text())
        facts: dict[str, Any] = record["facts"]
        for name, digest in record["files"].items() if verify else ():
            if hash_of(folder / name) != digest:
                raise CorruptError(f"{folder}: {name} differs from what {FACTS} says")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{folder}: unreadable: {error}") from error
    return facts


def check_name(what: str, name: str) -> str:
    """`name`, if it may be a file's. Raises UserError."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{what} {name!r}: want 1 to 128 letters, digits, '.', '_', ':' or '-', the first a letter or digit"
        )
    return name


def path_of(model: str, kind: str, name: str) -> str:
    """The path of a checkpoint, as callers write it."""
    return f"{SCHEME}{model}/{kind}/{name}"


def folder_of(root: Path, path: str) -> Path:
    """The place of the checkpoint that a `tinker://` path names, whether it is there or not.

    Raises:
        UserError: it is no such path.
    """
    model, kind, name, *more = [*path.removeprefix(SCHEME).split("/"), "", "", ""]
    if not path.startswith(SCHEME) or kind not in (WEIGHTS, SAMPLER) or any(more):
        raise UserError(
            f"checkpoint {path!r}: want {SCHEME}MODEL/weights/NAME or {SCHEME}MODEL/sampler_weights/NAME"
        )
    return root / "checkpoints" / check_name("model", model) / kind / check_name("name", name)


def stored(root: Path, path: str) -> Path:
    """The folder of a checkpoint that is there. Raises NotFoundError, UserError."""
    folder = folder_of(root, path)
    if not (folder / FACTS).is_file():
        raise NotFoundError(f"there is no checkpoint {path}")
    return folder
