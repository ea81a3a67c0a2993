"""One channel to all replicas that take a version: each bucket is sent into it once, however many they are.

    Assembly   who of a version's members is in it; forms the group, and forms it again without those that are out
    Group      rank 0 here, one rank beside each engine; what all members have come for happens once

Consumes members that come and go. Waits for all that are expected, each of which comes or is out by a deadline of
its own. Unblocked by the end of any of them. A group that fails ends nobody: what its members have verified stays,
and the next one sends the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from meshrl.contract.errors import InfraError, MeshError
from meshrl.contract.ports import WeightSource
from meshrl.weights.carrier import Channel
from meshrl.weights.waiting import unless

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_MOST_FAILED = 2
"""Groups of one version that may fail though nobody is out: then each member has a channel of its own."""


class GroupError(InfraError):
    """A replica gets nothing from the group that it is in."""


class Meeting(Generic[_T]):
    """What happens once all have come, and whose result all get."""

    def __init__(self) -> None:
        self._brought: list[Any] = []
        self._result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._work: asyncio.Task[None] | None = None

    def bring(self, value: object) -> asyncio.Future[_T]:
        """Come with this; the result."""
        self._brought.append(value)
        return self._result

    @property
    def came(self) -> int:
        """How many."""
        return len(self._brought)

    def begin(self, then: Callable[[list[Any]], Awaitable[_T]]) -> None:
        """All are here."""
        self._work = asyncio.create_task(self._run(then), name="weight-group")

    async def _run(self, then: Callable[[list[Any]], Awaitable[_T]]) -> None:
        try:
            self._result.set_result(await then(self._brought))
        except Exception as error:
            known = error if isinstance(error, MeshError) else InfraError(repr(error))
            self._result.set_exception(known)
            self._result.exception()  # looked at: all may have gone


class Group:
    """The trainer's end of one channel, and what its members do together."""

    def __init__(self, number: int, members: Sequence[int], channel: Channel) -> None:
        """`members` are generations; each one's rank is its place, from 1 on."""
        self.number = number
        self.members = tuple(members)
        self.broken = asyncio.Event()
        self.reason = ""
        self._channel = channel
        self._opening: asyncio.Task[None] | None = None
        self._meeting: Meeting[Any] = Meeting()

    @property
    def size(self) -> int:
        """Of the channel, this end included."""
        return 1 + len(self.members)

    def rank(self, generation: int) -> int:
        """Of a member."""
        return 1 + self.members.index(generation)

    def open(self, deadline_s: float) -> None:
        """Begin to open this end, once; the group breaks if that fails. Never waits."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(deadline_s), name="weight-group-open")

    async def meet(self, value: object, then: Callable[[list[Any]], Awaitable[_T]]) -> _T:
        """Await all members; returns the result of `then` over the values of all. Raises GroupError."""
        meeting: Meeting[_T] = self._meeting
        result = meeting.bring(value)
        if meeting.came == len(self.members):
            self._meeting = Meeting()
            meeting.begin(then)
        try:
            return await unless(self.broken, asyncio.shield(result), self.reason)
        except MeshError as error:
            self.fail(str(error))
            raise GroupError(self.reason) from error

    async def send(self, source: WeightSource, index: int) -> None:
        """One bucket, to all."""
        assert self._opening is not None
        await asyncio.shield(self._opening)
        await self._channel.send(source.manifest, index, source.bucket(index))

    def fail(self, reason: str) -> None:
        """Give it up; idempotent, never waits."""
        if not self.broken.is_set():
            self.reason = reason
            self.broken.set()
            self._channel.abort()

    async def _open(self, deadline_s: float) -> None:
        try:
            await self._channel.open(deadline_s)
        except MeshError as error:
            self.fail(str(error))


class Groups:
    """The group that stands, of each carrier; kept from version to version while its members do."""

    def __init__(self, channel: Callable[[str, int, int], Channel]) -> None:
        """`channel` makes rank 0 of a carrier's channel, by its number and size."""
        self._channel = channel
        self._standing: dict[str, Group] = {}
        self._number = 0
        self.newest: dict[str, Assembly] = {}
        self.hopeless: dict[str, frozenset[int]] = {}
        """Members that could not be one group, by carrier."""

    def assemble(self, carrier: str, members: Iterable[int]) -> Assembly:
        """For the next version."""
        self.newest[carrier] = Assembly(self, carrier, members)
        return self.newest[carrier]

    def form(self, carrier: str, members: Sequence[int]) -> Group:
        """The group that stands if it is of these, else a new one."""
        standing = self._standing.get(carrier)
        if standing is not None:
            if standing.members == tuple(members) and not standing.broken.is_set():
                return standing
            standing.fail("the fleet has changed")
        self._number += 1
        channel = self._channel(carrier, self._number, 1 + len(members))
        self._standing[carrier] = Group(self._number, members, channel)
        return self._standing[carrier]

    def leave(self, generation: int) -> None:
        """It is out."""
        for group in self._standing.values():
            if generation in group.members:
                group.fail("a member of the group is out")

    def close(self) -> None:
        """End all; idempotent, never waits."""
        for group in self._standing.values():
            group.fail("the weight coordinator closes")


class Assembly:
    """The members of one version that can take it in one group."""

    def __init__(self, groups: Groups, carrier: str, members: Iterable[int]) -> None:
        self.carrier = carrier
        self._groups = groups
        self._expected = set(members)
        self._came: set[int] = set()
        self._next: asyncio.Future[Group | None] | None = None
        self._formed = 0
        self._left = 0

    def expects(self, generation: int) -> bool:
        """Whether it is a member, and has not all of it yet."""
        return generation in self._expected

    async def join(self, generation: int) -> Group | None:
        """The group of all that are still expected, once they have come; None: take the version alone."""
        self._came.add(generation)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        formed = self._next
        self._settle()
        return await asyncio.shield(formed)

    def done(self, generation: int) -> None:
        """It has all of the version, or takes the rest alone."""
        self._expected.discard(generation)
        self._came.discard(generation)
        self._settle()

    def leave(self, generation: int) -> None:
        """It is out."""
        self._left += generation in self._expected
        self.done(generation)

    def _settle(self) -> None:
        if self._next is None or not self._came or self._came != self._expected:
            return
        members, self._came = frozenset(self._came), set()
        formed, self._next = self._next, None
        formed.set_result(self._form(members))

    def _form(self, members: frozenset[int]) -> Group | None:
        self._formed += 1
        hopeless = self._groups.hopeless
        if self._formed - self._left > _MOST_FAILED:
            hopeless[self.carrier] = members
            logger.warning(
                "%d replicas cannot be one group: each gets its weights alone", len(members)
            )
        if hopeless.get(self.carrier) == members or self._groups.newest[self.carrier] is not self:
            return None
        return self._groups.form(self.carrier, sorted(members))


class Member:
    """One replica in a group: what all members lack goes to all of them, once."""

    def __init__(self, group: Group, assembly: Assembly, generation: int) -> None:
        self.group = group
        self._assembly = assembly
        self._generation = generation

    async def while_in(self, work: Awaitable[_T]) -> _T:
        """The result of `work`. Raises GroupError as soon as the group has failed."""
        try:
            return await unless(self.group.broken, work, "the group has failed")
        except MeshError as error:
            if self.group.broken.is_set():
                raise GroupError(self.group.reason) from error
            raise

    async def plan(self, missing: Sequence[int]) -> Sequence[int]:
        """The buckets that some member lacks. Raises GroupError."""

        async def union(all_missing: list[Sequence[int]]) -> list[int]:
            return sorted(set().union(*all_missing))

        return await self.group.meet(missing, union)

    async def send(self, source: WeightSource, index: int) -> None:
        """One bucket, once all members have come for it. Raises GroupError."""
        await self.group.meet(index, lambda _: self.group.send(source, index))

    def done(self) -> None:
        """This member has all of the version."""
        self._assembly.done(self._generation)

    def leave(self) -> None:
        """This member is in it no more."""
        self.group.fail("a member has left the group")
