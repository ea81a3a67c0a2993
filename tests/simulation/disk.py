"""Disks that survive the processes that write to them: the queue's store, and the trainer's checkpoints.

    apply ──▶ written (a crash keeps any of its sectors) ──sync──▶ durable ──▶ acknowledged
                         a crash here: whole, torn or gone

The store is a log of transactions, each one frame with a checksum; a torn last frame is dropped when it is opened
again, as LMDB drops a transaction whose meta page was not written. A checkpoint is durable at its rename.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from meshrl.contract.errors import CapacityError, FencedError, InfraError
from meshrl.contract.types import Version
from meshrl.trainer.checkpoint.checkpoint import Checkpoints, TrainerState
from meshrl.trainer.checkpoint.dcp import Tensors
from meshrl.trainer.checkpoint.kept import Keep
from meshrl.trainer.ranks.world import World
from meshrl.transferqueue.store import Operation, OwnerLostError, Store, Table
from tests.simulation.loop import Blocked

WRITE_S: Final = 0.0005
SYNC_S: Final = 0.003
"""Mean seconds of a write and of an fsync."""
SECTOR_BYTES: Final = 512
TABLES: Final = tuple(Table)


class Disk:
    """One queue's stored data. A `Store` is one process's handle of it."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(f"disk {seed}")
        self.tables: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self.tail = b""
        """A transaction that is written and not synced."""
        self.owner = 0
        self.full_until = 0.0
        """No space until then, by the virtual clock."""
        self.failing_until = 0.0
        """Each commit fails until then, before or after its bytes are durable."""
        self.commits = 0

    def open(self) -> SimulatedStore:
        """A handle for a new process; older ones lose the store."""
        self.owner += 1
        return SimulatedStore(self, self.owner)

    def crash(self) -> None:
        """Keep the unsynced data whole, or any of its sectors, in any order."""
        if self.random.random() < 0.5:
            return
        sectors = [
            self.tail[at : at + SECTOR_BYTES] for at in range(0, len(self.tail), SECTOR_BYTES)
        ]
        kept = [each if self.random.random() < 0.5 else bytes(len(each)) for each in sectors]
        self.tail = b"".join(kept)[: self.random.randrange(len(self.tail) + 1)]

    def replay(self) -> None:
        """Add the last transaction if its frame is whole."""
        frame, self.tail = self.tail, b""
        if len(frame) >= 4 and zlib.crc32(frame[4:]) == int.from_bytes(frame[:4], "big"):
            self.change(_operations(frame[4:]))

    def change(self, operations: Sequence[Operation]) -> None:
        """The operations are durable."""
        self.commits += 1
        for table, key, value in operations:
            if value is None:
                self.tables[table].pop(key, None)
            else:
                self.tables[table][key] = value


class SimulatedStore(Store):
    """A store on a simulated disk."""

    def __init__(self, disk: Disk, owner: int) -> None:
        self._disk = disk
        self._owner = owner
        self._clock = asyncio.get_running_loop().time

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Open, or open again after a failed commit."""
        self._check_owner()
        self._disk.crash()
        self._disk.replay()
        return sorted(self._disk.tables[Table.META].items())

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Write, sync, acknowledge."""
        disk, draw = self._disk, self._disk.random
        self._check_owner()
        if disk.full_until > self._clock():
            await asyncio.sleep(WRITE_S)
            raise CapacityError("the simulated disk is full", free=0, wanted=1)
        await asyncio.sleep(draw.expovariate(1 / WRITE_S))
        self._check_owner()
        disk.tail = _frame(operations)
        await asyncio.sleep(draw.expovariate(1 / SYNC_S))
        self._check_owner()
        if disk.failing_until > self._clock():
            raise InfraError("simulated: the commit failed")
        disk.tail = b""
        disk.change(operations)
        if draw.random() < 0.5:  # durable, and nobody knows yet
            await asyncio.sleep(draw.expovariate(1 / SYNC_S))

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Payload."""
        await asyncio.sleep(0)
        payload = self._disk.tables[Table.PAYLOAD]
        return [payload.get(key) for key in keys]

    @property
    def name(self) -> str:
        """For messages."""
        return "simulated disk"

    def check_room(self, nbytes: int) -> None:
        """Nothing fits while the disk is full."""
        if self._disk.full_until > self._clock():
            raise CapacityError(
                f"the simulated disk has no space for {nbytes} bytes", free=0, wanted=nbytes
            )

    def size_bytes(self) -> int:
        """Bytes of payload."""
        return sum(map(len, self._disk.tables[Table.PAYLOAD].values()))

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record."""
        for table in (Table.META, Table.PAYLOAD):
            yield [Operation(table, *pair) for pair in list(self._disk.tables[table].items())]

    async def close(self) -> None:
        """Nothing to release."""

    def _check_owner(self) -> None:
        if self._disk.owner != self._owner:
            raise OwnerLostError("the simulated store has another owner")


def _frame(operations: Sequence[Operation]) -> bytes:
    parts: list[bytes] = []
    for table, key, value in operations:
        size = -1 if value is None else len(value)
        parts += [
            bytes((TABLES.index(table),)),
            len(key).to_bytes(4, "big"),
            size.to_bytes(8, "big", signed=True),
            key,
            value or b"",
        ]
    body = b"".join(parts)
    return zlib.crc32(body).to_bytes(4, "big") + body


def _operations(body: bytes) -> list[Operation]:
    found: list[Operation] = []
    at = 0
    while at < len(body):
        table = TABLES[body[at]]
        key_size = int.from_bytes(body[at + 1 : at + 5], "big")
        size = int.from_bytes(body[at + 5 : at + 13], "big", signed=True)
        at += 13
        key = body[at : at + key_size]
        at += key_size
        value = None if size < 0 else body[at : at + size]
        at += max(0, size)
        found.append(Operation(table, key, value))
    return found


@dataclass(slots=True)
class StoredCheckpoint:
    """One durable checkpoint."""

    state: TrainerState
    tensors: Tensors

    @property
    def version(self) -> Version:
        """Epoch and step."""
        return Version(self.state.epoch, self.state.step)


@dataclass(slots=True)
class CheckpointDisk:
    """The directory of checkpoints, shared by all trainers of a run, also by one that should be dead."""

    stored: list[StoredCheckpoint] = field(default_factory=list)
    epoch: int | None = None
    """The trainer that may write."""
    sweeps: int = 0
    """A writer that began before the last sweep has lost its directory."""


class SimulatedCheckpoints(Checkpoints):
    """The checkpoints of the ranks of one trainer."""

    def __init__(self, disk: CheckpointDisk, takes: Callable[[], asyncio.Future[None]]) -> None:
        """`takes` is the time of one write, as a future that begins now."""
        self._disk = disk
        self._takes = takes
        self._writing: dict[tuple[int, Version], tuple[asyncio.Future[None], int]] = {}

    def describe(
        self, state: TrainerState, policy: Any, beside: Mapping[str, Any] | None = None
    ) -> TrainerState:
        """There is nothing to add."""
        return state

    def freeze(
        self, policy: Any, optimizers: Any, beside: Mapping[str, Any] | None = None
    ) -> Tensors:
        """A copy of what the policy was trained on."""
        return {"trained_on": list(policy.trained_on)}

    def write(
        self, root: Path, tensors: Tensors, state: TrainerState, world: World, *, keep: Keep
    ) -> Path:
        """Takes a while; then the rename makes it durable, unless a successor has swept the directory."""
        world.barrier()
        version = Version(state.epoch, state.step)
        if world.is_main:
            if (world.rank, version) not in self._writing:
                if self._disk.epoch not in (None, state.epoch):
                    raise FencedError(f"epoch {state.epoch} is fenced, {self._disk.epoch} has them")
                self._writing[world.rank, version] = (self._takes(), self._disk.sweeps)
            done, sweeps = self._writing[world.rank, version]
            if not done.done():
                raise Blocked(done)
            if sweeps != self._disk.sweeps:
                raise InfraError(f"cannot write the checkpoint of step {state.step}: it was swept")
            if version not in {stored.version for stored in self._disk.stored}:
                self._disk.stored.append(StoredCheckpoint(state, tensors))
            for dropped in keep.drops([version for version, _ in self.complete(root)]):
                self._disk.stored = [s for s in self._disk.stored if s.version != dropped]
        world.barrier()
        return self._path(root, version)

    def load(
        self,
        path: Path,
        policy: Any,
        optimizers: Any = None,
        *,
        beside: Mapping[str, Any] | None = None,
    ) -> TrainerState:
        """Fill the policy."""
        stored = next(s for s in self._disk.stored if self._path(path.parent, s.version) == path)
        policy.trained_on = list(cast("list[Any]", stored.tensors["trained_on"]))
        return stored.state

    def newest(self, root: Path, world: World | None = None) -> tuple[Path, TrainerState] | None:
        """The checkpoint of the newest version; rank 0's, on every rank."""
        found = {str(stored.version): stored for stored in self._disk.stored}
        newest = max((s.version for s in self._disk.stored), default=None)
        name = "" if newest is None else str(newest)
        if world is not None:
            name = world.broadcast(name.encode()).decode()
        if not name:
            return None
        return self._path(root, found[name].version), found[name].state

    def complete(self, root: Path) -> Iterator[tuple[Version, Path]]:
        """Newest first."""
        for version in sorted((stored.version for stored in self._disk.stored), reverse=True):
            yield version, self._path(root, version)

    def take_over(self, root: Path, epoch: int) -> None:
        """Take every writer its directory away."""
        self._disk.epoch = epoch
        self._disk.sweeps += 1

    def remove(self, path: Path) -> None:
        """Remove the version at once."""
        kept = [s for s in self._disk.stored if self._path(path.parent, s.version) != path]
        self._disk.stored = kept

    @staticmethod
    def _path(root: Path, version: Version) -> Path:
        return root / f"step-{version.step:08d}-epoch-{version.epoch:04d}"
