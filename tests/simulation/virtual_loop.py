"""An event loop in virtual time: it never sleeps, and its order is seeded.

    ready callbacks ──▶ run ──▶ nothing is ready: the clock jumps to the next timer

Timers of the same moment come in an order that the seed draws. Sets of tasks and futures iterate by a counter, not by
address, so that one seed is one history in every process.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any, Final, TypeAlias, TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")

START_S: Final = 1000.0
"""The clock at the start; not 0, where a forgotten default would not show."""
CLOSING_ROUNDS: Final = 20
"""How often what is left of a run is closed: its clean-up may start further tasks."""


class _Numbered:
    """Hashed by a counter."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Future(_Numbered, asyncio.Future[Result]):
    """A future whose hash is no address."""


class _Task(_Numbered, asyncio.Task[Result]):
    """A task whose hash is no address."""


class Handle(asyncio.TimerHandle):
    """A callback. Keeps less than asyncio's own, because a run makes ten thousand of them."""

    __slots__ = ()
    _source_traceback = None

    def __init__(
        self, callback: Callable[..., object], args: Any, context: Context, when: float
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._when = when

    def cancel(self) -> None:
        """Run nothing."""
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


_Timer: TypeAlias = tuple[float, float, int, Handle]


class DeadlockError(Exception):
    """Nothing is ready and no timer is set: the run would wait for ever."""


class VirtualLoop(asyncio.BaseEventLoop):
    """One run's event loop. `close` it at the end, also of a run that failed."""

    _handle: Callable[..., Handle] = Handle
    """Makes what is kept of a callback."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.over = False
        """The run has ended: nothing has an effect any more."""
        self._now = START_S
        self._random = random.Random(f"loop {seed}")
        self._number = itertools.count()
        self._ready_now: list[Handle] = []
        self._timers: list[_Timer] = []
        self._order = itertools.count()
        self._late: list[asyncio.Task[Any]] = []
        """Tasks that clean-up has started, of a run that is over."""
        self.set_task_factory(self._make_task)

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
        handle = self._handle(callback, args, context, self._now)
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
        handle = self._handle(callback, args, context, when)
        if not self.over:
            heapq.heappush(self._timers, (when, self._random.random(), next(self._order), handle))
        return handle

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
        return task

    # --- the loop

    def _run_once(self) -> None:
        """One round: everything that is ready; the clock moves when nothing is."""
        if not self._ready_now and not self._advance() and not self._stop_wanted():
            raise DeadlockError("nothing is ready and no timer is set")
        ready, self._ready_now = self._ready_now, []
        for handle in self._in_order(ready):
            if not handle._cancelled:
                self._run(handle)

    def _in_order(self, ready: list[Handle]) -> list[Handle]:
        """The ready callbacks, in the order in which they run."""
        return ready

    def _run(self, handle: Handle) -> None:
        """Run one callback."""
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
    """Run without the garbage collector and without reports about what is thrown away at the end of a run.

    The collector would close abandoned tasks, at moments that depend on memory, not on the seed.
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
