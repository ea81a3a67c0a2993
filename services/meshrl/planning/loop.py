"""An event loop in virtual time: it never sleeps, its order is seeded, and a killed process runs nothing more.

    ready callbacks ──seeded order of processes──▶ run ──▶ nothing is ready: the clock jumps to the next timer

Each callback belongs to the simulated process whose context made it (`PROCESS`). The callbacks of one process keep
their order, as asyncio promises it; those of different processes, and timers of the same moment, come in an order
that the seed draws. Threads are no threads: what an executor is given runs in the loop, one after the other per
executor.

Sets of tasks and futures iterate by a counter, not by address, so that one seed is one history in every process.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import hashlib
import heapq
import itertools
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from typing import Any, Final, TypeAlias, TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")

START_S: Final = 1000.0
"""The clock at the start; not 0, where a forgotten default would not show."""
MOST_THREAD_S: Final = 1e-3
"""The longest time until a thread begins with what it is given."""
CLOSING_ROUNDS: Final = 20
"""How often what is left of a run is closed: its clean-up may start further tasks."""


class Process:
    """A simulated operating-system process: a name for a group of tasks that end together, without clean-up."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Those that it started; some may be done."""
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


class _Future(asyncio.Future[Result]):
    """Hashed by a counter."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Task(asyncio.Task[Result]):
    """Hashed by a counter."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Handle(asyncio.TimerHandle):
    """A callback with its process. Keeps less than asyncio's own, because a run makes ten thousand of them."""

    __slots__ = ("process",)
    _source_traceback = None

    def __init__(
        self, callback: Callable[..., object], args: Any, context: Context, when: float
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._when = when
        self.process = context.get(PROCESS)

    def cancel(self) -> None:
        """Run nothing."""
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


_Timer: TypeAlias = tuple[float, float, int, _Handle]


class DeadlockError(Exception):
    """Nothing is ready and no timer is set: the run would wait for ever."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """One run's event loop. `close` it at the end, also of a run that failed."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        """With `trace`, `trace_hash` is a hash of every callback with its time and its process."""
        super().__init__()
        self.events = 0
        """Callbacks that ran."""
        self._now = START_S
        self._random = random.Random(f"loop {seed}")
        self._number = itertools.count()
        self._ready_now: list[_Handle] = []
        self._timers: list[_Timer] = []
        self._order = itertools.count()
        self._executors: dict[Any, deque[tuple[Callable[[], None], Context]]] = {}
        """What each executor with a single thread still has to do, the running one first."""
        self._dropped: list[_Handle] = []
        """What dead processes would have run, kept: collecting it would run their clean-up."""
        self.work = (0, 0)
        """The work in an executor that runs: its number, and one that rises with each time that any work runs."""
        self.over = False
        """The run has ended: nothing has an effect any more."""
        self._late: list[asyncio.Task[Any]] = []
        """Tasks that clean-up has started, of a run that is over."""
        self._hash = hashlib.blake2b(digest_size=8) if trace else None
        self.set_task_factory(self._make_task)

    @property
    def trace_hash(self) -> str:
        """Equal for equal histories."""
        return self._hash.hexdigest() if self._hash else ""

    # --- asyncio's own surface

    def time(self) -> float:
        """The virtual clock."""
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        """A future with a hash that does not depend on its address."""
        future: _Future[Any] = _Future(loop=self)  # no __init__ of its own: a run makes many
        future.number = next(self._number)
        return future

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """In this moment, after what is ready."""
        context = contextvars.copy_context() if context is None else context
        handle = _Handle(callback, args, context, self._now)
        if not self.over:
            self._ready_now.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """After `delay` virtual seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """At a virtual moment; the order of equal moments is drawn, as asyncio leaves it open."""
        context = contextvars.copy_context() if context is None else context
        handle = _Handle(callback, args, context, when)
        if not self.over:
            heapq.heappush(self._timers, (when, self._random.random(), next(self._order), handle))
        return handle

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

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:
        assert not isinstance(coroutine, Generator)
        task: _Task[Any] = _Task.__new__(_Task)
        task.number = next(self._number)  # `__init__` hashes it
        asyncio.Task.__init__(task, coroutine, loop=loop, **options)
        if self.over:
            self._late.append(task)
        context: Context | None = options.get("context")
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks[task] = None
            if len(process.tasks) & 63 == 0:
                process.tasks = dict.fromkeys(process.running())
        return task

    # --- the loop

    def _run_once(self) -> None:
        """One round: everything that is ready, process by process; the clock moves when nothing is."""
        if not self._ready_now and not self._advance() and not self._stop_wanted():
            raise DeadlockError("nothing is ready and no timer is set")
        ready, self._ready_now = self._ready_now, []
        for handle in self._in_order(ready) if len(ready) > 1 else ready:
            if handle._cancelled:
                continue
            process = handle.process
            if process is not None and process.dead:
                self._dropped.append(handle)
                continue
            self.events += 1
            if self._hash is not None:
                self._hash.update(self._describe(handle).encode())
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                about = {"message": "a callback failed", "exception": error, "handle": handle}
                self.call_exception_handler(about)

    def _stop_wanted(self) -> bool:
        return bool(getattr(self, "_stopping", False))

    def _advance(self) -> bool:
        """Jump to the next timer, and make everything ready that is due by then; False if there is none."""
        timers = self._timers
        while timers and timers[0][3]._cancelled:
            heapq.heappop(timers)
        if not timers:
            return False
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready_now.append(heapq.heappop(timers)[3])
        return True

    def _in_order(self, ready: list[_Handle]) -> list[_Handle]:
        """Process by process in an order that is drawn; each process's own callbacks as they came."""
        by_process: dict[Process | None, list[_Handle]] = {}
        for handle in ready:
            by_process.setdefault(handle.process, []).append(handle)
        if len(by_process) == 1:
            return ready
        parts = list(by_process.values())
        self._random.shuffle(parts)
        return [handle for part in parts for handle in part]

    def _describe(self, handle: _Handle) -> str:
        callback: Any = handle._callback
        process = handle.process
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.Task):
            what = owner.get_coro().__qualname__  # type: ignore[union-attr]
        else:
            what = getattr(callback, "__qualname__", type(callback).__name__)
        return f"{self._now:.9f} {process.name if process else '-'} {what}\n"

    def close(self) -> None:
        """Forget everything: tasks that still wait are closed, and whatever they do meanwhile has no effect."""
        if self.over:
            return
        self.over = True
        self._ready_now.clear()
        self._timers.clear()
        asyncio.events._set_running_loop(self)
        try:
            pending = list(asyncio.all_tasks(self))
            for _ in range(CLOSING_ROUNDS):
                if not pending:
                    break
                self._late = []
                pending = [task for task in pending if not _closed(task)] + self._late
        finally:
            asyncio.events._set_running_loop(None)
        self._dropped.clear()
        super().close()


def _closed(task: asyncio.Task[Any]) -> bool:
    """Close a coroutine that waits for ever; False if its clean-up waits again."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    with suppress(BaseException):
        coroutine.close()
    return getattr(coroutine, "cr_frame", None) is None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the garbage collector and without reports about what is thrown away at the end of a run.

    The collector would close the tasks of killed processes, at moments that depend on memory, not on the seed.
    """
    enabled, hook = gc.isenabled(), sys.unraisablehook
    gc.disable()
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
        if enabled:
            gc.enable()


def spawn(
    loop: asyncio.AbstractEventLoop,
    process: Process | None,
    coroutine: Coroutine[Any, Any, Result],
    name: str,
) -> asyncio.Task[Result]:
    """A task of `process`: everything that it starts belongs to that process too."""
    return loop.create_task(coroutine, name=name, context=context_of(process))
