"""The audit log: who did what to which version, one JSON object a line, appended and synced, never changed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class RewardAuditLog:
    """Lines of `path`. A line that a kill cut short is ended, and stands there for what it is."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, **fields: Any) -> None:
        """One line with `at`, seconds since 1970; durable on return."""
        line = json.dumps({"at": round(time.time(), 3), **fields}).encode() + b"\n"
        os.write(self._file, line)
        os.fsync(self._file)

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
