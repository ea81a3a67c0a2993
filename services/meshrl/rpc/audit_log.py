"""The reward registry's audit log: who did what to which version, one JSON object per line, append-only."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class RewardAuditLog:
    """Appends to `path`. If a kill cut the last line short, a new line is begun after it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, **fields: Any) -> None:
        """Write one line, with `at` in seconds since 1970; durable on return."""
        line = json.dumps({"at": round(time.time(), 3), **fields}).encode() + b"\n"
        os.write(self._file, line)
        os.fsync(self._file)

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
