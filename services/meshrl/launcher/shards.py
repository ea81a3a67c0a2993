"""Adds shards to the queue of a running `up`: what `meshrl queue add-shard` asks of it.

    start queue-N ── ready ──▶ note how many there will be ──▶ enrol ──▶ recipe, address book
                                     (the next `up`)          (all others)      (whoever starts from here on)

What a kill of `up` leaves at any of these points, the next `up` goes on with: it starts as many queue processes as
are noted, and whoever opens the run brings it to all of them. A shard that was noted and not enrolled holds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from meshrl.config.recipe import Recipe
from meshrl.contract.errors import ConflictError, CorruptError, UserError
from meshrl.contract.files import replace_file
from meshrl.contract.words import counted
from meshrl.launcher.control import Answer, Operation
from meshrl.launcher.plan import LaunchPlan, ProbeOf
from meshrl.launcher.supervisor import Supervisor
from meshrl.rpc.queue_connection import connect_queue
from meshrl.transferqueue.sharding import ShardedQueue

SHARD_COUNT_NAME: Final = "queue.shards"
RETRY_S: Final = 30.0
"""How long a shard that restarts is waited for; then the one to be added waits to be asked for again."""


def with_recorded_shards(recipe: Recipe) -> Recipe:
    """The recipe with as many shards as its run has. Raises CorruptError."""
    note = recipe.run.path / SHARD_COUNT_NAME
    if not note.exists():
        return recipe
    try:
        shards = int(note.read_text())
    except ValueError:
        raise CorruptError(
            f"{note} does not say how many shards the queue has; write it there"
        ) from None
    return _with_shards(recipe, max(shards, recipe.queue.shards))


def _with_shards(recipe: Recipe, shards: int) -> Recipe:
    queue = recipe.queue.model_copy(update={"shards": shards})
    return recipe.model_copy(update={"queue": queue})


class ShardOperations:
    """What the control socket offers."""

    def __init__(
        self,
        recipe: Recipe,
        plan: LaunchPlan,
        supervisor: Supervisor,
        probe_of: ProbeOf,
        log: Callable[[str], None],
        save: Callable[[Recipe], None],
    ) -> None:
        """`save` makes a recipe the one of the run, and of services that start from then on."""
        self._recipe = recipe
        self._plan = plan
        self._supervisor = supervisor
        self._probe_of = probe_of
        self._log = log
        self._save = save
        self._adding = asyncio.Lock()
        self._started = ""
        """A shard that may be enrolled or not: shard 0 ended before it answered."""

    @property
    def operations(self) -> Mapping[str, Operation]:
        """By name."""
        return {"add-shard": self.add}

    async def add(self, request: Mapping[str, object]) -> Answer:
        """Start one more queue process and enrol it; answers when new tasks go to it as well."""
        async with self._adding:
            self._supervisor.check_running()
            name = self._started or await self._start()
            shards = len(self._plan.address_book.of_kind("queue")) + 1
            try:
                replace_file(self._recipe.run.path / SHARD_COUNT_NAME, f"{shards}\n")
                await self._enrol(name)
            except (ConflictError, UserError):
                replace_file(self._recipe.run.path / SHARD_COUNT_NAME, f"{shards - 1}\n")
                self._started = ""
                await self._supervisor.dismiss(name)
                raise
            self._started = ""
            self._save(_with_shards(self._recipe, shards))
            self._plan.list_shard(name)
            self._log(f"queue: added {name}, {counted(shards, 'shard')}")
            return {"added": name, "shards": shards}

    async def _start(self) -> str:
        service = self._plan.new_shard(self._probe_of)
        await self._supervisor.add_required(service)
        self._started = service.name
        return service.name

    async def _enrol(self, name: str) -> None:
        addresses = self._plan.address_book.peers()["queue"]
        address = self._plan.shard_entry(name).address
        async with connect_queue(addresses, retry_s=RETRY_S) as queue:
            assert isinstance(queue, ShardedQueue), "a single queue gets no shard"
            known = await queue.addresses()
            if address in known:
                return
            if elsewhere := known[len(addresses.split(",")) :]:
                raise UserError(
                    f"this `up` does not run the shard at {elsewhere[0]}: add others as that one was added,"
                    " with their HOST:PORT and --queue"
                )
            await queue.add_shard(address)
