"""The process of one server: a child that cannot outlive its parent; its log is read when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from meshrl.common import device_lease, process_guard
from meshrl.contract.errors import InfraError

GRACE_S = 5.0
"""Seconds that a server has to end."""
STOP_S = 30.0
"""The guard kills what has not ended in `GRACE_S`; the rest is for a busy machine."""
TAIL_BYTES = 64 << 10
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(
    r"^(\(\w[^)]*\)\s*)?((ERROR|WARNING|INFO)\s+\S+\s+\S+\s+(\[[^\]]*\])?\s*)?"
)
_FAULT = re.compile(r"^([\w.]*(Error|Exception|Interrupt)\b.*|.*\berror: .*|.*No module named .*)")
_SEE_ABOVE = re.compile(r"root cause|Engine core initialization failed|WorkerProc initialization")


class ServerProcess:
    """One process group, from `start` to `stop`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> Path:
        """The file with the server's output."""
        return self._log

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Run the command under a process guard, which ends it when this process ends.

        Raises:
            InfraError: the log cannot be written, or no process started.
        """
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with _private(self._log) as log:
                self._process = await asyncio.create_subprocess_exec(
                    *process_guard.guarded_command(self._command, grace_s=GRACE_S, log=self._log),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                    pass_fds=device_lease.inherited(),
                )
        except OSError as error:
            raise InfraError(f"cannot start {self._command[0]}: {error}") from error

    async def ended(self) -> int:
        """Wait for the end of the process, kill what is left of its group, return its exit code."""
        if self._process is None:
            raise InfraError("the server was not started")
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)
        return code

    async def stop(self) -> None:
        """End the whole process group; idempotent.

        Raises:
            InfraError: the guard itself does not end.
        """
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self.ended()
        except TimeoutError as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise InfraError(
                f"the server (pid {process.pid}) did not end within {STOP_S:g} s"
            ) from error

    def last_error(self) -> str:
        """The line of the log that best explains why the server failed."""
        return last_error(_tail(self._log))


def last_error(text: str) -> str:
    """The last line of `text` that names an error itself (no "see above"), else its last line."""
    lines = [_LOG_PREFIX.sub("", _COLOUR.sub("", line)).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    faults = [line for line in lines if _FAULT.match(line)]
    causes = [line for line in faults if not _SEE_ABOVE.search(line)]
    return (causes or faults or lines or ["it wrote nothing"])[-1]


def _private(path: Path) -> BinaryIO:
    """An empty file for nobody else: servers log their arguments, a key among them. No link is followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    file = os.fdopen(os.open(path, flags, 0o600), "wb")
    os.fchmod(file.fileno(), 0o600)
    return file


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"OSError: {error}"
