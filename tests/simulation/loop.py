"""The event loop in virtual time, with processes and threads: a killed process runs nothing more.

    ready callbacks ──seeded order of processes──▶ run ──▶ nothing is ready: the clock jumps to the next timer

Each callback belongs to the simulated process whose context made it (`PROCESS`). The callbacks of one process keep
their order, as asyncio promises it; those of different processes come in an order that the seed draws. Threads are no
threads: what an executor is given runs in the loop, one after the other per executor.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

from typing_extensions import override

from tests.simulation.virtual_loop import Handle, VirtualLoop

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")

MOST_THREAD_S: Final = 1e-3
"""The longest time until a thread begins with what it is given."""


class Process:
    """A simulated operating-system process: a name for a group of tasks that end together, without clean-up."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Tasks that it started; some may be done."""
        self.on_death: dict[Callable[[], object], None] = {}
        """Called once when it is killed, outside of the process."""

    def kill(self) -> None:
        """From now on nothing of it runs: no `finally`, no `except`."""
        if not self.dead:
            self.dead = True
            for call in list(self.on_death):
                call()

    def running(self) -> list[asyncio.Task[Any]]:
        """Its tasks that are not done."""
        return [task for task in self.tasks if not task.done()]

    def context(self) -> Context:
        """A context whose callbacks belong to this process."""
        return context_of(self)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""The simulated process that runs; None: the world outside."""


def context_of(process: Process | None) -> Context:
    """A context whose callbacks belong to `process`."""
    context = contextvars.copy_context()
    context.run(PROCESS.set, process)
    return context


class Blocked(BaseException):
    """Raised by work in an executor that must wait for `future`: the executor runs it again from its start."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        super().__init__()
        self.future = future


class _Handle(Handle):
    """A callback with its process."""

    __slots__ = ("process",)

    def __init__(
        self, callback: Callable[..., object], args: Any, context: Context, when: float
    ) -> None:
        super().__init__(callback, args, context, when)
        self.process = context.get(PROCESS)


class SimulatedLoop(VirtualLoop):
    """One run's event loop. `close` it at the end, also of a run that failed."""

    _handle = _Handle

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        """Create a loop; with `trace`, `trace_hash` is a hash of every callback with its time and its process."""
        super().__init__(seed)
        self.events = 0
        """Callbacks that ran."""
        self._executors: dict[Any, deque[tuple[Callable[[], None], Context]]] = {}
        """Pending work of each executor with a single thread, the running one first."""
        self._dropped: list[Handle] = []
        """Callbacks of dead processes, kept: collecting them would run their clean-up."""
        self.work = (0, 0)
        """The work in an executor that runs: its number, and one that rises with each time that any work runs."""
        self._hash = hashlib.blake2b(digest_size=8) if trace else None

    @property
    def trace_hash(self) -> str:
        """Equal for equal histories."""
        return self._hash.hexdigest() if self._hash else ""

    def run_in_executor(
        self,
        executor: Any,
        func: Callable[[Unpack[Ts]], Result],
        *args: *Ts,
    ) -> asyncio.Future[Result]:
        """Run `func` in the loop, after what the executor was given before if it has a single thread."""
        done: asyncio.Future[Result] = self.create_future()
        single = getattr(executor, "_max_workers", 0) == 1
        line = self._executors.setdefault(executor, deque()) if single else deque()

        number = next(self._number)

        def work() -> None:
            self.work = (number, self.work[1] + 1)
            try:
                result = func(*args)
            except Blocked as blocked:
                blocked.future.add_done_callback(lambda _: work())
                return
            except BaseException as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)
            line.popleft()
            if line:
                following, context = line[0]
                self.call_soon(following, context=context)

        line.append((work, contextvars.copy_context()))
        if len(line) == 1:
            self.call_later(self._random.random() * MOST_THREAD_S, work)
        return done

    @override
    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:
        task = super()._make_task(loop, coroutine, **options)
        context: Context | None = options.get("context")
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks[task] = None
            if len(process.tasks) & 63 == 0:
                process.tasks = dict.fromkeys(process.running())
        return task

    @override
    def _in_order(self, ready: list[Handle]) -> list[Handle]:
        """Process by process in an order that is drawn; each process's own callbacks as they came."""
        by_process: dict[Process | None, list[Handle]] = {}
        for handle in ready:
            by_process.setdefault(_process(handle), []).append(handle)
        if len(by_process) == 1:
            return ready
        parts = list(by_process.values())
        self._random.shuffle(parts)
        return [handle for part in parts for handle in part]

    @override
    def _run(self, handle: Handle) -> None:
        process = _process(handle)
        if process is not None and process.dead:
            self._dropped.append(handle)
            return
        self.events += 1
        if self._hash is not None:
            self._hash.update(self._describe(handle).encode())
        super()._run(handle)

    def _describe(self, handle: Handle) -> str:
        callback: Any = handle._callback
        process = _process(handle)
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.Task):
            what = owner.get_coro().__qualname__  # type: ignore[union-attr]
        else:
            what = getattr(callback, "__qualname__", type(callback).__name__)
        return f"{self._now:.9f} {process.name if process else '-'} {what}\n"

    @override
    def close(self) -> None:
        super().close()
        self._dropped.clear()


def _process(handle: Handle) -> Process | None:
    assert isinstance(handle, _Handle)
    return handle.process


def spawn(
    loop: asyncio.AbstractEventLoop,
    process: Process | None,
    coroutine: Coroutine[Any, Any, Result],
    name: str,
) -> asyncio.Task[Result]:
    """A task of `process`: everything that it starts belongs to that process too."""
    return loop.create_task(coroutine, name=name, context=context_of(process))
