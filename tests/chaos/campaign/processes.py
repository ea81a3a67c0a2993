"""Actors as processes: forked from one that has imported everything, so that a restart takes milliseconds.

The parent stays without threads and without gRPC channels, since neither survives a fork. A child asks the kernel to
be killed when its parent dies, and ends with an exit code as any program would.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from meshrl.common.process_guard import die_with_parent
from meshrl.rpc.queue_connection import connect_queue
from meshrl.rpc.runtime import run_service

from .actors import actor
from .events import EventLog
from .plan import PROXY, QUEUE, Plan
from .proxy import Proxy
from .recorded import RecordedQueue
from .service import look, serve

CLONE_NEWNET = 0x40000000
PATIENCE_S = 120.0


class Actor:
    """One process of a campaign, which may die and be born again."""

    def __init__(self, name: str, plan: Plan, namespace: Path | None = None) -> None:
        self.name = name
        self.plan = plan
        self._namespace = namespace
        self._pid = 0
        self.births = 0
        self.code: int | None = None
        """The exit code of an unexpected end; None while the process runs or was killed by the campaign."""

    @property
    def errors(self) -> Path:
        """The file of its stderr."""
        return self.plan.folder / f"{self.name}.err"

    def start(self) -> None:
        """Fork."""
        self.births += 1
        self.code = None
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid:
            return
        code = 1
        try:
            self._settle_in(parent)
            code = run_service(lambda: _run(self.name, self.plan, self.births))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _settle_in(self, parent: int) -> None:
        die_with_parent(parent)
        log = os.open(self.errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(level=logging.INFO)
        if self._namespace is not None:
            file = os.open(self._namespace, os.O_RDONLY)
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self._namespace}")

    @property
    def alive(self) -> bool:
        """Reaps it, if it has ended by itself."""
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._pid = 0
                self.code = os.waitstatus_to_exitcode(status)
        return self._pid != 0

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.alive:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def signal(self, number: signal.Signals) -> None:
        """Send it, if it lives."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def stop(self) -> None:
        """SIGTERM: drain and end."""
        self.signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time."""
        return until(lambda: not self.alive, timeout_s)


def until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again: the campaign stands outside, and what it looks at are other processes."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def _run(name: str, plan: Plan, birth: int) -> None:
    if name == QUEUE:
        await serve(plan)
    elif name == PROXY:
        await Proxy(plan, random.Random(f"{plan.seed} {name}")).serve()
    elif name == "look":
        await look(plan)
    else:
        moods = random.Random(f"{plan.seed} {name} {birth}")
        async with connect_queue(plan.address, retry_s=PATIENCE_S) as queue:
            await actor(name, plan, moods)(RecordedQueue(queue, EventLog(plan.events, name)))  # type: ignore[arg-type]
            await asyncio.sleep(0)
