"""What a router knows: the shards, which of them each run is on, where tasks are; and how it learns of added shards.

    watcher.py ── another shard list ──────▶ learn: connect to the added shards, open every known run on them
    a call that raises ShardsAdded ────────▶ catch_up ──▶ the call is made again

**A router uses a shard only after it has brought it up to what shard 0 said once the run was on it; whoever changes
something on shard 0 checks afterwards whether the run is on more shards.** So each shard of a run knows of every
change before anybody works there, whichever of the routers was killed in between.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from meshrl.contract.errors import FencedError, ForbiddenError, InfraError, NotFoundError, UserError
from meshrl.contract.types import RunSpec, RunState
from meshrl.transferqueue.sharding import run_shards, shard_list
from meshrl.transferqueue.sharding.batches import ShardedBatches
from meshrl.transferqueue.sharding.fan_out import all_of, by_key
from meshrl.transferqueue.sharding.port import Shard
from meshrl.transferqueue.sharding.run_shards import RunShards, ShardsAdded
from meshrl.transferqueue.sharding.shard_list import ShardList
from meshrl.transferqueue.sharding.watcher import ShardWatcher

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Dial: TypeAlias = Callable[[str], Awaitable[Shard]]
PLACES = 1 << 18
"""Tasks whose shard is remembered."""


class TaskPlaces:
    """The shard of each task, as far as one router knows. A task stays on its shard until it has left."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._places: dict[tuple[str, str], int] = {}

    def note(self, run: str, tasks: Iterable[str], number: int) -> None:
        """A shard has handed these tasks out."""
        if len(self._places) > PLACES:
            self._places.clear()
        self._places.update(((run, task), number) for task in tasks)

    async def by_shard(
        self, run: str, members: RunShards, items: Sequence[Item], task_of: Callable[[Item], str]
    ) -> Mapping[int, Sequence[Item]]:
        """`items` by the shard that has their task; a task that no shard knows belongs where it would be admitted."""
        if not members.grown:
            return by_key((members.home(task_of(item)), item) for item in items)
        found = await self._located(run, members, {task_of(item) for item in items})
        return by_key((found[task_of(item)], item) for item in items)

    async def _located(
        self, run: str, members: RunShards, tasks: Iterable[str]
    ) -> Mapping[str, int]:
        found = {task: self._places.get((run, task), -1) for task in tasks}
        unknown = [task for task, number in found.items() if number < 0]
        asked = by_key((number, task) for task in unknown for number in members.homes(task))
        capacities = await all_of(
            self._shards[number].capacity(run, tasks=part) for number, part in asked.items()
        )
        for number, capacity in zip(asked, capacities, strict=True):
            self.note(run, capacity.known, number)
            found.update(dict.fromkeys(capacity.known, number))
        return {
            task: members.home(task) if number < 0 else number for task, number in found.items()
        }


@dataclass(frozen=True, slots=True)
class KnownRun:
    """What is known of an open run."""

    spec: RunSpec
    members: RunShards
    batches: ShardedBatches

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards of the run."""
        return self.batches.shards


class ShardDirectory:
    """The shards and runs of one router."""

    def __init__(self, shards: Sequence[Shard], addresses: Sequence[str], dial: Dial | None):
        self.shards = list(shards)
        """All known shards, by number; the list only grows."""
        self.watcher = ShardWatcher(self.shards[0])
        self.places = TaskPlaces(self.shards)
        self._addresses = list(addresses)
        self._dial = dial
        self._enrolled = 0
        self._learning = asyncio.Lock()
        self._finding = asyncio.Lock()
        self._runs: dict[str, KnownRun] = {}

    # --- shards

    async def add_shard(self, address: str) -> int:
        """See ShardedQueue."""
        await self._learn()
        if address in self._addresses:
            number = self._addresses.index(address)
            raise UserError(f"the queue at {address} is shard {number} of this one already")
        added = await self._connect(address)
        first, number = self.shards[0], len(self.shards)
        runs = (await first.note(shard_list.SHARD_LIST)).runs
        for run in runs:
            run_shards.check_available(run, await run_shards.recorded(first, run), number)
        await shard_list.enrol(self.shards, self._addresses, added, address)
        try:
            await self._learn()
            for run in runs:
                await self.known(run)
        except UserError as error:
            raise InfraError(
                f"shard {number} is added, and a run not yet on it: {error}"
            ) from error
        return number

    async def addresses(self) -> Sequence[str]:
        """See ShardedQueue."""
        await self._learn()
        return tuple(self._addresses)

    async def enrolled(self) -> int:
        """See ShardedQueue."""
        await self._learn()
        return self._enrolled

    async def learned(self) -> str:
        """The shard list that is known, as written, after learning of added shards."""
        while self.watcher.has_news():
            await self._learn()
        assert self.watcher.learned is not None
        return self.watcher.learned

    async def _learn(self) -> None:
        """Connect to the shards that were added, and open every known run on them."""
        async with self._learning:
            while (text := await self.watcher.read()) != self.watcher.learned:
                try:
                    if text:
                        await self._reach(ShardList.parse(text))
                    for known in list(self._runs.values()):
                        await self._bring(known.spec, text)
                except UserError:
                    if await self.watcher.read() == text:
                        raise
                else:
                    self.watcher.learn(text)

    async def _with_shard_list(self, call: Callable[[str], Awaitable[Answer]]) -> Answer:
        """Call `call` with the known shard list; again if it failed and the list has changed by then."""
        while True:
            since = await self.learned()
            try:
                return await call(since)
            except UserError:
                if await self.watcher.read() == since:
                    raise
                await self._learn()

    async def _reach(self, written: ShardList) -> None:
        """Raises UserError when a queue is not the shard it was named as, or another queue has its address by now."""
        if not self._enrolled:
            for number, shard in enumerate(self.shards):
                await shard_list.check_named_as(shard, number, written)
        for number in range(len(self.shards), len(written.addresses)):
            address = written.addresses[number]
            shard = await self._connect(address)
            await shard_list.check_known_as(shard, address, number, written)
            self.shards.append(shard)
            self._addresses.append(address)
        self._enrolled = len(written.addresses)

    async def _connect(self, address: str) -> Shard:
        if self._dial is None:
            raise UserError(
                f"the queue has more than the {len(self.shards)} shards named, one at {address}: name all"
            )
        return await self._dial(address)

    # --- runs

    def has(self, number: int) -> Callable[[str], bool]:
        """A function that says whether a run is on the shard of that number, as far as is known."""

        def is_on_shard(run: str) -> bool:
            known = self._runs.get(run)
            return known is not None and number < known.members.count

        return is_on_shard

    async def known(self, run: str) -> KnownRun:
        """What is known of an open run. Raises NotFoundError."""
        if self.watcher.has_news():
            await self._learn()
        if (known := self._runs.get(run)) is not None:
            return known
        async with self._finding:  # calls that begin together share one look-up
            known = self._runs.get(run)
            return known if known else await self._with_shard_list(partial(self._find, run))

    async def _find(self, run: str, since: str) -> KnownRun:
        first = self.shards[0]
        state = await first.run_state(run)
        members = await run_shards.recorded(first, run)
        run_shards.check_available(run, members, len(self.shards))
        if members.grown or members.count < self._enrolled:
            # The router that put the run on more shards may have died before the run was open on all of them.
            await self._bring(state.spec, since)
            return self._runs[run]
        return self._know(state.spec, members, since)

    async def open_ones(self, runs: Sequence[str]) -> Mapping[str, KnownRun]:
        """Those of `runs` that are open."""
        found = {}
        for run in runs:
            with suppress(NotFoundError):
                found[run] = await self.known(run)
        return found

    async def open(self, spec: RunSpec) -> RunState:
        """Open a run on all shards that there are."""
        return await self._with_shard_list(lambda since: self._open(spec, since, len(self.shards)))

    async def _bring(self, spec: RunSpec, since: str) -> None:
        """Open a run on all enrolled shards, and on those where other routers have opened it."""
        members = await run_shards.recorded(self.shards[0], spec.run)
        run_shards.check_available(spec.run, members, len(self.shards))
        await self._open(spec, since, max(members.count, self._enrolled))

    async def _open(self, spec: RunSpec, since: str, available: int) -> RunState:
        try:
            return await self._open_here(spec, since, available)
        except ForbiddenError:
            # Whoever may not open runs works where those who may have opened it, and learns of more by `catch_up`.
            state = await self.shards[0].run_state(spec.run)
            members = await run_shards.recorded(self.shards[0], spec.run)
            run_shards.check_available(spec.run, members, len(self.shards))
            self._know(state.spec, members, since)
            return state

    async def _open_here(self, spec: RunSpec, since: str, available: int) -> RunState:
        members = await run_shards.join(self.shards[0], spec.run, available)
        first, *others = self.shards[:available]
        state = await first.open_run(spec)
        await all_of(shard.open_run(spec) for shard in others)
        # Shard 0 hears of everything last, except for epochs: a shard that is behind it missed something. An epoch
        # that began since then has its own trainer, which brings the shards along.
        # A feeder leaves this to the trainer.
        with suppress(FencedError, ForbiddenError):
            await all_of(shard.follow(state, "") for shard in others)
        self._know(spec, members, since)
        return state

    def _know(self, spec: RunSpec, members: RunShards, since: str) -> KnownRun:
        known = self._runs.get(spec.run)
        if known is None or (known.members, known.batches.since) != (members, since):
            batches = ShardedBatches(
                run=spec.run,
                shards=self.shards[: members.count],
                members=members,
                watcher=self.watcher,
                since=since,
                plans=known.batches.plans if known else OrderedDict(),
                planning=known.batches.planning if known else asyncio.Lock(),
            )
            known = self._runs[spec.run] = KnownRun(spec, members, batches)
        return known

    # --- calls that survive the addition of a shard

    async def has_more_shards(self, known: KnownRun) -> bool:
        """True when the run is on more shards by now."""
        return await run_shards.recorded(self.shards[0], known.spec.run) != known.members

    async def catch_up(self, run: str) -> None:
        """Learn of added shards, and open the run on them."""
        await self._learn()
        await self._with_shard_list(partial(self._bring, self._runs[run].spec))

    async def with_current_shards(
        self, run: str, call: Callable[[KnownRun], Awaitable[Answer]]
    ) -> Answer:
        """Call `call`; again whenever it raises ShardsAdded."""
        while True:
            try:
                return await call(await self.known(run))
            except ShardsAdded:
                await self.catch_up(run)

    async def everywhere(
        self, run: str, call: Callable[[Shard], Awaitable[Answer]]
    ) -> list[Answer]:
        """Call every shard of a run, shard 0 after the others; returns the answers, that of shard 0 first."""
        while True:
            known = await self.known(run)
            first, *others = known.shards
            answers = await all_of(call(shard) for shard in others)
            every = [await call(first), *answers]
            if not await self.has_more_shards(known):
                return every
            await self.catch_up(run)

    async def broadcast(
        self,
        run: str,
        call: Callable[[Shard], Awaitable[None]],
        first: Callable[[Shard], Awaitable[str]],
    ) -> None:
        """Call every shard of a run at once; the answer of shard 0 to `first` says which shards the run is on.

        For changes that `follow` repairs where shard 0 has them and another shard has not.
        """

        async def tell(known: KnownRun) -> None:
            leader, *others = known.shards
            members: list[str] = []

            async def tell_first() -> None:
                members.append(await first(leader))

            await all_of([tell_first(), *map(call, others)])
            known.members.check(members[0])

        await self.with_current_shards(run, tell)

    # --- where tasks are

    async def by_shard(
        self, run: str, items: Sequence[Item], task_of: Callable[[Item], str]
    ) -> Mapping[int, Sequence[Item]]:
        """`items` by the shard that has their task."""
        members = (await self.known(run)).members
        return await self.places.by_shard(run, members, items, task_of)

    async def routed(
        self,
        run: str,
        items: Sequence[Item],
        task_of: Callable[[Item], str],
        call: Callable[[Mapping[int, Sequence[Item]]], Awaitable[Answer]],
    ) -> Answer:
        """Call `call` with `items` by shard; again where they were not found and the run is on more shards by now.

        For rows that another process named, which may know of shards that are unknown here.
        """
        known = await self.known(run)
        try:
            return await call(await self.by_shard(run, items, task_of))
        except NotFoundError:
            if not await self.has_more_shards(known):
                raise
            await self.catch_up(run)
            return await call(await self.by_shard(run, items, task_of))

    def handed_out(self, run: str, tasks: Iterable[str], number: int) -> None:
        """Note that a shard has handed out these tasks, so that no shard need be asked for them."""
        known = self._runs.get(run)
        if known is not None and known.members.grown:
            self.places.note(run, tasks, number)
