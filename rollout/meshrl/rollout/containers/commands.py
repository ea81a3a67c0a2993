"""Commands in a box that others hold: all that their exec has to carry is one stream in and one out.

    worker ── mark, words, bytes ──▶ bash of TOOLS ──▶ its pid, what the command prints, a line: mark, exit code

The image needs nothing for it, and what the policy puts in place of a program there prepares nothing that the reward
runs. A command has ended at the line of its mark, though others may hold its output open.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from meshrl.contract.errors import NotFoundError, UnavailableError, UserError
from meshrl.rollout.containers.box import (
    OUTPUT_BYTES,
    VARIABLES,
    BoxLimits,
    Finished,
    Output,
    absolute,
    pack,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
OWNER, ROW = "meshrl.owner", "meshrl.row"
"""Labels."""
TOOLS = "/.meshrl"
"""A folder of the box, which it cannot write, with PROGRAMS, what they are linked with, and `ld.so`."""
PROGRAMS = ("bash", "head", "mkdir", "rm", "tar")
ANSWER_S = 60.0
"""Most seconds for an answer."""
KILLED, KILLED_S = 137, 5.0
"""Exit code of a command that was killed, and the most seconds until its output ends."""
COPY_S = 600.0
"""Most seconds in which files come in or out."""


def _tool(name: str) -> str:
    return f"{TOOLS}/ld.so --library-path {TOOLS} {TOOLS}/{name}"


BASH = [*_tool("bash").split(), "-c"]
HOLD = "exec 3<> <(:); while ((SECONDS < $0)); do read -t 1 -u 3; done"
"""Process 1: waits, and buries orphans. It starts nothing, as a bash ends where it cannot."""
HEAD = 'IFS=" " read -r mark words size; mapfile -d "" -n "$words" -t given; echo $$'
END = r'printf "\n%s %s\n" "$mark"'
RUN = f"""
{HEAD}
ulimit -c 0; ulimit -u "${{given[1]}}"; ulimit -f "${{given[2]}}"
if [ "$size" = 0 ]; then exec < /dev/null; else
    {_tool("head")} -c "$size" > "/.$mark"; exec < "/.$mark"; {_tool("rm")} -f "/.$mark"
fi
exec 2> /dev/null
(
    exec 2>&1
    cd -- "${{given[0]}}" || exit 127
    set -- "${{given[@]:3}}"
    while [ "$1" != -- ]; do export "$1" || exit 126; shift; done
    shift
    exec "$@"
)
{END} $?
"""
"""Its stdin: mark, number of words, number of bytes; the words, each with a zero byte; the bytes, which are the
command's stdin. The words: folder, most processes, most KiB of a file, variables, `--`, and the command. A URL would
be too short for them."""
STOP = f"""
{HEAD}
while kill -9 -1; set -- /proc/[0-9]*; [ $# -gt 3 ]; do read -t 0.1; done
{END} 0
"""
"""Kills all but itself and process 1, and waits until that has buried them: the dead count as processes."""
PUT = f'{_tool("rm")} -rf -- "$0" && {_tool("mkdir")} -p -- "$1" && {_tool("tar")} -xf - -C "$1"'
GET = f'[[ -f $0 && ! -L $0 ]] && exec {_tool("head")} -c "$1" -- "$0" 2> /dev/null'


class CommandBox(ABC):
    """A box whose backend has an exec, and no more."""

    def __init__(self, name: str, limits: BoxLimits) -> None:
        self.name = name
        self.closed = False
        self._limits = limits
        self._created: asyncio.Task[Any] | None = None

    @abstractmethod
    def talk(self, script: str, given: bytes) -> Iterator[bytes | int]:
        """Run a script by BASH with `given` on its stdin, in a session of its own.

        Called in threads. Yields what it prints until nobody can print any more, then its exit code; none, or an
        exception, where the box has ended.
        """

    @abstractmethod
    async def runs(self) -> bool:
        """Whether it has not ended. Raises UnavailableError."""

    @abstractmethod
    async def remove(self) -> None:
        """Remove it, if it is there. Raises UnavailableError."""

    async def open(
        self, creating: Coroutine[Any, Any, T], starting: Callable[[T], Awaitable[None]]
    ) -> None:
        """Create and start it. A row that leaves meanwhile waits until it is known what there is to remove."""
        self._created = asyncio.create_task(creating, name=f"box {self.name}")
        try:
            await starting(await asyncio.shield(self._created))
        except BaseException:
            await asyncio.shield(self.close())
            raise

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        folder: str = "/",
        variables: Mapping[str, str] = {},
        most: int = OUTPUT_BYTES,
    ) -> Finished:
        """Run a command. Raises UnavailableError."""
        if self.closed:
            raise self.gone()
        limits = [str(self._limits.processes), str(self._limits.disk_bytes >> 10)]
        given = [f"{name}={value}" for name, value in {**VARIABLES, **variables}.items()]
        running = _Command(self, RUN, [folder, *limits, *given, "--", *command], stdin, most)
        timed_out, code = False, None
        try:
            code = await running.code(timeout_s)
        except TimeoutError:
            timed_out, code = True, KILLED
            await self._kill(running)
            # A process that has left the session may hold the output.
            with contextlib.suppress(TimeoutError):
                code = await running.code(KILLED_S)
        except asyncio.CancelledError:
            await asyncio.shield(self._kill(running))
            raise
        if code is None or (code != 0 and not await self.runs()):
            raise self.gone()
        return Finished(exit_code=code, output=running.output.text(), timed_out=timed_out)

    async def put(self, source: Path, target: str) -> None:
        """Copy a file or a folder. Raises UserError, UnavailableError."""
        where = absolute(target)
        packed = io.BytesIO()
        await asyncio.to_thread(pack, source, where.name, packed)
        words = [*BASH, PUT, target, str(where.parent)]
        done = await self.run(words, timeout_s=COPY_S, stdin=packed.getvalue())
        if done.exit_code != 0:
            raise UserError(f"{self.name}: {target}: {done.output.decode(errors='replace')}")

    async def get(self, source: str, most_bytes: int) -> bytes:
        """The content of a file. Raises NotFoundError, UserError, UnavailableError."""
        words = [*BASH, GET, source, str(most_bytes + 1)]
        done = await self.run(words, timeout_s=COPY_S, most=2 * most_bytes + 2)
        if done.exit_code != 0:
            raise NotFoundError(f"{self.name}: {source} is not a regular file")
        if len(done.output) > most_bytes:
            raise UserError(f"{self.name}: {source} is longer than {most_bytes} bytes")
        return done.output

    async def stop_processes(self) -> None:
        """Kill everything in it but process 1. Raises UnavailableError."""
        with contextlib.suppress(TimeoutError):
            if await _Command(self, STOP, [""], b"", 0).code(ANSWER_S) == 0:
                return
        raise self.gone()

    async def close(self) -> None:
        """Remove it; idempotent. Raises UnavailableError."""
        self.closed = True
        if self._created is not None:
            await asyncio.wait({self._created})
        await self.remove()

    def gone(self, why: object = "it has ended") -> UnavailableError:
        """An error that says so."""
        return UnavailableError(f"the box {self.name} cannot be entered: {why}")

    async def _kill(self, running: _Command) -> None:
        """Kill the session of a command."""
        if pid := running.output.pid:
            words = ["/", "unlimited", "unlimited", "--", *BASH, 'kill -9 -- "-$0"', pid]
            with contextlib.suppress(TimeoutError):
                await _Command(self, RUN, words, b"", 0).code(ANSWER_S)


class _Marked(Output):
    """Output after a line with the pid, before one with the mark and the exit code."""

    def __init__(self, most: int, mark: str) -> None:
        super().__init__(most)
        self.pid = ""
        self._last = re.compile(rb"\n%s (\d+)\n" % mark.encode())
        self._longest = len(f"\n{mark} 255\n")
        self._held = b""
        """May be the beginning of that last line."""

    def take(self, data: bytes) -> int | None:
        """More of it; the exit code, where it is there."""
        self._held += data
        if not self.pid:
            first, end, rest = self._held.partition(b"\n")
            if not end:
                return None
            self.pid, self._held = first.decode(errors="replace"), rest
        if (found := self._last.search(self._held)) is not None:
            self.add(self._held[: found.start()])
            self._held = b""
            return int(found[1])
        self.add(self._held[: -self._longest])
        self._held = self._held[-self._longest :]
        return None

    def end(self) -> None:
        """Take what is held as output: no such line follows."""
        self.add(self._held)


class _Command:
    """A command that runs, read by a thread of its own, which lasts as long as anybody can print."""

    def __init__(
        self, box: CommandBox, script: str, words: Sequence[str], stdin: bytes, most: int
    ) -> None:
        mark = uuid.uuid4().hex
        self.output = _Marked(most, mark)
        self._ended: Future[int | None] = Future()
        given = f"{mark} {len(words)} {len(stdin)}\n" + "".join(f"{word}\0" for word in words)
        whole = given.encode(errors="surrogateescape") + stdin
        threading.Thread(target=self._read, args=(box, script, whole), daemon=True).start()

    async def code(self, timeout_s: float) -> int | None:
        """Its exit code; None: its box has ended. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asyncio.wrap_future(self._ended))

    def _read(self, box: CommandBox, script: str, given: bytes) -> None:
        code: int | None = None
        try:
            for part in box.talk(script, given):
                if self._ended.done():
                    continue
                code = part if isinstance(part, int) else self.output.take(part)
                if code is not None and isinstance(part, bytes):
                    self._ended.set_result(code)
        except Exception as error:
            log.debug("a command of %s: %s", box.name, error)
        if not self._ended.done():
            self.output.end()
            self._ended.set_result(code)
