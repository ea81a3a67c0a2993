"""A transfer queue and its runs, for other programs: `async with Queue.connect("host:port") as queue`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from meshrl.client.batches import Batches, take_over, this_process
from meshrl.client.leases import HeldLease
from meshrl.common.sockets import check_address
from meshrl.contract import ports
from meshrl.contract.codec.bulk import Mode
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
from meshrl.rpc.clients.base import SERVICE_RETRY_S
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.credentials import Credential

DAY_S: Final = 86_400.0
"""Default seconds that calls wait for rows, or for room."""
RETRY_S: Final = SERVICE_RETRY_S
"""Seconds that a restart of the queue may take before calls fail with UnavailableError."""

# Clients that are not freed yet, closed or not: gRPC ends its threads when the last channel is freed, not when it is
# closed.
_clients: weakref.WeakSet[QueueClient] = weakref.WeakSet()
_forked_beside_a_client = False


class Queue:
    """A transfer queue in another process. A write is durable on return, and writing twice is writing once."""

    def __init__(
        self,
        address: str,
        patience_s: float,
        compression: Mode,
        credential: Credential | None = None,
    ) -> None:
        self._address = check_address(address)
        self._retry_s = patience_s
        self._compression = compression
        self._credential = credential
        self._port: QueueClient | None = None

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        patience_s: float = RETRY_S,
        compression: Mode = "auto",
        credential: str | Path | None = None,
    ) -> Self:
        """A queue to enter with `async with`.

        Args:
            address: `host:port` or `unix:/path`.
            patience_s: Seconds for which calls are repeated while the queue restarts.
            compression: Of payload, lossless: `auto` compresses between hosts, `off` never, `zstd` always.
            credential: A credential of the run, or the file of one (`<run.dir>/credentials/<role>`); by default
                MESHRL_CREDENTIAL_FILE or MESHRL_TOKEN.

        Raises:
            UserError: the address is another one.
            ConfigError: the credential cannot be read.
        """
        return cls(address, patience_s, compression, Credential(credential) if credential else None)

    @property
    def port(self) -> ports.Queue:
        """The full port, for operations that this class lacks. Raises UserError when not connected."""
        if self._port is None:
            raise UserError("the queue is not connected: use it inside `with Queue.connect(...)`")
        return self._port

    async def __aenter__(self) -> Self:
        if self._port is None:
            require_no_fork()
            self._port = QueueClient(
                self._address,
                retry_s=self._retry_s,
                compression=self._compression,
                credential=self._credential,
            )
            _clients.add(self._port)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            await port.close()

    async def open_run(self, spec: RunSpec) -> Run:
        """Declare a run. Idempotent. Raises ConflictError, naming the field, if it exists with another spec."""
        await self.port.open_run(spec)
        return Run(self.port, spec.run)

    def run(self, name: str) -> Run:
        """A run that another program opens. Its calls raise NotFoundError until it is open."""
        return Run(self.port, name)


class Run:
    """One run of a queue."""

    def __init__(self, port: ports.Queue, name: str) -> None:
        self._port = port
        self._name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    @property
    def name(self) -> str:
        """The name in its RunSpec."""
        return self._name

    async def state(self) -> RunState:
        """Spec, epoch, published version and the feeder's cursor. Raises NotFoundError."""
        return await self._port.run_state(self._name)

    async def put(self, tasks: Sequence[Task], *, cursor: str = "", wait_s: float = DAY_S) -> None:
        """Admit all of `tasks`. Waits at most `wait_s` for each; putting a task twice admits it once.

        `cursor` is stored in one transaction with the last task. A feeder that died continues from it.

        Raises:
            WaitTimeoutError: there was no room. Admitted tasks stay admitted; putting the same tasks again is safe.
        """
        rest = list(tasks)
        while rest:
            added = await self._port.admit(self._name, rest, cursor=cursor, wait_s=wait_s)
            rest = rest[added:]

    async def close_feed(self) -> None:
        """Declare that no more tasks will come. Waits for rows and batches end with EndOfDataError after the last."""
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
        """Rows that `stage` can work on, held and renewed while its `async with` block runs.

        `version` is the weights' version that a rollout engine samples with. `worker` names the holder (default:
        `host:pid`).
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
        """Batches of `groups` complete groups, for the one trainer of the run. Only the last may be smaller.

        Args:
            groups: Groups of one optimizer step.
            columns: Columns to fetch; all by default.
            step: Optimizer steps of the checkpoint that the trainer starts from; by default the last committed.
            steps: End after this many batches; by default when the feed is closed and empty.
            owner: The trainer's name, for people to read (default: `host:pid`).
            publish: Tell the queue with each settled step that the next version is published; admission and rollout
                leases follow it. False if another process publishes once the engines have the version.
            wait_s: Seconds to wait for each batch before WaitTimeoutError.
        """
        begin = partial(
            take_over,
            self._port,
            self._name,
            owner=owner or this_process(),
            step=step,
            publish=publish,
        )
        return Batches(
            self._port,
            self._name,
            begin=begin,
            groups=groups,
            columns=columns,
            steps=steps,
            publish=publish,
            wait_s=wait_s,
        )

    async def publish(self, version: Version) -> None:
        """Declare that the engines have `version`. Admission and rollout leases follow it."""
        await self._port.publish(self._name, version)

    async def ledger(self) -> Ledger:
        """The counts of all admitted rows by state; exact at every instant."""
        return await self._port.ledger(self._name)

    async def why_waiting(self) -> Sequence[Waiting]:
        """Everything that blocks now, the longest wait first."""
        return await self._port.why_waiting(self._name)

    async def dead_letters(self) -> Sequence[DeadLetter]:
        """The rows that were given up, each with its last failure reason."""
        return await self._port.dead_letters(self._name)

    async def replay(self, uids: Sequence[Uid]) -> int:
        """Admit dead-lettered rows again as new attempts; returns how many."""
        return await self._port.replay(self._name, uids)


def _after_fork() -> None:
    global _forked_beside_a_client
    _forked_beside_a_client = _forked_beside_a_client or len(_clients) > 0
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)


def require_no_fork() -> None:
    """Raises UserError in a process that was forked while a connection existed: gRPC would hang there."""
    if _forked_beside_a_client:
        raise UserError(
            f"process {os.getpid()} was forked from one with a queue connection, and gRPC does not survive that:"
            ' start it with "spawn" or "forkserver", or close and drop the connection before the fork'
        )
