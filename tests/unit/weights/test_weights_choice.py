from __future__ import annotations

import asyncio
import json
import resource
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshrl.cli.commands.status import _weights_line
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptError,
    UserError,
)
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.weights.carrier import Link, RunPaths, host_id
from meshrl.weights.carriers import auto, shm
from meshrl.weights.carriers.shm import ShmReader
from meshrl.weights.fleet import ReplicaState, ReplicaView
from meshrl.weights.messages import Peer, SourceError
from meshrl.weights.shared_memory import FOLDER, Offer, Probe, SharedMemory, boot_id
from meshrl.weights.transport import (
    Delivery,
    Pairs,
    ReceivePlan,
    Transport,
    check_reached,
    load_carrier,
    load_transport,
)
from tests.doubles.weights import GatheredStub, StubSource
from tests.simulation.weight_fleet import WireCarrier, WireGroups, Wires

HERE, AWAY = host_id(), "elsewhere"
EVERYTHING = ("shm", "nccl", "disk", "gloo")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has whatever a carrier needs."""
    monkeypatch.setattr("meshrl.config.weights.runs_here", lambda carrier: True)


class OnThisHost(WireCarrier):
    """As `shm`, where it does not count bytes."""

    def reaches(self, peer: Peer) -> bool:
        return peer.shares_memory and super().reaches(peer)


class Worker:
    """A delivery's target, as far as the choice of a carrier looks at it."""

    def __init__(self, host: str, *carriers: str, generation: int = 1) -> None:
        self.peer = Peer(name="worker", host=host, carriers=carriers)
        self.link = Link(run="r", epoch=1, generation=generation, endpoint="", rank=0)


def simulated(*failing: str, directory: str = "") -> auto.Carrier:
    """Carrier `auto` of a trainer whose carriers move nothing; those in `failing` have no room for a version."""

    def load(config: WeightsConfig, paths: RunPaths) -> Pairs:
        wires, carrier = Wires(), config.carrier
        kind = {"shm": OnThisHost, "nccl": WireGroups}.get(carrier, WireCarrier)
        made: Pairs = kind(config, wires)
        if carrier in failing:

            async def stage(source: WeightSource) -> None:
                raise CapacityError("no room")

            made.stage = stage  # type: ignore[method-assign]
        return made

    config = WeightsConfig(carrier="auto", directory=directory)
    return auto.Carrier(config, RunPaths(directory=Path()), load)


async def chosen(transport: Transport, worker: Worker, source: WeightSource) -> Delivery:
    (delivery,) = await transport.send(source, [worker])  # type: ignore[list-item]
    return delivery


@pytest.mark.parametrize(
    ("host", "offers", "directory", "carrier"),
    [
        (HERE, EVERYTHING, "", "shm"),
        (HERE, EVERYTHING, "s3://bucket/weights", "shm"),
        (AWAY, EVERYTHING, "", "nccl"),
        (AWAY, EVERYTHING, "s3://bucket/weights", "nccl"),
        (AWAY, ("shm", "gloo"), "", "gloo"),
        (AWAY, ("shm", "disk"), "s3://bucket/weights", "disk"),
        ("", ("shm", "gloo"), "", "gloo"),
    ],
)
@pytest.mark.usefixtures("gpus")
async def test_auto_goes_by_the_host_the_gpus_and_the_directory(
    host: str, offers: tuple[str, ...], directory: str, carrier: str
) -> None:
    transport = simulated(directory=directory)
    await transport.start()
    delivery = await chosen(transport, Worker(host, *offers), StubSource("r", Version(1, 0)))
    assert delivery.carrier == carrier
    await transport.close()


async def test_a_carrier_that_cannot_bring_a_version_is_left_for_the_next_one_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = simulated("shm")
    await transport.start()
    worker = Worker(HERE, "shm", "gloo")
    for step in range(3):
        delivery = await chosen(transport, worker, StubSource("r", Version(1, step)))
        assert delivery.carrier == "gloo"
    assert caplog.messages == ["weights go by shm no more: no room"]
    await transport.close()
    transport = simulated("shm", "gloo")
    await transport.start()
    with pytest.raises(CapacityError, match="no room"):
        await chosen(transport, worker, StubSource("r", Version(1, 0)))


async def test_auto_sends_a_version_to_each_by_its_own_carrier_in_their_order() -> None:
    transport = simulated()
    await transport.start()
    hosts = (HERE, AWAY, HERE, AWAY)
    workers = [
        Worker(host, "shm", "gloo", generation=number) for number, host in enumerate(hosts, 1)
    ]
    source = StubSource("r", Version(1, 0))
    deliveries = await transport.send(source, workers)  # type: ignore[arg-type]
    assert [each.carrier for each in deliveries] == ["shm", "gloo", "shm", "gloo"]
    await transport.close()


async def test_auto_offers_what_this_process_can_run() -> None:
    config = WeightsConfig(carrier="auto")
    assert config.offered == ("shm", "gloo")  # no GPU here
    assert WeightsConfig(carrier="auto", directory="s3://b/w").offered == ("shm", "disk")
    assert WeightsConfig(carrier="disk").offered == ("disk",)
    paths = RunPaths(directory=Path())
    link = Link(run="r", epoch=1, generation=1, endpoint="", rank=1)
    plan = ReceivePlan(carrier="disk", link=link, arrival=None)  # type: ignore[arg-type]
    with pytest.raises(ConflictError, match="'disk': this process offers shm, gloo"):
        await load_transport(config, paths).receive(plan)
    with pytest.raises(ConflictError, match="'disk': this process offers shm"):
        await load_transport(WeightsConfig(carrier="shm"), paths).receive(plan)


def test_a_replica_that_nothing_reaches_is_refused_with_the_reason(tmp_path: Path) -> None:
    transport = load_transport(WeightsConfig(carrier="shm"), RunPaths(directory=tmp_path))
    check_reached(transport, Peer(name="near", host=host_id(), carriers=("shm",)))
    with pytest.raises(
        UserError, match=r"no carrier of weights reaches far.*it is on another host"
    ):
        check_reached(transport, Peer(name="far", host="elsewhere", carriers=("shm",)))
    with pytest.raises(UserError, match="the trainer can shm, it can gloo"):
        check_reached(transport, Peer(name="near", host=host_id(), carriers=("gloo",)))


async def test_a_gather_that_fails_is_no_fault_of_the_carrier_that_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = WeightsConfig(carrier="auto", directory=str(tmp_path / "store"))
    transport = load_transport(config, RunPaths(directory=tmp_path))
    await transport.start()
    far = Worker(AWAY, "disk")
    source = GatheredStub("r", Version(1, 0))
    sending = asyncio.create_task(chosen(transport, far, source))
    source.come(0)
    await asyncio.sleep(0)
    source.fail(RuntimeError("rank 1 has died"))
    with pytest.raises(SourceError, match="rank 1 has died"):
        await sending
    delivery = await chosen(transport, far, StubSource("r", Version(1, 1)))
    assert delivery.carrier == "disk"
    assert not caplog.messages
    await transport.close()


async def test_shared_memory_lends_each_bucket_uncopied_and_keeps_two_versions(
    tmp_path: Path,
) -> None:
    carrier = load_carrier(WeightsConfig(carrier="shm"), RunPaths(directory=tmp_path))
    link = Link(run="a/b c", epoch=1, generation=1, endpoint=await carrier.listen(), rank=1)
    channel, writer = carrier.channel(link), carrier.channel(replace(link, rank=0))
    await channel.open(1.0)
    into = np.zeros(1 << 16, dtype=np.uint8)
    sources = [StubSource("a/b c", Version(1, step), buckets=3) for step in range(3)]
    lent = []
    for source in sources:
        await carrier.stage(source)
        await writer.send(source.manifest, 2, source.bucket(2))
        lent.append(await channel.receive(source.manifest, 2, into))
    for source, bucket in zip(sources, lent, strict=True):
        assert bucket is not None
        assert bucket.flags.writeable and not bucket.flags.owndata
        assert np.array_equal(bucket, source.bucket(2)), "unlinked, and still whole"
    assert not into.any()
    with pytest.raises(CorruptError, match=r"1\.0\.weights: No such file"):
        await channel.receive(sources[0].manifest, 1, into)
    lent[2][:] = 0  # the engine's own business: nobody else sees it
    again = await channel.receive(sources[2].manifest, 2, into)
    assert np.array_equal(again, sources[2].bucket(2))
    await channel.close()
    await carrier.close()


async def test_shared_memory_refuses_a_replica_of_another_host_in_one_line(tmp_path: Path) -> None:
    carrier = load_carrier(WeightsConfig(carrier="shm"), RunPaths(directory=tmp_path))
    offer = json.loads(await carrier.listen())
    link = Link(run="r", epoch=1, generation=1, endpoint="", rank=1)
    for change, why in (
        ({"boot": "b00t"}, f"boot id is {boot_id()}, the trainer's b00t"),
        ({"probe": "meshrl-0123456789abcdef.arena"}, "another container or another user"),
    ):
        channel = carrier.channel(replace(link, endpoint=json.dumps(offer | change)))
        with pytest.raises(ConfigError, match=why) as refused:
            await channel.open(1.0)
        assert "\n" not in str(refused.value)
    await carrier.close()


async def test_a_full_shared_memory_is_one_line(tmp_path: Path) -> None:
    carrier = load_carrier(WeightsConfig(carrier="shm"), RunPaths(directory=tmp_path))
    await carrier.listen()
    source = StubSource("full", Version(1, 0))  # in memory of its own, which the limit is not for
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(CapacityError, match="no room for 262144 bytes of weights in /dev/shm"):
            await carrier.stage(source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(Path("/dev/shm").glob("*-full-1.0.weights")) == []  # noqa: ASYNC240
    await carrier.close()


def test_status_says_how_a_replica_gets_its_weights_or_why_it_does_not() -> None:
    view = ReplicaView(
        name="rollout-0",
        state=ReplicaState.SERVING,
        generation=3,
        version=Version(1, 4),
        last_sync_s=0.31,
        pause_s=0.004,
        reason="",
        carrier="shm",
    )
    assert _weights_line(view) == "weights: serving (by shm, 0.31 s, paused 0.00 s)"
    out = replace(view, state=ReplicaState.OUT, reason="it died or went away")
    assert _weights_line(out).startswith("weights: out: it died or went away (by shm")
    assert (
        _weights_line(replace(view, state=ReplicaState.JOINING, carrier="")) == "weights: joining"
    )


async def test_shared_memory_brings_a_version_that_is_older_than_the_kept_ones(
    tmp_path: Path,
) -> None:
    carrier = load_carrier(WeightsConfig(carrier="shm"), RunPaths(directory=tmp_path))
    link = Link(run="old", epoch=1, generation=1, endpoint=await carrier.listen(), rank=0)
    writer, reader = carrier.channel(link), carrier.channel(replace(link, rank=1))
    await reader.open(1.0)
    sources = [StubSource("old", Version(1, step), buckets=3) for step in range(4)]
    for source in sources:
        await carrier.stage(source)
    oldest, *_, newest = sources
    await writer.send(newest.manifest, 0, newest.bucket(0))
    into = np.zeros(1 << 16, dtype=np.uint8)
    for index in range(3):
        await writer.send(oldest.manifest, index, oldest.bucket(index))
    got = [await reader.receive(oldest.manifest, index, into) for index in range(3)]
    assert all(
        np.array_equal(each, oldest.bucket(i)) for i, each in enumerate(got) if each is not None
    )
    lent = await reader.receive(newest.manifest, 0, into)
    assert lent is not None and np.array_equal(lent, newest.bucket(0))
    await carrier.stage(StubSource("old", Version(1, 4), buckets=3))
    left = sorted(path.name.rpartition("-")[2] for path in Path("/dev/shm").glob("*-old-1.*"))  # noqa: ASYNC240
    assert left == ["1.3.weights", "1.4.weights"]
    await carrier.close()


async def test_shared_memory_closes_no_file_while_it_is_written(tmp_path: Path) -> None:
    writing, may_go_on = threading.Event(), threading.Event()

    class Slow(SharedMemory):
        def write(self, descriptor: int, at: int, content: memoryview) -> None:
            if len(content) > 1:  # no probe
                writing.set()
                may_go_on.wait(60)
            super().write(descriptor, at, content)

    paths = RunPaths(directory=tmp_path)
    carrier = shm.Carrier(WeightsConfig(carrier="shm"), paths, memory=Slow())
    link = Link(run="slow", epoch=1, generation=1, endpoint=await carrier.listen(), rank=0)
    source = StubSource("slow", Version(1, 0))
    await carrier.stage(source)
    send = carrier.channel(link).send(source.manifest, 0, source.bucket(0))
    sending = asyncio.create_task(send)
    await asyncio.to_thread(writing.wait, 60)
    await carrier.close()
    may_go_on.set()
    await sending
    assert list(Path("/dev/shm").glob("*-slow-1.0.weights")) == []  # noqa: ASYNC240


def test_a_probe_is_reachable_only_in_the_same_folder_under_the_same_kernel(tmp_path: Path) -> None:
    host = SharedMemory()
    probe = Probe(host)
    offer = probe.offer
    assert offer.is_reachable(host)
    assert not offer.is_reachable(SharedMemory(tmp_path))
    assert not Offer("another boot", offer.name).is_reachable(host)
    assert not Offer(offer.boot_id, f"meshrl-{'0' * 16}.arena").is_reachable(host)
    probe.close()
    probe.close()
    assert not offer.is_reachable(host)


@pytest.mark.parametrize("name", ["../etc/passwd", "meshrl-x.arena", "/dev/shm/x", ""])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="not the name of a probe file"):
        Offer(boot_id(), name).is_reachable(SharedMemory())


def test_only_files_without_a_living_owner_are_swept(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    probe = Probe(memory)
    (tmp_path / "meshrl-0123456789abcdef.arena").write_bytes(b"left by a dead process")
    assert memory.sweep("meshrl-*.arena") == ["meshrl-0123456789abcdef.arena"]
    assert names(tmp_path) == [probe.offer.name]
    probe.close()


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_replica_deletes_the_probe_of_a_dead_trainer(tmp_path: Path) -> None:
    """Its successor may have nothing to train, and then makes no probe of its own."""
    memory = SharedMemory(tmp_path)
    alive = Probe(memory)
    (tmp_path / "meshrl-0123456789abcdef.arena").write_bytes(b"\0")
    await ShmReader(Link(run="run", epoch=1, generation=1, endpoint="", rank=1), memory).close()
    assert names(tmp_path) == [alive.offer.name]
    alive.close()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"no shared memory in .*nowhere"):
        Probe(SharedMemory(tmp_path / "nowhere"))
    assert FOLDER.is_dir()
