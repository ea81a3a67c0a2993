"""The supervisor's end of the watchdog: it is told every process group, and outlives the supervisor."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import TracebackType

WATCHDOG = Path(__file__).with_name("watchdog.py")


class Sweeper:
    """A running watchdog. Closing it tells it that every group has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def __enter__(self) -> Sweeper:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(WATCHDOG)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def add(self, group: int) -> None:
        """Sweep this process group should the supervisor die."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """The group has ended."""
        if group in self._groups:
            self._groups.discard(group)
            self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        # Somebody may have killed the watchdog: PR_SET_PDEATHSIG still covers the children themselves.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
