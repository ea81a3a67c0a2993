from __future__ import annotations

import asyncio
import functools
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
from meshrl.contract.types import Version
from meshrl.weights.carrier import (
    Carriers,
    Link,
    RunPaths,
    carrier_facts,
    host_id,
    load_carrier,
    offered,
)
from meshrl.weights.carriers import shm
from meshrl.weights.carriers.auto import EXPLORE_EVERY, EXPLORE_SHARE, CostModel
from meshrl.weights.fleet import ReplicaState, ReplicaView
from meshrl.weights.gathering import SourceError
from meshrl.weights.routes import Peer, Routes, density
from meshrl.weights.shared_memory import SharedMemory, boot_id
from tests.doubles.weights import GatheredStub, StubSource

from ...simulation.virtual_time import in_virtual_time
from .simulated_fleet import WireCarrier, Wires

WORK = 1e6
STATED = {"fast": 4e9, "slow": 1e9, "sparse": 1e9}


def seconds_of(
    chooser: CostModel, rates: dict[str, float], versions: int
) -> tuple[float, list[str]]:
    """What `versions` take when the carriers move bytes at `rates`."""
    total, used = 0.0, []
    for _ in range(versions):
        name = chooser.choose("here", dict.fromkeys(rates, WORK), STATED)
        seconds = WORK / rates[name]
        chooser.observe("here", name, WORK, seconds)
        total += seconds
        used.append(name)
    return total, used


def test_the_carrier_that_states_the_higher_rate_comes_first() -> None:
    assert CostModel().choose("here", {"slow": WORK, "fast": WORK}, STATED) == "fast"


@pytest.mark.parametrize("truth", [{"fast": 1e8, "slow": 2e7}, {"fast": 1e8, "slow": 9e8}])
def test_auto_stays_within_a_tenth_of_the_best_fixed_carrier(truth: dict[str, float]) -> None:
    best = 400 * WORK / max(truth.values())
    total, used = seconds_of(CostModel(), truth, 400)
    found_late = used.count("fast") * (WORK / truth["fast"] - WORK / max(truth.values()))
    assert total - found_late <= 1.1 * best
    assert used[-1] == max(truth, key=lambda name: truth[name])


def test_a_carrier_that_states_too_little_is_found_out_by_exploring() -> None:
    _, used = seconds_of(CostModel(), {"fast": 1e8, "slow": 9e8}, 4 * EXPLORE_EVERY)
    assert used[0] == "fast"
    assert used[-EXPLORE_EVERY:].count("slow") >= EXPLORE_EVERY - 1


def test_exploring_costs_no_more_than_its_share() -> None:
    truth = {"fast": 1e8, "slow": 1e6}
    total, used = seconds_of(CostModel(), truth, 2000)
    extra = used.count("slow") * (WORK / truth["slow"] - WORK / truth["fast"])
    # What the first try costs is known only afterwards; it is paid for before there is another.
    assert extra <= EXPLORE_SHARE * total + WORK / truth["slow"]


def test_two_failures_running_pass_a_carrier_over_and_a_success_forgives() -> None:
    chooser = CostModel()
    both = {"fast": WORK, "slow": WORK}
    assert chooser.choose("here", both, STATED) == "fast"
    chooser.failed("here", "fast")
    assert chooser.choose("here", both, STATED) == "fast"
    chooser.observe("here", "fast", WORK, 0.001)
    chooser.failed("here", "fast")
    assert chooser.choose("here", both, STATED) == "fast"
    chooser.failed("here", "fast")
    assert chooser.choose("here", both, STATED) == "slow"
    assert chooser.choose("elsewhere", both, STATED) == "fast", "another class knows nothing of it"
    later = [chooser.choose("here", both, STATED) for _ in range(70)]
    assert "fast" in later, "it is tried again some day"


def test_a_trial_that_fails_is_not_repeated_soon() -> None:
    chooser = CostModel()
    _, used = seconds_of(chooser, {"fast": 1e8, "slow": 9e7}, EXPLORE_EVERY - 1)
    assert set(used) == {"fast"}
    while (name := chooser.choose("here", {"fast": WORK, "slow": WORK}, STATED)) == "fast":
        chooser.observe("here", name, WORK, 0.01)
    chooser.failed("here", "slow")
    _, used = seconds_of(chooser, {"fast": 1e8, "slow": 9e7}, 2 * EXPLORE_EVERY - 1)
    assert set(used) == {"fast"}


def test_work_decides_where_one_carrier_sends_only_what_changed() -> None:
    chooser = CostModel()
    assert chooser.choose("x", {"slow": 100.0, "sparse": 30.0}, STATED) == "sparse"
    assert chooser.choose("x", {"slow": 100.0, "sparse": 100.0}, STATED) in ("slow", "sparse")
    chooser.observe("x", "slow", 100.0, 1.0)
    chooser.observe("x", "sparse", 30.0, 0.9)
    assert chooser.choose("x", {"slow": 100.0, "sparse": 30.0}, STATED) == "sparse"
    assert chooser.choose("x", {"slow": 100.0, "sparse": 60.0}, STATED) == "slow"


def test_density_is_the_share_of_elements_that_differ() -> None:
    base = StubSource("r", Version(1, 0), dtype="bfloat16")

    class Nudged(StubSource):
        def bucket(self, index: int) -> np.ndarray:
            words = super().bucket(index).copy().view(np.uint16)
            words[::50] ^= 1
            return words.view(np.uint8)

    assert density(base, base) == 0.0
    assert density(base, Nudged("r", Version(1, 0), dtype="bfloat16")) == pytest.approx(0.02, 0.05)
    assert density(base, StubSource("r", Version(1, 1), dtype="bfloat16")) > 0.99
    assert density(base, StubSource("r", Version(1, 0), buckets=2)) == 1.0


def test_auto_offers_what_this_process_can_run() -> None:
    config = WeightsConfig(carrier="auto", among=("cuda_ipc", "shm", "gloo", "gone"))
    assert offered(config) == ("shm", "gloo")
    assert offered(WeightsConfig(carrier="disk")) == ("disk",)
    assert carrier_facts("shm").reach == "host"
    with pytest.raises(ConflictError, match="'disk': this process offers shm, gloo"):
        Carriers(config, RunPaths(directory=Path()))["disk"]


def test_a_replica_that_nothing_reaches_is_refused_with_the_reason(tmp_path: Path) -> None:
    routes = Routes(WeightsConfig(carrier="shm"), RunPaths(directory=tmp_path))
    routes.check(Peer(name="near", host=host_id(), carriers=("shm",)))
    with pytest.raises(
        UserError, match=r"no carrier of weights reaches far.*it is on another host"
    ):
        routes.check(Peer(name="far", host="elsewhere", carriers=("shm",)))
    with pytest.raises(UserError, match="the trainer can shm, it can gloo"):
        routes.check(Peer(name="near", host=host_id(), carriers=("gloo",)))


async def test_a_gather_that_fails_is_no_fault_of_the_carrier_that_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    among = ("disk", "object")
    config = WeightsConfig(carrier="auto", among=among, directory=str(tmp_path / "store"))
    routes = Routes(config, RunPaths(directory=tmp_path))
    await routes.start()
    peer = Peer(name="far", host="elsewhere", carriers=among)
    for step in range(3):
        source = GatheredStub("r", Version(1, step))
        choosing = asyncio.create_task(routes.choose(peer, source))
        source.come(0)
        await asyncio.sleep(0)
        source.fail(RuntimeError("rank 1 has died"))
        with pytest.raises(SourceError, match="rank 1 has died"):
            await choosing
    route = await routes.choose(peer, StubSource("r", Version(1, 3)))
    assert route.carrier == "disk"
    assert "cannot go by" not in caplog.text
    await routes.close()


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


class Drifting(StubSource):
    """Versions of which one word in fifty differs from the one before."""

    def __init__(self, step: int) -> None:
        super().__init__("r", Version(1, step), dtype="bfloat16")
        self._step = step

    def bucket(self, index: int) -> np.ndarray:
        return _drifted(index, self._step).view(np.uint8)


@functools.lru_cache(maxsize=16)
def _drifted(index: int, step: int) -> np.ndarray:
    """The words of a bucket after so many steps."""
    if step == 0:
        return StubSource("r", Version(1, 0), dtype="bfloat16").bucket(index).view(np.uint16)
    words = _drifted(index, step - 1).copy()
    words[step % 50 :: 50] ^= step
    return words


CODING = 1e9
"""Bytes of a version that are scanned, coded and applied a second."""


async def over(link: float, versions: int) -> tuple[list[str], float]:
    """What `auto` chooses over a link of so many bytes a second, and its seconds beside those of `gloo` alone.

    In virtual time, with carriers of no work: what this process takes would outweigh the microseconds of a fast link.
    """
    routes = Routes(
        *(WeightsConfig(carrier="auto", among=("gloo", "delta")), RunPaths(directory=Path())),
        load=lambda config, paths: WireCarrier(config, Wires()),
    )
    await routes.start()
    peer = Peer(name="far", host="elsewhere", carriers=("gloo", "delta"))
    used, spent, alone = [""], 0.0, 0.0
    for step in range(versions):
        source = Drifting(step)
        route = await routes.choose(peer, source)
        whole = source.manifest.total_bytes
        sent = whole / 50 if route.carrier == used[-1] == "delta" else whole
        seconds = sent / link + (whole / CODING if route.carrier == "delta" else 0.0)
        routes.observe(route, source.manifest.version, seconds, 0.0)
        routes.committed(source)
        used.append(route.carrier)
        spent += seconds
        alone += whole / link
    await routes.close()
    return used[1:], spent / alone


@in_virtual_time
async def test_over_a_slow_link_only_what_changed_is_sent_once_that_was_tried() -> None:
    used, share = await over(link=1e7, versions=4 * EXPLORE_EVERY)
    assert set(used[: EXPLORE_EVERY - 1]) == {"gloo"}
    assert used[-2 * EXPLORE_EVERY :].count("delta") >= 2 * EXPLORE_EVERY - 2
    assert share < 0.5


@in_virtual_time
async def test_over_a_fast_link_coding_does_not_pay_and_trying_it_costs_little() -> None:
    used, share = await over(link=2e10, versions=8 * EXPLORE_EVERY)
    assert used[-EXPLORE_EVERY:].count("gloo") >= EXPLORE_EVERY - 2
    assert share < 1.0 + 3 * EXPLORE_SHARE


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
