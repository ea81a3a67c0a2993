"""Starts services in order, restarts what crashes, ends the run once, drains in order, leaves nothing behind.

    start:  start_order 0 ──ready──▶ 1 ──ready──▶ ...    one `_keep_running` task per service owns its processes
    fleet:  `add` starts one more · `drain` ends one without a restart; the run continues
    over:   the leading service is done | user error | crash loop | a signal           (the first one wins)
    drain:  drain_order 0 ──ended──▶ 1 ──▶ ...           SIGTERM, then SIGKILL after each service's own deadline

consumes: exits of processes, probes, `stop`. waits for: the readiness of all services of one number, then `over`.
unblocked by: a verdict; every wait also ends on `over` or on a second `stop`. produces: a Verdict.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from meshrl.common.files import full_places, lasting_fault
from meshrl.contract.errors import ConflictError, MeshError, UserError
from meshrl.launcher.preloading import Preloading
from meshrl.launcher.processes import LineSink, ServiceProcess, StartProcess, Watchdog
from meshrl.launcher.service import Service
from meshrl.rpc.exit_codes import Exit

log = logging.getLogger(__name__)

QUICK_S = 5.0
"""A service that ends before it was ready, or less than this after, failed quickly."""
QUICK_FAILURES = 3
"""Quick failures in a row, without a step of the run between, that are a crash loop; so are as many lives without
work done."""
PARTS_FAILED = 16
"""Lives in a row of a trainer that may end with rows in hand, by a signal or with a part of a batch that failed: each
leaves half of the rows that it may have died of."""
FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0
PROBE_EVERY_S = 0.1
START_LINE_S = 30.0
"""Seconds between two log lines about a service that is not ready yet."""
PORT_TRIES = 5
CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV})
"""Signals by which a process ends itself."""
LAST_LOOK_S = 15.0

Phase = Literal[
    "waiting",
    "starting",
    "ready",
    "restarting",
    "draining",
    "drained",
    "failed",
    "done",
    "stopped",
]
GONE: frozenset[Phase] = frozenset({"failed", "drained"})
"""Phases of services that do no work any more."""


@dataclass(slots=True)
class ServiceState:
    """The state of one service; the view shows it."""

    phase: Phase = "waiting"
    pid: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a run ended."""

    code: int
    line: str
    """One sentence for a person."""

    @property
    def finished(self) -> bool:
        """True when the run did all it was asked to."""
        return self.code == Exit.DONE

    @property
    def stopped(self) -> bool:
        """Whether a signal to `up` ended the run."""
        return self.code > 128


class Supervisor:
    """Runs `services` until the leading one is done, something ends the run, or `stop` is called."""

    def __init__(
        self,
        services: Sequence[Service],
        sink: LineSink,
        *,
        last_look: Callable[[], Awaitable[None]] | None = None,
        steps: Callable[[], int] = lambda: 0,
        preloading: Preloading | None = None,
        start: StartProcess = ServiceProcess.start,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Nothing runs before `run`.

        Args:
            services: What to start.
            sink: Gets the lines of all.
            last_look: Called when all have ended but those that drain last, the queue: nothing changes any more.
            steps: How many steps the run has made. A service that was ready meanwhile, and that nobody stands in for,
                has done its work.
            preloading: Starts processes.
            start: Starts a process.
            watchdog: Ends the processes where this one is killed; None: a process of its own.
        """
        self.states = {service.name: ServiceState() for service in services}
        self._services = list(services)
        self._sink = sink
        self._last_look = last_look
        self._steps = steps
        self._preloading = preloading
        self._processes: dict[str, ServiceProcess] = {}
        self._restart_tasks: dict[str, asyncio.Task[None]] = {}
        self._drain_requested: dict[str, asyncio.Event] = {}
        self._signalled: set[int] = set()
        """Processes that were asked to drain: a second signal would end them at once."""
        self._ready = {service.name: asyncio.Event() for service in services}
        self._over = asyncio.Event()
        self._kill = asyncio.Event()
        self._verdict: Verdict | None = None
        self._start_process = start
        self._watchdog = watchdog or Watchdog()

    @property
    def stopping(self) -> bool:
        """True once the run is over and drains."""
        return self._over.is_set()

    def stop(self, line: str, code: int) -> None:
        """Drain at the first call, kill at the second."""
        if self._over.is_set():
            self._kill.set()
        self._end(Verdict(code=code, line=line))

    async def run(self) -> Verdict:
        """Start, watch, drain; returns when no process of ours is left."""
        with self._watchdog:
            try:
                await self._start_in_order()
                await self._over.wait()
                if self._verdict is not None and self._verdict.finished:
                    self._sink("up", "all steps are done: the services end, the queue last")
                await self._drain()
            finally:
                self._over.set()
                for process in self._processes.values():
                    if process.running:
                        process.kill_group()
                for restart_task in self._restart_tasks.values():
                    restart_task.cancel()
                await asyncio.gather(*self._restart_tasks.values(), return_exceptions=True)
                await asyncio.gather(*(process.done for process in self._processes.values()))
        assert self._verdict is not None
        return self._verdict

    def add(self, service: Service) -> None:
        """Start one more service now.

        Raises:
            ConflictError: the run is over, or has a service of this name.
        """
        self.check_running()
        if service.name in self.states:
            raise ConflictError(f"this mesh has a {service.name} already")
        self.states[service.name] = ServiceState()
        self._services.append(service)
        self._keep_alive(service)

    async def drain(self, name: str) -> bool:
        """End one service without a restart. True when it drained in time, False when it had to be killed.

        Draining twice is draining once.

        Raises:
            UserError: no such service, or the run cannot do without it. ConflictError: the run is over.
        """
        service = next((each for each in self._services if each.name == name), None)
        if service is None:
            raise UserError(f"this mesh has no service {name} (it has: {', '.join(self.states)})")
        if not service.removable:
            raise UserError(f"{name} cannot be drained: the run cannot continue without it")
        self.check_running()
        if name not in self._restart_tasks:
            raise ConflictError(f"{name} has not been started yet: try again in a moment")
        self._drain_requested[name].set()
        self._ready[name].set()  # those that start after it must not wait for it
        await asyncio.shield(self._restart_tasks[name])
        process = self._processes.get(name)
        return process is None or process.done.result() != -signal.SIGKILL

    def check_running(self) -> None:
        """Raises ConflictError once the run is over."""
        if self._over.is_set():
            raise ConflictError("the run is over and drains")

    def _keep_alive(self, service: Service) -> None:
        self._ready.setdefault(service.name, asyncio.Event())
        self._drain_requested[service.name] = asyncio.Event()
        restart_task = asyncio.create_task(self._keep_running(service), name=f"keep-{service.name}")
        restart_task.add_done_callback(self._restart_task_ended)
        self._restart_tasks[service.name] = restart_task

    def _end(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
        self._over.set()

    async def _start_in_order(self) -> None:
        ordered = sorted(self._services, key=lambda service: service.start_order)
        for _, together in groupby(ordered, key=lambda service: service.start_order):
            names = []
            for service in together:
                names.append(service.name)
                self._keep_alive(service)
            all_ready = asyncio.gather(*(self._ready[name].wait() for name in names))
            await first_of(all_ready, self._over.wait())
            if self._over.is_set():
                return

    def _restart_task_ended(self, restart_task: asyncio.Task[None]) -> None:
        if not restart_task.cancelled() and (error := restart_task.exception()):
            self._end(Verdict(code=Exit.FAILED, line=f"{restart_task.get_name()}: {error}"))

    async def _keep_running(self, service: Service) -> None:
        """Start one service again whenever it ends, until the run is over, its work is done, or it is drained."""
        state, drain_requested = self.states[service.name], self._drain_requested[service.name]
        failures, ports_tried, parts_failed = 0, 0, 0
        while not self._over.is_set() and not drain_requested.is_set():
            state.phase = "starting"
            if self._preloading is not None:
                preloaded = self._preloading.until_ready(service.preload)
                await first_of(preloaded, self._over.wait(), drain_requested.wait())
                if self._over.is_set() or drain_requested.is_set():
                    break
            try:
                process = await self._start(service)
            except OSError as error:
                if fault := lasting_fault(error):
                    line = f"{service.name} cannot be started: {fault}"
                    self._fail(service, Verdict(code=Exit.FAILED, line=line))
                    return
                # No process, descriptor or memory is available at this moment.
                failures += 1
                if not await self._backed_off(
                    service, failures, "could not be started", str(error)
                ):
                    return
                continue
            ready = await self._until_ready(process)
            steps = self._steps()
            await first_of(asyncio.shield(process.done), drain_requested.wait())
            if drain_requested.is_set() and process.running:
                await self._drain_one(process)
            code = await asyncio.shield(process.done)
            self._watchdog.remove(process.pid)
            self._signalled.discard(process.pid)
            if self._over.is_set():
                state.phase = "stopped"
                return
            if drain_requested.is_set():
                break
            if code == Exit.DONE and service.finite:
                state.phase = "done"
                self._ready[service.name].set()
                if service.leads:
                    self._end(Verdict(code=Exit.DONE, line="finished"))
                return
            if code == Exit.USER_ERROR:
                line = f"{service.name}: {process.last_error.removeprefix('error: ')}"
                self._fail(service, Verdict(code=Exit.USER_ERROR, line=line))
                return
            if code == Exit.PORT_IN_USE and service.on_port_taken and ports_tried < PORT_TRIES:
                ports_tried += 1
                service.on_port_taken()
                continue
            if code in (Exit.REFUSED, Exit.PORT_IN_USE):
                line = f"{service.name}: {process.last_error.removeprefix('error: ')}"
                self._fail(service, Verdict(code=Exit.FAILED, line=line))
                return
            if code == -signal.SIGBUS and (full := next(full_places(), "")):
                line = f"{service.name} {_exit_text(code)}: {full}: {os.strerror(errno.ENOSPC)}"
                self._fail(service, Verdict(code=Exit.FAILED, line=line))
                return
            if not ready and service.crash_at_start and -code in CRASHES:
                line = f"{service.name} {_exit_text(code)} before it was ready: {service.crash_at_start}"
                self._fail(service, Verdict(code=Exit.USER_ERROR, line=line))
                return
            if service.cannot_restart:
                line = f"{service.name} {_exit_text(code)} and cannot be restarted: {service.cannot_restart}"
                self._end(Verdict(code=Exit.FAILED, line=line))
                return
            alive_s = asyncio.get_running_loop().time() - (process.ready_at or process.started)
            useless = not ready or alive_s < QUICK_S or code == Exit.NO_PROGRESS
            worked = ready and not self._fleet_of(service)[1:] and self._steps() > steps
            # What kills it may be in its rows: the queue gives the next one a part of them.
            killed = ready and service.leads and (code < 0 or code > 128)
            parts_failed = parts_failed + 1 if killed or code == Exit.PART_FAILED else 0
            if 0 < parts_failed <= PARTS_FAILED:
                failures = max(failures, 1)
            else:
                failures = failures + 1 if useless and not worked else 1
            if not await self._backed_off(
                service, failures, _exit_text(code), f"it last said: {process.last_error}"
            ):
                return
        state.phase = "drained" if drain_requested.is_set() else "stopped"

    async def _backed_off(self, service: Service, failures: int, how: str, reason: str) -> bool:
        """Wait before the next start; False when there will be none, after too many quick failures."""
        if failures >= QUICK_FAILURES:
            line = f"{service.name} failed {failures} times in a row; {reason}"
            self._fail(service, Verdict(code=Exit.FAILED, line=line))
            return False
        state = self.states[service.name]
        state.phase = "restarting"
        state.restarts += 1
        backoff = min(FIRST_BACKOFF_S * 2**failures, LONGEST_BACKOFF_S)
        self._sink("up", f"{service.name} {how}; starting it again in {backoff:.1f} s")
        drain_requested = self._drain_requested[service.name].wait()
        await first_of(self._over.wait(), drain_requested, timeout_s=backoff)
        return True

    def _fail(self, service: Service, verdict: Verdict) -> None:
        """Handle a service that will not be started again: ends the run, unless others of its fleet do its work."""
        self.states[service.name].phase = "failed"
        self._ready[service.name].set()  # those that start after it must not wait for it
        fleet = self._fleet_of(service)
        left = [name for name in fleet if self.states[name].phase not in GONE]
        if left and (service.expendable or verdict.code != Exit.USER_ERROR):
            self._sink("up", f"the run continues without it: {verdict.line}")
            return
        if len(fleet) > 1 and not left:
            line = f"no {service.fleet} worker is left of {len(fleet)}: {verdict.line}"
            verdict = Verdict(code=verdict.code, line=line)
        self._end(verdict)

    def _fleet_of(self, service: Service) -> list[str]:
        """Names of all services that stand in for each other with this one; may be empty."""
        return [s.name for s in self._services if service.fleet and s.fleet == service.fleet]

    async def _start(self, service: Service) -> ServiceProcess:
        process = await self._start_process(service, self._sink, self._preloading)
        self._watchdog.add(process.pid)
        self._processes[service.name] = process
        self.states[service.name].pid = process.pid
        return process

    async def _until_ready(self, process: ServiceProcess) -> bool:
        """True when the probe says so; False when the process ended, or took too long and was killed."""
        service = process.service
        clock = asyncio.get_running_loop().time
        drain_requested = self._drain_requested[service.name]
        reported = process.started
        while process.running and not self._over.is_set() and not drain_requested.is_set():
            if await service.probe():
                process.ready_at = clock()
                self.states[service.name].phase = "ready"
                self._ready[service.name].set()
                return True
            if clock() - process.started > service.ready_s:
                self._sink(
                    "up", f"{service.name} was not ready after {service.ready_s:.0f} s; killing it"
                )
                process.kill_group()
                return False
            if clock() - reported > START_LINE_S:
                reported = clock()
                self._sink(
                    "up",
                    f"{service.name} has been starting for {reported - process.started:.0f} of at"
                    f" most {service.ready_s:.0f} s; it last said: {process.last_line}",
                )
            await first_of(asyncio.shield(process.done), timeout_s=PROBE_EVERY_S)
        return False

    async def _look(self) -> None:
        if self._last_look is None or self._kill.is_set():
            return
        try:
            await first_of(self._last_look(), self._kill.wait(), timeout_s=LAST_LOOK_S)
        except MeshError as error:
            log.debug("the ledger could not be read at the end: %s", error)

    async def _drain(self) -> None:
        ordered = sorted(self._services, key=lambda service: service.drain_order)
        for order, together in groupby(ordered, key=lambda service: service.drain_order):
            if order == ordered[-1].drain_order:
                await self._look()
            processes = [self._processes[s.name] for s in together if s.name in self._processes]
            await asyncio.gather(*(self._drain_one(c) for c in processes if c.running))

    async def _drain_one(self, process: ServiceProcess) -> None:
        """SIGTERM, a deadline, SIGKILL; a second `stop` skips to the end."""
        name = process.service.name
        self.states[name].phase = "draining"
        if process.pid not in self._signalled:
            self._signalled.add(process.pid)
            process.drain()
        ended = asyncio.shield(process.done)
        await first_of(ended, self._kill.wait(), timeout_s=process.service.drain_s)
        if process.running:
            if not self._kill.is_set():
                self._sink(
                    "up", f"{name} did not drain in {process.service.drain_s:.0f} s; killing it"
                )
            process.kill_group()
        await asyncio.shield(process.done)
        self.states[name].phase = "stopped"


async def first_of(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Return when one of `waits` is done or `timeout_s` has passed; the others are cancelled.

    Pass `asyncio.shield(task)` for a task that must not be cancelled. Raises what a finished wait raised.
    """
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(
            futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for future in done:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


def _exit_text(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "ended although it had work to do"
