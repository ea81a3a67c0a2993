"""The machines of one trainer: they meet at the first one, and the ranks of all end when one is lost or replaced.

    first rank of a machine ── alive/<machine> + 1, every few seconds ──▶ store ──▶ rank 0: is one silent, or new?
                            ◀── no answer: rank 0 is lost

gloo and NCCL notice a process that ends, and not a machine that is cut off: a collective would wait for minutes for
it, and its replacement with it. After a restart the ranks meet again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from meshrl.common.plain_text import say_error
from meshrl.contract.errors import InfraError

log = logging.getLogger(__name__)

LOOKS = 12
"""How often a machine speaks within the time after which it counts as lost."""
AGAIN_S = 0.5
LEAVE_S = 10.0
"""How long rank 0 waits at the end for the others to read that this is the end."""
_FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of this rank among the machines, as torchrun's variables say."""

    rank: int
    machine: int
    machines: int
    speaks: bool
    """The first rank of its machine."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """A world of one machine where nothing is set."""
        rank, size = (int(environment.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
        local = int(environment.get("LOCAL_WORLD_SIZE", size))
        return cls(rank, rank // local, -(-size // local), rank % local == 0)


class Peers:
    """Heartbeats between the machines of a trainer."""

    def __init__(self, store: Any, seat: Seat, silent_s: float) -> None:
        """Begin to speak and to listen: two threads on the first rank of each machine.

        Args:
            store: torch's, which lives in rank 0.
            seat: This rank's.
            silent_s: A machine that says nothing for so long is lost.
        """
        self._store, self._seat, self._silent_s = store, seat, silent_s
        self._heard: dict[int, float] = {}
        self._over = threading.Event()
        if seat.speaks:
            for work in (self._speak, self._look):
                threading.Thread(target=work, name=f"peers{work.__name__}", daemon=True).start()

    def finish(self) -> None:
        """On rank 0: the work is done. Returns when the others have read it, LEAVE_S later at most."""
        self._store.set(_FINISHED, "1")
        deadline = time.monotonic() + LEAVE_S
        others = range(1, self._seat.machines)
        while time.monotonic() < deadline and not self._store.check([f"left/{n}" for n in others]):
            time.sleep(AGAIN_S / 5)
        self._over.set()

    def until_finished(self) -> None:
        """On the other ranks: wait until rank 0 has done its own work.

        Raises:
            InfraError: it ended before.
        """
        try:
            while not self._store.check([_FINISHED]):
                time.sleep(AGAIN_S)
            self._over.set()
            if self._seat.speaks:
                self._store.set(f"left/{self._seat.machine}", "1")
        except RuntimeError as error:
            raise InfraError(f"rank {self._seat.rank}: rank 0 has ended before its time") from error

    def _speak(self) -> None:
        """Say that this machine is there, and note who else is; without rank 0 this waits, and `_look` sees it."""
        seat = self._seat
        said: dict[int, int] = {}
        others = range(1, seat.machines) if seat.rank == 0 else ()
        try:
            store = self._store.clone()
            while not self._over.is_set():
                store.add(f"alive/{seat.machine}", 1)
                for machine in others:
                    came = store.add(f"came/{machine}", 0)
                    if came > 1:
                        self._end(f"machine {machine} has been started again")
                    count = came + store.add(f"alive/{machine}", 0)
                    if count != said.get(machine, 0):
                        said[machine], self._heard[machine] = count, time.monotonic()
                if seat.rank:
                    self._heard[0] = time.monotonic()
                self._over.wait(self._silent_s / LOOKS)
        except RuntimeError:  # the store has ended with rank 0: the next collective says so
            return

    def _look(self) -> None:
        while not self._over.wait(self._silent_s / LOOKS):
            for machine, when in list(self._heard.items()):
                if time.monotonic() - when > self._silent_s:
                    self._end(f"machine {machine} has said nothing for {self._silent_s:.0f} s")

    def _end(self, why: str) -> None:
        """End the process at once: the computing thread may wait for the lost rank within a library."""
        if not self._over.is_set():
            say_error(f"rank {self._seat.rank}: {why}")
            os._exit(1)


def came(store: Any, seat: Seat) -> bool:
    """Tell rank 0 that this machine's ranks have come; False where others of it have met there before."""
    first: int = store.add(f"rank/{seat.rank}", 1)
    if seat.speaks:
        store.add(f"came/{seat.machine}", 1)
    return first == 1


def until_gone(store: Any, deadline: float) -> None:
    """Wait until the store has ended: the rank that this one replaces met the others there, and rank 0 will end."""
    log.info(
        "rank 0 still counts on the ranks that these replace: waiting until it is started again"
    )
    while time.monotonic() < deadline:
        try:
            store.check([_FINISHED])
        except RuntimeError:
            return
        time.sleep(AGAIN_S)


def until_listening(address: str, port: int, deadline: float) -> None:
    """Wait for rank 0, which may start later. Raises InfraError: it does not come."""
    told = False
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InfraError(
                    f"the trainer's first machine does not listen on {address}:{port}: {error}"
                ) from error
            if not told:
                log.info("waiting for the trainer's first machine, at %s:%d", address, port)
                told = True
            time.sleep(AGAIN_S)
