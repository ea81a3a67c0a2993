"""Makes files durable, and replaces files atomically."""

from __future__ import annotations

import os
from pathlib import Path


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


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file; a reader sees the old one or this one, never a part, whoever is killed. Not synced.

    Raises:
        OSError: the folder is not there, or the disk refuses.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(content if isinstance(content, bytes) else content.encode())
    draft.replace(path)
