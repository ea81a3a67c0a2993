"""Turns on a device that trainer and engines share: two file locks, which the kernel frees with a process.

    trainer   acquire: locks WANTED, then HELD, alone  ▸ trains ▸  release: unlocks both
    engine    share:   waits for WANTED to be free, locks HELD with other engines  ▸ samples until `wanted` ▸  release

A process that is killed holds nothing any more, and neither do the servers that it had started: they inherit the open
files (`inherited`), so that HELD stays locked until the last of them, and its memory, is gone. A waiter looks every
POLL_S: a lock has no event that could be cancelled.

`DeviceShare` is what a service gets of a machine with GPUs: devices, memory and ports, as environment variables.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from meshrl.contract.errors import ConfigError, WaitTimeoutError

log = logging.getLogger(__name__)

POLL_S = 0.05
REPORT_S = 60.0
"""How often a long wait is logged."""
DEVICES = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
MEMORY = "MESHRL_GPU_MEMORY_SHARE"
PORTS = "MESHRL_PORTS"
IN_TURNS = "MESHRL_GPU_IN_TURNS"

LOGIT_BYTES = 10
"""In half precision, with two float32 buffers: what the trainer takes uncompiled; compiled it takes 4."""
ROWS_PER_LAID = 5
"""Tokens of a micro-batch's rows, per token that it may lay: attention copies a shared prompt's keys for each row."""
STATEFUL_ROWS_PER_LAID = 2
"""The same of a model with layers that keep a state, which compute whole rows."""
_LOGITS_SHARE = 20
_FEWEST_LOGITS, _MOST_LOGITS = 1 << 25, 1 << 28


class DeviceLease:
    """One process's part in the turns on the device of `path`, a file on a local file system."""

    def __init__(self, path: Path) -> None:
        """Open the files, made where they are missing; lock nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._held = _opened(path)
        self._wanted = _opened(path.with_suffix(".wanted"))
        _OPEN.add(self)

    async def acquire(self, wait_s: float) -> None:
        """Have the device alone, once its engines have released it or are dead.

        Raises:
            WaitTimeoutError: a living process has held it for `wait_s` more seconds.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._until_locked(self._wanted)
                await self._until_locked(self._held)
            os.ftruncate(self._held, 0)
        except TimeoutError:
            holders = self.holders()
            self.release()
            raise WaitTimeoutError(
                f"{holders} did not give up the device of {self._path} within {wait_s:g} s"
            ) from None

    async def share(self) -> None:
        """Share the device with others, once no process has it alone or wants to.

        Waits for as long as such a process lives.
        """
        waited = 0.0
        while not self._shared_now():
            await asyncio.sleep(POLL_S)
            waited += POLL_S
            if waited >= REPORT_S:
                log.info("waits for the device of %s, which %s has", self._path, self.holders())
                waited = 0.0

    async def wanted(self) -> None:
        """Return once a trainer wants the device alone."""
        while self._is_free(self._wanted):  # noqa: ASYNC110 (a file lock has no event)
            await asyncio.sleep(POLL_S)

    async def idle(self, patience_s: float) -> None:
        """Return, without the device, once no process has it alone or wants it, and no version will follow.

        A process that had it alone and announced a version has `patience_s` seconds.
        """
        calm = 0.0
        while calm < (patience_s if os.fstat(self._held).st_size else POLL_S):
            await asyncio.sleep(POLL_S)
            calm = calm + POLL_S if self._is_free(self._wanted) else 0.0

    def release(self, *, version_follows: bool = False) -> None:
        """Give the device up; idempotent. `version_follows`: those who share it get a new version at once."""
        if version_follows:
            os.ftruncate(self._held, 1)
        for file in (self._held, self._wanted):
            fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files, and with them release the device, unless a child has inherited them; idempotent."""
        if self in _OPEN:
            _OPEN.discard(self)
            os.close(self._held)
            os.close(self._wanted)

    def holders(self) -> str:
        """The processes that have locked a file of the device, for messages."""
        inodes = {os.fstat(file).st_ino for file in (self._held, self._wanted)}
        found = {
            pid
            for kind, pid, inode in _locks()
            if kind == "FLOCK" and inode in inodes and pid != os.getpid()
        }
        return ", ".join(f"pid {pid}" for pid in sorted(found)) or "nobody seen from here"

    def _shared_now(self) -> bool:
        if not self._is_free(self._wanted):
            return False
        return _try(self._held, fcntl.LOCK_SH)

    async def _until_locked(self, file: int) -> None:
        while not _try(file, fcntl.LOCK_EX):  # noqa: ASYNC110 (a file lock has no event)
            await asyncio.sleep(POLL_S)

    @staticmethod
    def _is_free(file: int) -> bool:
        if not _try(file, fcntl.LOCK_SH):
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        return True


_OPEN: WeakSet[DeviceLease] = WeakSet()


def inherited() -> Sequence[int]:
    """Descriptors for `pass_fds` of a child that takes memory of the device: with it lives the lease."""
    return [lease._held for lease in _OPEN]


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _try(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locks() -> list[tuple[str, int, int]]:
    """Kind, pid and inode of each lock of this machine; none where the kernel does not tell."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    cells = (line.replace("-> ", "").split() for line in lines)
    return [(cell[1], int(cell[4]), int(cell[5].rpartition(":")[2])) for cell in cells]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """One service's part."""

    devices: tuple[str, ...]
    """Names for CUDA_VISIBLE_DEVICES; empty: it computes on the CPU."""
    memory: float = 1.0
    """Share of each device's memory that it may take."""
    ports: range = range(0)
    """Ports for the processes that it starts; empty: any."""
    bus_order: bool = True
    """The devices are numbered by their place on the bus; False: as CUDA numbers them for the user."""
    in_turns: bool = False
    """Others take this memory too, while this service sleeps."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables from which `of` reads this lease in the service."""
        found = {DEVICES: ",".join(self.devices), MEMORY: f"{self.memory:g}"}
        if self.bus_order:
            found[ORDER] = "PCI_BUS_ID"
        if self.in_turns:
            found[IN_TURNS] = "1"
        if self.ports:
            found[PORTS] = f"{self.ports.start}-{self.ports.stop - 1}"
        return found

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> DeviceShare | None:
        """The share in an environment; None if there is none."""
        if MEMORY not in environment:
            return None
        first, _, last = environment.get(PORTS, "").partition("-")
        return cls(
            devices=tuple(filter(None, environment.get(DEVICES, "").split(","))),
            memory=float(environment[MEMORY]),
            ports=range(int(first), int(last) + 1) if last else range(0),
            bus_order=environment.get(ORDER) == "PCI_BUS_ID",
            in_turns=environment.get(IN_TURNS) == "1",
        )


def chosen_device(
    key: str, asked: str, torch: Any, environment: Mapping[str, str] = os.environ
) -> str:
    """`cpu` or `cuda`: where a service computes.

    Args:
        key: The recipe's key with the value `asked`: auto, cpu or cuda.
        asked: Its value.
        torch: The module.
        environment: Of the process.

    Raises:
        ConfigError: CUDA was asked for, or GPUs were given to this service, and torch sees none.
    """
    if asked != "cpu" and torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise ConfigError(f"{key}: cuda, but torch sees no CUDA device; use cpu or auto")
    share = DeviceShare.of(environment)
    if asked == "auto" and share is not None and share.devices:
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
        raise ConfigError(
            f"{key}: auto, GPU {','.join(share.devices)} is this service's, and torch {torch.__version__}, which"
            f" {build}, sees none; install a torch that fits the driver, or set it to cpu"
        )
    return "cpu"


def logits_at_once(memory: int) -> int:
    """Logits that a trainer holds within its bytes of a GPU: a power of two, a 20th of them at most."""
    fits = max(1, memory // _LOGITS_SHARE // LOGIT_BYTES)
    return min(_MOST_LOGITS, max(_FEWEST_LOGITS, 1 << fits.bit_length() - 1))
