"""Faults of a mesh: a process is killed or stopped for a while, the network is cut, the disk is full."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from .plan import Plan
from .processes import until

FULL_BY_S: Final = 30.0


class Victim(Protocol):
    """A process that can be struck."""

    name: str

    @property
    def alive(self) -> bool:
        """Does it run (or stand still)?"""
        ...

    def start(self) -> None:
        """A new process in its place."""
        ...

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send it, if it lives."""
        ...


class Fault(Protocol):
    """Strikes once and is healed once."""

    name: str

    def strike(self) -> float:
        """Do it; seconds until it is to be healed."""
        ...

    def heal(self) -> None:
        """Undo it."""
        ...


class Kill:
    """kill -9, of one or of everybody at once; healed by new processes."""

    def __init__(self, victims: Sequence[Victim], dice: random.Random) -> None:
        self.name = f"kill {victims[0].name}" if len(victims) == 1 else "kill everybody"
        self._victims = victims
        self._away_s = dice.choice([0.0, dice.uniform(0.0, 0.5)])

    def strike(self) -> float:
        for victim in self._victims:
            victim.kill()
        return self._away_s

    def heal(self) -> None:
        for victim in self._victims:
            if not victim.alive:
                victim.start()


class Pause:
    """SIGSTOP for longer than its leases last, then SIGCONT: a machine that swaps, a debugger."""

    def __init__(self, victim: Victim, dice: random.Random, lease_ttl_s: float) -> None:
        self.name = f"pause {victim.name}"
        self._victim = victim
        self._away_s = lease_ttl_s * dice.uniform(1.2, 2.0)

    def strike(self) -> float:
        self._victim.signal(signal.SIGSTOP)
        return self._away_s

    def heal(self) -> None:
        self._victim.signal(signal.SIGCONT)


class Network:
    """Two network namespaces and a router between them, which can drop every packet silently.

    A link that goes down is noticed by the kernel of one end; a router that swallows is noticed by nobody.
    """

    HERE, THERE = "10.77.1.2", "10.77.2.2"

    def __init__(self, name: str) -> None:
        self._here, self._there, self._router = (f"{name}-{end}" for end in ("a", "b", "r"))
        self.here, self.there = Path(f"/run/netns/{self._here}"), Path(f"/run/netns/{self._there}")

    def open(self) -> None:
        """Raises PermissionError where namespaces are not allowed."""
        try:
            for namespace in (self._here, self._there, self._router):
                _ip("netns", "add", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            for number, namespace in enumerate((self._here, self._there), start=1):
                self._connect(namespace, number)
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            _ip("netns", "exec", self._router, "sh", "-c", forward)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise PermissionError(f"no network namespaces here: {_why(error)}") from error

    def _connect(self, namespace: str, number: int) -> None:
        far = f"to-{number}"
        peer = ("peer", "name", far, "netns", self._router)
        _ip("-n", namespace, "link", "add", "eth0", "type", "veth", *peer)
        _ip("-n", namespace, "addr", "add", f"10.77.{number}.2/24", "dev", "eth0")
        _ip("-n", self._router, "addr", "add", f"10.77.{number}.1/24", "dev", far)
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", self._router, "link", "set", far, "up")
        _ip("-n", namespace, "route", "add", "default", "via", f"10.77.{number}.1")

    def cut(self) -> None:
        """The router swallows, both ways."""
        for address in (self.HERE, self.THERE):
            _ip("-n", self._router, "route", "add", "blackhole", address)

    def heal(self) -> None:
        """The router forwards again."""
        for address in (self.HERE, self.THERE):
            _ip("-n", self._router, "route", "del", "blackhole", address)

    def close(self) -> None:
        """Idempotent."""
        for namespace in (self._here, self._there, self._router):
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", namespace)


class Cut:
    """The network between the queue and everybody else is gone for a while."""

    name = "cut"

    def __init__(self, network: Network, seconds: float) -> None:
        self._network = network
        self._seconds = seconds

    def strike(self) -> float:
        self._network.cut()
        return self._seconds

    def heal(self) -> None:
        self._network.heal()


class SmallDisk:
    """A file system of 48 MiB under the queue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        """Raises PermissionError where nothing may be mounted."""
        self.folder.mkdir()
        try:
            _run("mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(self.folder))
        except (OSError, subprocess.CalledProcessError) as error:
            raise PermissionError(f"no file system can be mounted here: {_why(error)}") from error

    def fill(self) -> None:
        """To the last byte."""
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent."""
        if self.folder.is_mount():
            _run("umount", "-l", str(self.folder))

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"


class Fill:
    """The queue's disk is full until a caller has got the error, and a little longer."""

    name = "fill"

    def __init__(self, disk: SmallDisk, plan: Plan) -> None:
        self._disk = disk
        self._plan = plan

    def strike(self) -> float:
        before = refusals(self._plan)
        self._disk.fill()
        until(lambda: refusals(self._plan) > before, FULL_BY_S)
        return 1.0

    def heal(self) -> None:
        self._disk.free()


def refusals(plan: Plan) -> int:
    """How many calls were refused because the disk was full."""
    logs: Sequence[Path] = list(plan.events.glob("*.jsonl"))
    return sum(log.read_bytes().count(b'"error":"capacity"') for log in logs)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _why(error: OSError | subprocess.CalledProcessError) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return str(said).strip() or str(error)
