"""Simulated resources of a host that its processes lose when they die: shared memory, and threads."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Final, TypeVar

from typing_extensions import override

from meshrl.contract.errors import CorruptError, UnavailableError
from meshrl.weights.shared_memory import Mapped, SharedMemory
from meshrl.weights.waiting import WorkerThread
from tests.simulation.loop import PROCESS, Blocked, Process

Result = TypeVar("Result")
Takes = Callable[[], "asyncio.Future[None]"]
"""The time that something takes, as a future that begins now."""
MOST_OPEN: Final = 5
"""A trainer's probe, the versions that it keeps (`weights.keep`), the next one, and an older one for a joiner."""


@dataclass(slots=True, eq=False)
class _File:
    content: bytearray
    owner: Process
    """The process that made it."""
    locked: bool = True


class Memory:
    """The shared memory of one host, for all of its processes."""

    def __init__(self, clock: Callable[[], float], problem: Callable[[str], None]) -> None:
        self.problem = problem
        self.full_until = 0.0
        """No space for a version until then, by the virtual clock."""
        self._clock = clock
        self.files: dict[str, _File] = {}
        self._open: dict[int, _File] = {}
        self._descriptors = itertools.count(3)

    def of(self, process: Process) -> SimulatedMemory:
        """As `process` sees it; what it has open is closed when it dies."""
        return SimulatedMemory(self, process)

    def create(self, name: str, nbytes: int, owner: Process) -> int:
        """A file, locked. Raises OSError."""
        if nbytes > 1 and self.full_until > self._clock():
            raise OSError(errno.ENOSPC, "No space left on device")
        descriptor = next(self._descriptors)
        self.files[name] = self._open[descriptor] = _File(bytearray(nbytes), owner)
        owner.on_death[lambda: self.close(descriptor, dead=True)] = None
        if sum(file.owner is owner for file in self._open.values()) > MOST_OPEN:
            self.problem(f"more than {MOST_OPEN} files of shared memory are open in {owner.name}")
        return descriptor

    def opened(self, descriptor: int) -> _File:
        """Raises OSError for a descriptor that was closed: in a real process it may be another file's by now."""
        file = self._open.get(descriptor)
        if file is None:
            self.problem("a closed descriptor of shared memory was used")
            raise OSError(errno.EBADF, "Bad file descriptor")
        return file

    def close(self, descriptor: int, *, dead: bool = False) -> None:
        """Give the lock back; a process that dies may have closed it before."""
        if dead and descriptor not in self._open:
            return
        self.opened(descriptor).locked = False
        del self._open[descriptor]

    def sweep(self, pattern: str) -> list[str]:
        """Delete what nobody has locked."""
        found = [name for name, file in self.files.items() if not file.locked]
        deleted = [name for name in found if fnmatch(name, pattern)]
        for name in deleted:
            del self.files[name]
        return deleted


class SimulatedMemory(SharedMemory):
    """One process's view of a host's memory."""

    def __init__(self, memory: Memory, process: Process) -> None:
        super().__init__()
        self._memory = memory
        self._process = process

    @override
    def create(self, name: str, nbytes: int) -> int:
        return self._memory.create(name, nbytes, self._process)

    @override
    def write(self, descriptor: int, at: int, content: memoryview) -> None:
        self._memory.opened(descriptor).content[at : at + len(content)] = content

    @override
    def close(self, descriptor: int) -> None:
        self._memory.close(descriptor)

    @override
    def delete(self, name: str) -> None:
        self._memory.files.pop(name, None)

    @override
    def map(self, name: str, nbytes: int) -> Mapped:
        """Map a file; later writes of its owner show, as they may in pages that nobody has touched."""
        file = self._memory.files.get(name)
        if file is None or len(file.content) != nbytes:
            raise CorruptError(f"{name}: no such file of {nbytes} bytes")
        return memoryview(file.content)

    @override
    def owns(self, name: str) -> bool:
        return name in self._memory.files

    @override
    def sweep(self, pattern: str) -> list[str]:
        return self._memory.sweep(pattern)


class SimulatedThread(WorkerThread):
    """Runs its calls in the loop, one after the other; each takes a while, and has its effect at the end of it."""

    _max_workers = 1  # by which the loop knows that calls come one after the other

    def __init__(self, name: str, takes: Takes) -> None:
        super().__init__(name)
        self._takes = takes

    @override
    async def run(self, call: Callable[..., Result], *args: Any) -> Result:
        if self._closed:
            raise UnavailableError(f"{self._name} is closed")
        began: list[asyncio.Future[None]] = []

        def work() -> Result:
            if not began:
                began.append(self._takes())
            if not began[0].done():
                raise Blocked(began[0])
            return call(*args)

        return await asyncio.get_running_loop().run_in_executor(self, work)  # type: ignore[arg-type]

    @override
    def close(self, last: Callable[[], object] | None = None) -> None:
        if not self._closed:
            self._closed = True
            if last is not None:
                asyncio.get_running_loop().run_in_executor(self, last)  # type: ignore[arg-type]


def this_process() -> Process:
    """The simulated process that runs."""
    process = PROCESS.get()
    assert process is not None
    return process
