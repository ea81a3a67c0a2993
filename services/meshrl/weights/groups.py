"""One channel to all replicas that take a version: each bucket is sent into it once, however many they are.

    Groups         the transport: which channel is open, kept from version to version while its members do
    Assembly       who of a version's members is in it; forms the group, and forms it again without those that are out
    SharedChannel  rank 0 here, one rank beside each engine; what all members have come for happens once
    SharedWay      the way to one replica through its group

Consumes members that come and go. Waits for all that are expected, each of which comes or is out by a deadline of
its own. Unblocked by the end of any of them. A group that fails ends no member: verified buckets stay,
and the next one sends the rest. A replica that joins has a channel of its own until the next version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from typing_extensions import override

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import InfraError, MeshError, WaitTimeoutError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Channel, Link
from meshrl.weights.messages import Receiver
from meshrl.weights.transport import Delivery, GroupError, Pairs, Step, Way
from meshrl.weights.waiting import unless

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_MOST_FAILED = 2
"""Groups of one version that may fail while no member is out; then each member has a channel of its own."""


class SharedChannel:
    """The trainer's end of one channel, and what its members do together."""

    def __init__(self, number: int, members: Sequence[int], channel: Channel) -> None:
        """`members` are generations; each one's rank is its place, from 1 on."""
        self.number = number
        self.members = tuple(members)
        self.broken = asyncio.Event()
        self.reason = ""
        self._channel = channel
        self._opening: asyncio.Task[None] | None = None
        self._brought: list[Any] = []
        """Values of the members that wait in the current `meet`."""
        self._result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Result of that `meet`, for all members."""
        self._work: asyncio.Task[None] | None = None

    def open(self, deadline_s: float) -> None:
        """Begin to open this end, once; the group breaks if that fails. Never waits."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(deadline_s), name="weight-group-open")

    async def meet(self, value: object, then: Callable[[list[Any]], Awaitable[_T]]) -> _T:
        """Await all members; returns the result of `then` over the values of all. Raises GroupError."""
        self._brought.append(value)
        result: asyncio.Future[_T] = self._result
        if len(self._brought) == len(self.members):
            work = self._conclude(then(self._brought), result)
            self._brought, self._result = [], asyncio.get_running_loop().create_future()
            self._work = asyncio.create_task(work, name="weight-group")
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

    @staticmethod
    async def _conclude(work: Awaitable[_T], result: asyncio.Future[_T]) -> None:
        try:
            result.set_result(await work)
        except Exception as error:
            known = error if isinstance(error, MeshError) else InfraError(repr(error))
            result.set_exception(known)
            result.exception()  # looked at: all may have gone

    async def _open(self, deadline_s: float) -> None:
        try:
            await self._channel.open(deadline_s)
        except Exception as error:  # whatever it is, the members learn of it here only
            self.fail(str(error) if isinstance(error, MeshError) else repr(error))


class Groups(Pairs):
    """The base of a carrier whose channels may have more than two ends: rank 0 sends each bucket once, to all."""

    def __init__(self, config: WeightsConfig) -> None:
        super().__init__(config)
        self.newest: Assembly | None = None
        self.hopeless: frozenset[int] = frozenset()
        """Members that could not be one group."""
        self._assembled: Version | None = None
        self._standing: SharedChannel | None = None
        self._number = 0
        self._assemblies: dict[int, Assembly] = {}
        """The last one that each replica is in, by generation."""
        self.members: dict[int, SharedWay] = {}
        """Each replica that is in a group, by generation; kept from version to version."""

    @override
    async def send(self, source: WeightSource, receivers: Sequence[Receiver]) -> Sequence[Delivery]:
        await self.prepare(source)
        version, assembly = source.manifest.version, None
        if self._assembled is None or version > self._assembled:
            self._assembled = version
            links = {receiver.link.generation: receiver.link for receiver in receivers}
            assembly = self.newest = Assembly(self, links)
            self._assemblies.update(dict.fromkeys(links, assembly))
        return [GroupDelivery(self, source, each, assembly) for each in receivers]

    def form(self, links: Sequence[Link]) -> SharedChannel:
        """The open group if it is of these, else a new one."""
        members = tuple(link.generation for link in links)
        standing = self._standing
        if standing is not None:
            if standing.members == members and not standing.broken.is_set():
                return standing
            standing.fail("the fleet has changed")
        self._number += 1
        link = replace(
            links[0],
            endpoint=self.endpoint,
            generation=0,
            rank=0,
            group=self._number,
            size=1 + len(links),
        )
        self._standing = SharedChannel(self._number, members, self.channel(link))
        return self._standing

    @override
    def leave(self, receiver: Receiver) -> None:
        generation = receiver.link.generation
        if (assembly := self._assemblies.pop(generation, None)) is not None:
            assembly.leave(generation)
        self.members.pop(generation, None)
        super().leave(receiver)
        if self._standing is not None and generation in self._standing.members:
            self._standing.fail("a member of the group is out")

    @override
    async def close(self) -> None:
        if self._standing is not None:
            self._standing.fail("the weight coordinator closes")


class Assembly:
    """The members of one version that can take it in one group."""

    def __init__(self, groups: Groups, links: Mapping[int, Link]) -> None:
        self._groups = groups
        self._links = links
        self._expected = set(links)
        self._came: set[int] = set()
        self._next: asyncio.Future[SharedChannel | None] | None = None
        self._formed = 0
        self._left = 0

    def expects(self, generation: int) -> bool:
        """Whether it is a member, and has not all of it yet."""
        return generation in self._expected

    async def join(self, generation: int) -> SharedChannel | None:
        """The group of all that are still expected, once they have come; None: take the version alone."""
        self._came.add(generation)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        formed = self._next
        self._settle()
        return await asyncio.shield(formed)

    def done(self, generation: int) -> None:
        """Expect it no more: it has the whole version, or takes the rest alone."""
        self._expected.discard(generation)
        self._came.discard(generation)
        self._settle()

    def leave(self, generation: int) -> None:
        """Remove it from the group."""
        self._left += generation in self._expected
        self.done(generation)

    def _settle(self) -> None:
        if self._next is None or not self._came or self._came != self._expected:
            return
        members, self._came = frozenset(self._came), set()
        formed, self._next = self._next, None
        formed.set_result(self._form(members))

    def _form(self, members: frozenset[int]) -> SharedChannel | None:
        self._formed += 1
        groups = self._groups
        if self._formed - self._left > _MOST_FAILED:
            groups.hopeless = members
            logger.warning(
                "%d replicas cannot be one group: each gets its weights alone", len(members)
            )
        if groups.hopeless == members or groups.newest is not self:
            return None
        return groups.form([self._links[generation] for generation in sorted(members)])


class SharedWay(Way):
    """The way to one replica in a group: what all members lack goes to all of them, once."""

    tries = 1

    def __init__(self, groups: Groups, group: SharedChannel, link: Link) -> None:
        super().__init__(groups, link)
        self.group = group

    @override
    def describe(self, proposal: pb.PlanePropose) -> None:
        group = self.group
        proposal.group, proposal.size = group.number, 1 + len(group.members)
        proposal.rank = 1 + group.members.index(self.link.generation)

    @override
    async def open(self, ready: Step) -> None:
        self.pairs.give_up_channel(self.link.generation)  # of before it was a member
        self.group.open(self.pairs.config.ready_s)
        await ready()

    @override
    async def while_open(self, work: Awaitable[_T]) -> _T:
        try:
            return await unless(self.group.broken, work, "the group has failed")
        except MeshError as error:
            if self.group.broken.is_set():
                raise GroupError(self.group.reason) from error
            raise

    @override
    async def plan(self, missing: Sequence[int]) -> Sequence[int]:
        async def union(all_missing: list[Sequence[int]]) -> list[int]:
            return sorted(set().union(*all_missing))

        return await self.group.meet(missing, union)

    @override
    async def send(self, source: WeightSource, index: int, announce: Step) -> None:
        await announce()
        await self.group.meet(index, lambda _: self.group.send(source, index))

    def leave(self) -> None:
        """Leave the group."""
        self.group.fail("a member has left the group")


class GroupDelivery(Delivery):
    """A version on its way to one replica, in a group while there is one to be in."""

    def __init__(
        self,
        groups: Groups,
        source: WeightSource,
        receiver: Receiver,
        assembly: Assembly | None,
    ) -> None:
        super().__init__(groups, source, receiver)
        self._groups = groups
        self._assembly = assembly

    @property
    def _member(self) -> SharedWay | None:
        return self._groups.members.get(self._generation)

    @override
    async def propose(self) -> None:
        if self._assembly is None:
            self._end_membership()
        else:
            await self._join(self._assembly)
        await self._propose_somehow()

    @override
    async def transfer(self) -> None:
        while True:
            try:
                await super().transfer()
                break
            except GroupError as error:
                await self._leave_group(error)
                await self._propose_somehow()
        if self._member is not None and self._assembly is not None:
            self._assembly.done(self._generation)

    @override
    def skip(self) -> None:
        if self._assembly is not None:
            self._assembly.leave(self._generation)
        self._end_membership()

    async def _propose_somehow(self) -> None:
        """Propose through the group's channel while this replica is in a group, else through its own."""
        while (member := self._member) is not None:
            try:
                await self._propose(member)
            except GroupError as error:
                await self._leave_group(error)
            else:
                return
        await self._propose(Way(self._groups, self._receiver.link))

    async def _join(self, assembly: Assembly) -> None:
        """Be in the group of this version, if there is one to be in."""
        group = await assembly.join(self._generation)
        if group is None:
            assembly.done(self._generation)
            self._groups.members.pop(self._generation, None)
        else:
            member = SharedWay(self._groups, group, self._receiver.link)
            self._groups.members[self._generation] = member

    async def _leave_group(self, error: GroupError) -> None:
        """Wait for the next group with the version, or for this replica's own channel."""
        version = self.source.manifest.version
        logger.info("%s gets weights %s otherwise: %s", self._name, version, error)
        self._end_membership()
        if self._assembly is not None and self._assembly.expects(self._generation):
            await self._join(self._assembly)

    def _end_membership(self) -> None:
        if (member := self._groups.members.pop(self._generation, None)) is not None:
            member.leave()

    @override
    async def _progressing(self, work: Awaitable[_T], deadline_s: float, what: str) -> _T:
        """The result of `work` within the deadline.

        Raises:
            GroupError: another member may be the cause that nothing came.
            WaitTimeoutError: nothing came, by this replica's fault.
        """
        try:
            return await self._way.while_open(super()._progressing(work, deadline_s, what))
        except WaitTimeoutError as error:
            if self._member is None or self._receiver.stream.quiet_s > deadline_s / 2:
                raise
            raise GroupError(str(error)) from error
        except GroupError as error:
            if self._receiver.stream.quiet_s > deadline_s / 2:
                raise WaitTimeoutError(f"{self._name}: {what}: silent in a group") from error
            raise
