"""Bytes sent by the trainer, and replicas lost at a bucket, with a channel to each replica or one to all."""

from __future__ import annotations

import pytest

from meshrl.weights.fleet import ReplicaState
from tests.doubles.weights import GatheredStub, StubSource
from tests.simulation.weight_fleet import (
    BUCKET_BYTES,
    BUCKETS,
    GROUP,
    KINDS,
    STEP_S,
    WHOLE,
    SimulatedFleet,
    in_simulation,
    times,
)

NAMES = ("one", "two", "three", "four")


@KINDS
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_version_is_sent_once_to_each_replica_or_to_all_by_channels_that_are_kept(
    count: int, carrier: str
) -> None:
    names = [f"replica-{index}" for index in range(count)]

    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*names)
        for _ in range(3):
            before = fleet.wires.sent["trainer"]
            await fleet.carry(*names)
            assert fleet.wires.sent["trainer"] - before == times(carrier, count) * WHOLE
        assert len(fleet.wires.opened) == times(carrier, count)

    in_simulation(test, carrier=carrier)


@KINDS
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("index", range(BUCKETS))
@pytest.mark.parametrize("victim", [NAMES[0], NAMES[-1]])
def test_the_others_get_the_version_when_one_is_lost_at_any_bucket(
    how: str, index: int, victim: str, carrier: str
) -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        others = [name for name in NAMES if name != victim]
        before = fleet.wires.sent["trainer"]

        def strike(sender: str, receiver: str, bucket: int) -> None:
            if bucket == index and (carrier == GROUP or receiver == victim):
                fleet.wires.on_bucket = lambda sender, receiver, index: None
                getattr(fleet, how)(victim)

        fleet.wires.on_bucket = strike
        await fleet.carry(*others)
        # To all: what somebody had not verified is sent again, into one channel of those that are left.
        # To each: nothing is sent twice because of the lost one.
        whole = times(carrier, len(others)) * WHOLE
        more = BUCKET_BYTES if carrier == GROUP else index * BUCKET_BYTES
        assert whole <= fleet.wires.sent["trainer"] - before <= whole + more
        assert len(fleet.wires.opened) == (2 if carrier == GROUP else len(NAMES))
        await fleet.carry(*others)
        await fleet.until(lambda: fleet.state(victim) is ReplicaState.OUT)
        if how == "stop":
            fleet.resume(victim)
        else:
            fleet.join(victim)
        await fleet.until(lambda: fleet.state(victim) is ReplicaState.SERVING)
        await fleet.carry(*NAMES)
        before = fleet.wires.sent["trainer"]
        await fleet.carry(*NAMES)
        assert fleet.wires.sent["trainer"] - before == times(carrier, len(NAMES)) * WHOLE

    in_simulation(test, carrier=carrier)


def test_a_fleet_that_hangs_holds_the_trainer_up_for_no_longer_than_one_that_works() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        began = fleet.now
        await fleet.carry(*NAMES)
        took_s = fleet.now - began
        for name in NAMES:
            fleet.stop(name)
        await fleet.publish()
        assert fleet.longest_publish_s == 0.0
        await fleet.publish()  # at once, as no trainer does
        assert 0 < fleet.longest_publish_s <= 2 * took_s + STEP_S
        fleet.longest_publish_s = 0.0
        for _ in range(3):
            await fleet.publish()
        assert fleet.longest_publish_s == 0.0
        assert all(fleet.state(name) is not ReplicaState.OUT for name in NAMES)
        await fleet.until(lambda: all(fleet.state(name) is ReplicaState.OUT for name in NAMES))
        for name in NAMES:
            fleet.resume(name)
        await fleet.until(lambda: fleet.published[-1].step == 6)
        assert all(version.step in (0, 1, 2, 6) for version in fleet.published)
        await fleet.carry(*NAMES)

    in_simulation(test)


def test_a_slow_fleet_sets_the_trainers_pace() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        for _ in range(6):
            await fleet.publish()
        assert fleet.longest_publish_s > 0
        await fleet.until(lambda: fleet.published[-1].step == 5)
        assert [version.step for version in fleet.published] == list(range(6))

    in_simulation(test)


@KINDS
@pytest.mark.parametrize("kind", [StubSource, GatheredStub])
def test_a_bucket_that_is_spoilt_is_sent_again_and_nothing_else(
    carrier: str, kind: type[StubSource]
) -> None:
    """Also where the bucket's hash came with its bytes, as it does while a version is gathered."""

    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        struck: list[int] = []

        def spoil(sender: str, receiver: str, index: int) -> bool:
            if carrier == GROUP or receiver == "two":
                struck.append(index)
                return index == 2 and struck.count(2) == 1
            return False

        fleet.wires.spoil = spoil
        before = fleet.wires.sent["trainer"]
        source = await fleet.publish(fleet.source(kind))
        if isinstance(source, GatheredStub):
            for index in range(BUCKETS):
                source.come(index)
        await fleet.serve(source, *NAMES)
        whole = times(carrier, len(NAMES)) * WHOLE
        assert fleet.wires.sent["trainer"] - before == whole + BUCKET_BYTES
        assert all(fleet.state(name) is ReplicaState.SERVING for name in NAMES)

    in_simulation(test, carrier=carrier)


def test_replicas_that_join_together_later_each_get_the_committed_version() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start("one")
        source = await fleet.carry("one")
        before = fleet.wires.sent["trainer"]
        for name in NAMES[1:]:
            fleet.join(name)
        for name in NAMES[1:]:
            await fleet.until(lambda each=name: fleet.state(each) is ReplicaState.SERVING)
            assert fleet.engines[name].hashes == source.manifest.bucket_hashes
        assert fleet.wires.sent["trainer"] - before == len(NAMES[1:]) * WHOLE

    in_simulation(test)


def test_a_joiner_catches_up_alone_and_is_in_the_channel_of_the_next_version() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES[:3])
        await fleet.carry(*NAMES[:3])
        before = fleet.wires.sent["trainer"]
        fleet.join(NAMES[3])
        await fleet.until(lambda: fleet.state(NAMES[3]) is ReplicaState.SERVING)
        assert fleet.wires.sent["trainer"] - before == WHOLE
        await fleet.carry(*NAMES)
        assert fleet.wires.sent["trainer"] - before == 2 * WHOLE

    in_simulation(test, carrier=GROUP)


def test_replicas_that_cannot_be_one_channel_get_everything_alone_until_the_fleet_changes() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES[:3])
        fleet.wires.cut_groups = True
        for _ in range(3):
            await fleet.carry(*NAMES[:3])
        before = fleet.wires.sent["trainer"]
        began = fleet.now
        await fleet.carry(*NAMES[:3])
        assert fleet.wires.sent["trainer"] - before == 3 * WHOLE
        assert fleet.now - began < fleet.config.ready_s  # no group was tried
        assert all(fleet.state(name) is ReplicaState.SERVING for name in NAMES[:3])
        fleet.wires.cut_groups = False
        fleet.join(NAMES[3])
        await fleet.until(lambda: fleet.state(NAMES[3]) is ReplicaState.SERVING)
        before = fleet.wires.sent["trainer"]
        await fleet.carry(*NAMES)
        assert fleet.wires.sent["trainer"] - before == WHOLE

    in_simulation(test, carrier=GROUP)


def test_the_whole_fleet_is_stopped_at_once_and_comes_back_to_the_newest_version() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)

        def strike(sender: str, receiver: str, bucket: int) -> None:
            if bucket == 1:
                for name in NAMES:
                    fleet.stop(name)

        fleet.wires.on_bucket = strike
        for _ in range(4):
            await fleet.publish()
        await fleet.until(lambda: all(fleet.state(name) is ReplicaState.OUT for name in NAMES))
        fleet.wires.on_bucket = lambda sender, receiver, bucket: None
        for name in NAMES:
            fleet.resume(name)
        await fleet.until(lambda: fleet.published[-1].step == 4)
        await fleet.carry(*NAMES)

    in_simulation(test, carrier=GROUP)
