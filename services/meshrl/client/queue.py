"""The queue and a run on it, from outside: `async with Queue.connect("host:port") as queue`."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, Self

from meshrl.client.batches import Batches, this_process
from meshrl.client.connection import PATIENCE_S, check_address, connected
from meshrl.client.leases import HeldLease
from meshrl.contract import ports
from meshrl.contract.codec.compression import Mode
from meshrl.contract.errors import UserError
from meshrl.contract.types import (
    DeadLetter,
    Lease,
    Ledger,
    RunSpec,
    RunState,
    Task,
    Uid,
    Version,
    Waiting,
)

DAY_S: Final = 86_400.0
"""How long calls wait for rows, or for room, unless told otherwise."""


class Queue:
    """A transfer queue elsewhere. Everything written is durable on return, and writing twice is writing once."""

    def __init__(self, addresses: Sequence[str], patience_s: float, compression: Mode) -> None:
        self._addresses = tuple(check_address(address) for address in addresses)
        self._patience_s = patience_s
        self._compression = compression
        self._port: ports.Queue | None = None
        self._closing = AsyncExitStack()

    @classmethod
    def connect(
        cls, *addresses: str, patience_s: float = PATIENCE_S, compression: Mode = "auto"
    ) -> Self:
        """A queue to be entered: `host:port`, or those of all its shards, in the same order for everybody.

        Calls outlive a restart of the queue that takes no longer than `patience_s` seconds. Payload is compressed,
        without loss, by `compression`: `auto` between hosts, `off`, `zstd` always.

        Raises:
            UserError: no address, or none of the form.
        """
        if not addresses:
            raise UserError("connect wants the address of a queue: host:port")
        return cls(addresses, patience_s, compression)

    @property
    def port(self) -> ports.Queue:
        """The whole port, for what has no verb here. Raises UserError when not connected."""
        if self._port is None:
            raise UserError("the queue is not connected: use it inside `with Queue.connect(...)`")
        return self._port

    async def __aenter__(self) -> Self:
        if self._port is None:
            opening = connected(self._addresses, self._patience_s, self._compression)
            self._port = await self._closing.enter_async_context(opening)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up; idempotent."""
        self._port = None
        await self._closing.aclose()

    async def open_run(self, spec: RunSpec) -> Run:
        """Declare a run; idempotent. Raises ConflictError, naming the field, if it exists with another spec."""
        await self.port.open_run(spec)
        return Run(self.port, spec.run)

    def run(self, name: str) -> Run:
        """A run that somebody has opened or will open; its calls raise NotFoundError until then."""
        return Run(self.port, name)


class Run:
    """One run of a queue."""

    def __init__(self, port: ports.Queue, name: str) -> None:
        self._port = port
        self._name = name

    @property
    def name(self) -> str:
        """As in its RunSpec."""
        return self._name

    async def state(self) -> RunState:
        """Spec, epoch, published version, the feeder's cursor. Raises NotFoundError."""
        return await self._port.run_state(self._name)

    async def put(self, tasks: Sequence[Task], *, cursor: str = "", wait_s: float = DAY_S) -> None:
        """Admit all of `tasks`, each at the latest `wait_s` after the one before; a task put twice is there once.

        `cursor` is stored in one transaction with the last of them: where a feeder that dies goes on.

        Raises:
            WaitTimeoutError: there was no room. What got in stays in; putting the same tasks again is safe.
        """
        rest = list(tasks)
        while rest:
            added = await self._port.admit(self._name, rest, cursor=cursor, wait_s=wait_s)
            rest = rest[added:]

    async def close_feed(self) -> None:
        """No more tasks will come: whoever waits for rows or batches ends when the last has gone."""
        await self._port.close_feed(self._name)

    def lease(
        self,
        stage: str,
        *,
        limit: int = 1,
        at_least: int = 1,
        worker: str = "",
        version: Version | None = None,
        wait_s: float = DAY_S,
    ) -> HeldLease:
        """Rows that `stage` can work on, held and renewed for the length of its `async with` block.

        `version` is what a rollout engine samples with. `worker` names the holder (default: host and pid).
        """

        def ask() -> Coroutine[Any, Any, Lease]:
            return self._port.lease(
                [self._name],
                stage,
                worker=worker or this_process(),
                limit=limit,
                at_least=at_least,
                version=version,
                wait_s=wait_s,
            )

        return HeldLease(self._port, ask)

    def batches(
        self,
        groups: int,
        *,
        columns: Sequence[str] | None = None,
        step: int | None = None,
        steps: int | None = None,
        owner: str = "",
        publish: bool = True,
        wait_s: float = DAY_S,
    ) -> Batches:
        """Batches of `groups` complete groups, as the run's one trainer; fewer only in the last.

        Args:
            groups: Groups of one optimizer step.
            columns: What to fetch; all by default.
            step: Optimizer steps of the checkpoint that the trainer starts from; by default the last committed.
            steps: End after so many batches; without it when the feed is closed and empty.
            owner: Who trains, for people to read (default: host and pid).
            publish: Tell the queue with each settled step that the next version is out, which is what admission
                and rollout leases follow. False where somebody else does, when the engines have it.
            wait_s: Seconds to wait for each batch; then WaitTimeoutError.
        """
        return Batches(
            self._port,
            self._name,
            groups=groups,
            columns=columns,
            step=step,
            steps=steps,
            owner=owner or this_process(),
            publish=publish,
            wait_s=wait_s,
        )

    async def publish(self, version: Version) -> None:
        """The engines have `version`: admission and rollout leases move on."""
        await self._port.publish(self._name, version)

    async def ledger(self) -> Ledger:
        """Where every admitted row is; exact at every instant."""
        return await self._port.ledger(self._name)

    async def why_waiting(self) -> Sequence[Waiting]:
        """Everything that blocks now, the longest wait first."""
        return await self._port.why_waiting(self._name)

    async def dead_letters(self) -> Sequence[DeadLetter]:
        """The rows that were given up, with the last reason."""
        return await self._port.dead_letters(self._name)

    async def replay(self, uids: Sequence[Uid]) -> int:
        """Admit dead-lettered rows again as new attempts; returns how many."""
        return await self._port.replay(self._name, uids)
