"""Makes files durable, replaces files atomically, and checks that a secret is closed to other users."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshrl.contract.errors import ConfigError

FOR_OTHERS = stat.S_IROTH | stat.S_IWOTH
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
LASTING = FULL | {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
"""Errors of the file system that another try meets again, until a person has done something."""


def json_object(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def sync(path: Path) -> None:
    """Make what was written to a file durable; of a folder, which names it has (made, renamed, removed).

    Raises:
        OSError: the disk refuses; whether anything is durable is then unknown.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file; a reader sees the old one or this one, never a part, also after a kill. Not synced.

    A `private` one, of rows, is closed to other users, whatever the umask.

    Raises:
        OSError: the folder is not there, or the disk refuses; it names the file, beside which nothing is left.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if private:
            draft.unlink(missing_ok=True)
            draft.touch(mode=0o600, exist_ok=False)
        draft.write_bytes(content if isinstance(content, bytes) else content.encode())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        error.filename, error.filename2 = str(path), None  # a write names none
        raise


def make_private(directory: Path, what: str) -> None:
    """Make a directory where it is missing, closed to other users.

    Raises:
        ConfigError: it cannot be made; the message calls it `what`.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what}: {directory}: {error.strerror}") from error


def check_owner(path: Path, what: str) -> os.stat_result:
    """Refuse a file or directory of another user, who could change it; root's is fine.

    Returns its status.

    Args:
        path: The file; a link's target counts.
        what: How the message calls it.

    Raises:
        ConfigError: it is another user's, or is not there.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{what}: {path}: {error.strerror}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{what}: {path} belongs to user {status.st_uid}, who may change it at any time: want one of your own"
            f" (this is user {os.geteuid()}), or root's"
        )
    return status


def lasting_fault(error: BaseException) -> str:
    """One line about an error that another try would meet again, with the file or the place; empty for others.

    Libraries say in errors of their own that a disk is full.
    """
    if not isinstance(error, OSError):
        said = str(error)
        full = any(os.strerror(number) in said for number in FULL)
        return said.strip().splitlines()[0] if full else ""
    if error.errno not in LASTING:
        return ""
    where = error.filename
    if where is None and error.errno in FULL:
        where = next(full_places(), None)
    return f"{where if where is not None else 'a file'}: {error.strerror}"


def full_places() -> Iterator[str]:
    """The full ones among the places that a write without a file name may have been to."""
    for descriptor, name in ((1, "standard output"), (2, "standard error")):
        try:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if is_file and not os.fstatvfs(descriptor).f_bavail:
                yield name
        except OSError:
            continue
    for path in ("/dev/shm", tempfile.gettempdir(), ".", *_written_to()):
        try:
            if not os.statvfs(path).f_bavail:
                yield str(Path(path).absolute())
        except OSError:
            continue


def _written_to() -> Iterator[str]:
    """Mount points of writable file systems with room for files, as Linux lists them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            path = line.split(" ")[1].encode().decode("unicode_escape")
            with contextlib.suppress(OSError):
                if os.access(path, os.W_OK) and os.statvfs(path).f_blocks:
                    yield path


def check_private_file(path: Path, what: str) -> None:
    """Refuse a file of secrets (a key, tokens, a password) that every user of the machine may read or change.

    Its group may have access: secret mounts are often `root:<group>` with mode 0440. A link's target counts.

    Args:
        path: The file.
        what: How the message calls it, such as the recipe's key.

    Raises:
        ConfigError: the file is open to others, or another user's, or is not there.
    """
    mode = check_owner(path, what).st_mode
    if mode & FOR_OTHERS:
        may = " and ".join(
            word for bit, word in ((stat.S_IROTH, "read"), (stat.S_IWOTH, "change")) if mode & bit
        )
        raise ConfigError(
            f"{what}: every user of this machine may {may} {path} (mode {stat.S_IMODE(mode):04o}): "
            f"chmod o-rw {path}"
        )
