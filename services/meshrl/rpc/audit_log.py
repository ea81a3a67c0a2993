"""The reward registry's audit log: who did what to which version, one JSON object per line, never dropped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from meshrl.common.line_file import LineFile

MAX_BYTES: Final = 16 << 20
"""A longer file is moved aside, to `audit.jsonl.1`; all of them stay."""


class RewardAuditLog:
    """Appends to `path`. If a kill cut the last line short, a new line is begun after it."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._file = LineFile(path, max_bytes=max_bytes, durable=True, mode=0o600)
        self._file.open()

    def write(self, **fields: Any) -> None:
        """Write one line, with `at` in seconds since 1970; durable on return."""
        self._file.write(json.dumps({"at": round(time.time(), 3), **fields}))

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
