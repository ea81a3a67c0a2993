"""Reads the mesh for the view: the trainer's stream, the queue's ledger, the engines' figures.

consumes: Watch (trainer), ledger and why_waiting (queue), stats (rollout). waits for: their answers, RETRY_S each.
unblocked by: an answer, or its deadline; a service that does not answer is shown as such. produces: the MeshStatus.
Nothing here can end a run: what is not known is not shown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from meshrl.common.plain_text import counted
from meshrl.contract.errors import MeshError
from meshrl.contract.types import TrainerStatus, Waiting
from meshrl.launcher.address_book import AddressBook
from meshrl.launcher.view import MeshStatus
from meshrl.rollout.circuit_breaker import CircuitState
from meshrl.rollout.ports import NO_BREAKER, UNSERVED
from meshrl.rpc.clients.services import RolloutClient, TrainerClient
from meshrl.rpc.queue_connection import connect_queue
from meshrl.weights.fleet import FleetView, fetch_fleet

log = logging.getLogger(__name__)

EVERY_S = 2.0
RETRY_S = 1.0
"""How long an unreachable service is tried before it is shown as away; it is asked again EVERY_S later."""


class Observer:
    """Keeps `mesh_status` up to date until its context ends. `on_step` hears of every new step."""

    def __init__(
        self,
        mesh_status: MeshStatus,
        address_book: Callable[[], AddressBook],
        on_step: Callable[[TrainerStatus], None],
    ) -> None:
        self._mesh_status = mesh_status
        self._address_book = address_book
        self._on_step = on_step

    @asynccontextmanager
    async def observing(self) -> AsyncIterator[None]:
        """Observe for as long as the body runs."""
        asks = {"trainer": self._watch_trainer, "queue": self._ask_queue}
        tasks = [
            asyncio.create_task(ask(), name=f"observe-{name}")
            for name, ask in asks.items()
            if name in self._mesh_status.states
        ]
        tasks.append(asyncio.create_task(self._ask_fleet(), name="observe-fleet"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    log.error("the view stopped being updated: %r", ended)

    async def look_last(self) -> None:
        """Read the ledger and the step of the newest checkpoint at the end. Raises what the queue's client raises."""
        if "queue" not in self._mesh_status.states:
            return
        async with connect_queue(self._address_book().address("queue"), retry_s=RETRY_S) as queue:
            self._mesh_status.ledger = await queue.ledger(self._mesh_status.run)
            self._mesh_status.saved_step = (
                await queue.run_state(self._mesh_status.run)
            ).committed_step

    async def _watch_trainer(self) -> None:
        while True:
            await self._until_ready("trainer")
            address = self._address_book().address("trainer")
            async with TrainerClient(address, retry_s=RETRY_S) as trainer:
                try:
                    async for status in trainer.watch(every_s=5.0):
                        if self._mesh_status.see(status):
                            self._on_step(status)
                except MeshError as error:
                    log.debug("trainer: %s", error)
            await asyncio.sleep(EVERY_S)

    async def _ask_queue(self) -> None:
        await self._until_ready("queue")
        async with connect_queue(self._address_book().address("queue"), retry_s=RETRY_S) as queue:
            while True:
                try:
                    self._mesh_status.ledger = await queue.ledger(self._mesh_status.run)
                    if self._mesh_status.stuck:
                        book = self._address_book()
                        self._mesh_status.waiting = [
                            *await fleet_waits(book.address("trainer"), book.of_kind("rollout")),
                            *await queue.why_waiting(self._mesh_status.run),
                        ]
                except MeshError as error:
                    log.debug("queue: %s", error)
                await asyncio.sleep(EVERY_S)

    async def _ask_fleet(self) -> None:
        asked: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                names = self._address_book().of_kind("rollout").keys()
                for name in names - asked.keys():
                    self._mesh_status.fleet[name] = None
                    task = group.create_task(self._ask_replica(name), name=f"observe-{name}")
                    asked[name] = task
                for name in asked.keys() - names:
                    asked.pop(name).cancel()
                    self._mesh_status.fleet.pop(name, None)
                await asyncio.sleep(EVERY_S)

    async def _ask_replica(self, name: str) -> None:
        await self._until_ready(name)
        async with RolloutClient(self._address_book().address(name), retry_s=RETRY_S) as replica:
            while True:
                try:
                    self._mesh_status.fleet[name] = await replica.stats()
                except MeshError as error:
                    self._mesh_status.fleet[name] = None
                    log.debug("%s: %s", name, error)
                await asyncio.sleep(EVERY_S)

    async def _until_ready(self, name: str) -> None:
        """Wait for the supervisor to see the service ready: before that a call would only be refused."""
        while self._mesh_status.states[name].phase != "ready":  # noqa: ASYNC110 - a state read, not a wait
            await asyncio.sleep(0.2)


ANSWER_S = 3.0
"""How long the trainer is waited for."""
WELL = (CircuitState.CLOSED, NO_BREAKER)


async def fleet_waits(trainer: str | None, workers: Collection[str]) -> list[Waiting]:
    """A line for each of `workers`, by name, that cannot sample now, as the trainer at `host:port` knows it."""
    if trainer is None or not workers:
        return []
    try:
        fleet = await fetch_fleet(trainer, ANSWER_S)
    except MeshError as error:
        return [_wait("the rollout workers", f"the trainer, to which they report: {error}")]
    reasons = {name: _why_not_sampling(fleet, name) for name in workers}
    return [_wait(name, what) for name, what in reasons.items() if what]


def _wait(who: str, what: str) -> Waiting:
    return Waiting(who=who, what=what, since_s=0.0, owners=(who,))


def _why_not_sampling(fleet: FleetView, name: str) -> str:
    replica = next((each for each in fleet.replicas if each.name == name), None)
    if replica is None:
        return "a connection to the trainer, which has never heard of it"
    report = replica.report
    if report is None:
        return f"a report: {replica.reason or 'it has sent none'}"
    worker = report.worker
    if worker.breaker not in WELL:
        times = f"breaker {worker.breaker}, opened {counted(worker.opened, 'time')}"
        return f"its engine, which fails: {worker.last_fault} ({times})"
    if report.engine.version == UNSERVED:
        return "its engine, which serves no version yet"
    return worker.waits_for
