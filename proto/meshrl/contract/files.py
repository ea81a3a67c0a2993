"""Files that are there after a power cut."""

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
