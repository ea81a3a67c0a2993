"""Each replica has a channel of its own to the trainer: what leaves it, and who is lost at which bucket."""

from __future__ import annotations

import pytest

from meshrl.weights.fleet import ReplicaState

from .simulated_fleet import BUCKET_BYTES, BUCKETS, STEP_S, WHOLE, SimulatedFleet, in_simulation

NAMES = ("one", "two", "three", "four")


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_version_is_sent_once_to_each_replica_by_channels_that_are_kept(count: int) -> None:
    names = [f"replica-{index}" for index in range(count)]

    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*names)
        for _ in range(3):
            before = fleet.wires.sent["trainer"]
            await fleet.carry(*names)
            assert fleet.wires.sent["trainer"] - before == count * WHOLE
        assert sorted(fleet.wires.opened) == [("trainer", name) for name in names]

    in_simulation(test)


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("index", range(BUCKETS))
def test_the_others_get_the_version_when_one_is_lost_at_any_bucket(how: str, index: int) -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        others = [name for name in NAMES if name != "two"]
        before = fleet.wires.sent["trainer"]

        def strike(sender: str, receiver: str, bucket: int) -> None:
            if (receiver, bucket) == ("two", index):
                fleet.wires.on_bucket = lambda sender, receiver, index: None
                getattr(fleet, how)("two")

        fleet.wires.on_bucket = strike
        await fleet.carry(*others)
        # Nothing is sent twice because of the lost one.
        whole = len(others) * WHOLE
        assert whole <= fleet.wires.sent["trainer"] - before <= whole + index * BUCKET_BYTES
        await fleet.carry(*others)
        await fleet.until(lambda: fleet.state("two") is ReplicaState.OUT)
        if how == "stop":
            fleet.resume("two")
        else:
            fleet.join("two")
        await fleet.until(lambda: fleet.state("two") is ReplicaState.SERVING)
        await fleet.carry(*NAMES)

    in_simulation(test)


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


def test_a_bucket_that_is_spoilt_is_sent_again_and_nothing_else() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        struck: list[int] = []

        def spoil(sender: str, receiver: str, index: int) -> bool:
            if receiver == "two":
                struck.append(index)
            return receiver == "two" and index == 2 and struck.count(2) == 1

        fleet.wires.spoil = spoil
        before = fleet.wires.sent["trainer"]
        await fleet.carry(*NAMES)
        assert fleet.wires.sent["trainer"] - before == len(NAMES) * WHOLE + BUCKET_BYTES
        assert all(fleet.state(name) is ReplicaState.SERVING for name in NAMES)

    in_simulation(test)


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
