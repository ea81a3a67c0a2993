"""A weight plane of simulated processes in virtual time, whose carrier counts bytes and can be struck at any bucket.

Coordinator, replica controllers and sessions are the product's. A process that is killed runs nothing more,
and its channels break; one that is stopped is silent, and its channels hang until their own deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.carrier import Channel, Link
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.fleet import ReplicaState
from meshrl.weights.groups import Groups
from meshrl.weights.replica_controller import ReplicaController, ServedEngine
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.transport import Pairs
from tests.doubles.weights import HashSink, StubSource
from tests.simulation.call import connect
from tests.simulation.host import this_process
from tests.simulation.loop import Process, SimulatedLoop, spawn
from tests.simulation.network import Delays, Network
from tests.simulation.virtual_loop import quiet

RUN = "simulated"
CHANNELS, GROUP = "wires", "group"
"""Names of carriers: with a channel to each replica, or one to all."""
KINDS = pytest.mark.parametrize("carrier", [CHANNELS, GROUP])
TRAINER = "trainer:1"
BUCKETS, BUCKET_BYTES = 4, 1 << 10
WHOLE = BUCKETS * BUCKET_BYTES
BUCKET_S, STEP_S = 0.2, 0.1
FOR_EVER_S = 1e6
Source = TypeVar("Source", bound=StubSource)
Strike = Callable[[str, str, int], object]
"""Called with sender, receiver and bucket when a bucket is about to cross a channel."""


def times(carrier: str, replicas: int) -> int:
    """How often a version leaves the trainer for so many replicas."""
    return replicas if carrier == CHANNELS else 1


class Wires:
    """All channels of a fleet."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes that left each process."""
        self.opened: list[tuple[str, str]] = []
        self.stopped: set[Process] = set()
        self.cut_groups = False
        """Whether no channel of more than two ends opens."""
        self.on_bucket: Strike = lambda sender, receiver, index: None
        self.spoil: Callable[[str, str, int], bool] = lambda sender, receiver, index: False
        self.edges: dict[str, _Edge] = {}


class _Edge:
    def __init__(self) -> None:
        self.ends: dict[int, Process] = {}
        self.closed = False
        self.offered: tuple[int, Uint8] | None = None
        self.wanting: set[int] = set()
        """Ranks that have not taken what is offered."""


class WireCarrier(Pairs):
    """One process's carrier."""

    def __init__(self, config: WeightsConfig, wires: Wires) -> None:
        super().__init__(config)
        self._wires = wires

    @override
    async def listen(self) -> str:
        return "wires"

    @override
    def channel(self, link: Link) -> Channel:
        return WireChannel(self.config, self._wires, link)


class WireGroups(Groups):
    """One channel to all replicas instead of one to each."""

    def __init__(self, config: WeightsConfig, wires: Wires) -> None:
        super().__init__(config)
        self._wires = wires

    listen = WireCarrier.listen
    channel = WireCarrier.channel


class WireChannel(Channel):
    """One end."""

    def __init__(self, config: WeightsConfig, wires: Wires, link: Link) -> None:
        self.config, self._wires, self._link = config, wires, link
        self._edge = wires.edges.setdefault(link.prefix, _Edge())
        self._edge.ends[link.rank] = this_process()

    async def open(self, deadline_s: float) -> None:
        size = self._link.size
        await self._until(lambda: len(self._edge.ends) == size and not self._is_cut, deadline_s)
        if self._link.rank == 0:
            self._wires.opened.append(self._names)

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        self._wires.on_bucket(*self._names, index)
        await asyncio.sleep(BUCKET_S)
        if self._wires.spoil(*self._names, index):
            bucket = bucket.copy()
            bucket[3] ^= 1
        self._edge.offered = index, bucket
        self._edge.wanting = set(range(1, self._link.size))
        await self._until(lambda: not self._edge.wanting, self.config.deadline_s(len(bucket)))
        self._wires.sent[self._names[0]] += bucket.nbytes

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        await self._until(
            lambda: self._link.rank in self._edge.wanting, self.config.deadline_s(into.nbytes)
        )
        assert self._edge.offered is not None
        found, bucket = self._edge.offered
        assert found == index
        into[:] = bucket
        self._edge.wanting.discard(self._link.rank)

    def abort(self) -> None:
        self._edge.closed = True

    @property
    def _names(self) -> tuple[str, str]:
        return self._edge.ends[0].name, self._edge.ends[1].name

    @property
    def _is_cut(self) -> bool:
        return self._link.size > 2 and self._wires.cut_groups

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        ends = self._edge.ends
        for _ in range(round(deadline_s / STEP_S)):
            if self._edge.closed or any(end.dead for end in ends.values()):
                break
            if not self._wires.stopped & set(ends.values()) and condition():
                return
            await asyncio.sleep(STEP_S)
        raise UnavailableError(f"channel {self._link.prefix}, rank {self._link.rank}")


class SimulatedFleet:
    """A trainer and replicas, each a simulated process."""

    def __init__(self, loop: SimulatedLoop, **options: object) -> None:
        self.wires = Wires()
        self.network = Network(loop, 0, Delays(slow_share=0.0))
        self.config = WeightsConfig.model_validate({"carrier": CHANNELS, **options})
        self.published: list[Version] = []
        self.processes: dict[str, Process] = {}
        self.engines: dict[str, HashSink] = {}
        self.steps = 0
        self.longest_publish_s = 0.0
        self._loop = loop

    def carrier(self) -> Pairs:
        """The carrier of the process that runs."""
        kind = WireGroups if self.config.carrier == GROUP else WireCarrier
        return kind(self.config, self.wires)

    async def start(self, *names: str) -> None:
        """A trainer, then these replicas, in this order."""
        process = self.processes["trainer"] = Process("trainer")
        await spawn(self._loop, process, self._trainer(), "trainer")
        for name in names:
            self.join(name)
            await self.until(partial(self._knows, name))

    def _knows(self, name: str) -> bool:
        return self.state(name) is not None

    async def _trainer(self) -> None:
        async def on_committed(version: Version) -> None:
            self.published.append(version)

        self.coordinator = WeightCoordinator(
            self.config,
            run=RUN,
            epoch=1,
            transport=self.carrier(),
            on_committed=on_committed,
        )
        await self.coordinator.start()
        self.network.listen(TRAINER, [WeightsServicer(self.coordinator)])

    def join(self, name: str) -> None:
        process = self.processes[name] = Process(name)
        self.engines[name] = HashSink()
        spawn(self._loop, process, self._replica(name), name)

    async def _replica(self, name: str) -> None:
        controller = ReplicaController(
            self.config,
            run=RUN,
            replica=name,
            engine=ServedEngine(self.engines[name], self.config),
            transport=self.carrier(),
            connect=partial(connect, self.network, TRAINER),
        )
        await controller.run()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.network.reset(name)

    def stop(self, name: str) -> None:
        self.wires.stopped.add(self.processes[name])
        self.network.hide(self.processes[name], FOR_EVER_S)

    def resume(self, name: str) -> None:
        self.wires.stopped.discard(self.processes[name])
        self.network._hidden.clear()
        self.network._silent_until = 0.0

    def source(self, kind: Callable[..., Source] = StubSource) -> Source:  # type: ignore[assignment]
        """The next version."""
        self.steps += 1
        version = Version(1, self.steps - 1)
        return kind(RUN, version, buckets=BUCKETS, bucket_bytes=BUCKET_BYTES)

    async def publish(self, source: StubSource | None = None) -> StubSource:
        """The next version, handed over: what the trainer waits for is noted."""
        source = source or self.source()
        began = self._loop.time()
        await spawn(
            self._loop, self.processes["trainer"], self.coordinator.publish(source), "publish"
        )
        self.longest_publish_s = max(self.longest_publish_s, self._loop.time() - began)
        return source

    async def carry(self, *names: str) -> StubSource:
        """The next version, until it is committed and these serve it."""
        source = await self.publish()
        await self.serve(source, *names)
        return source

    async def serve(self, source: StubSource, *names: str) -> None:
        """Return once a version that was published is committed, and these serve it."""
        version = source.manifest.version
        await self.until(lambda: version in self.published)
        for name in names:
            engine = self.engines[name]
            await self.until(lambda engine=engine: engine.version == version)  # type: ignore[misc]
            assert self.engines[name].hashes == source.manifest.bucket_hashes

    async def pass_time(self, seconds: float) -> None:
        """Sleep on the virtual clock."""
        await asyncio.sleep(seconds)

    @property
    def now(self) -> float:
        return self._loop.time()

    def state(self, name: str) -> ReplicaState | None:
        return next((v.state for v in self.coordinator.fleet().replicas if v.name == name), None)

    async def until(self, condition: Callable[[], bool], within_s: float = 200.0) -> None:
        for _ in range(round(within_s / STEP_S)):
            if condition():
                return
            await asyncio.sleep(STEP_S)
        raise AssertionError(f"not within {within_s} s: {self.coordinator.fleet()}")


def in_simulation(
    test: Callable[[SimulatedFleet], Coroutine[Any, Any, None]], **options: object
) -> None:
    """Run `test` with a fleet in virtual time."""
    with quiet():
        loop = SimulatedLoop(0)
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(loop.create_task(test(SimulatedFleet(loop, **options))))
        finally:
            asyncio.set_event_loop(None)
            loop.close()
