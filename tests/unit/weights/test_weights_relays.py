"""A version passes through a chain of replicas: what leaves the trainer, and who is lost at which bucket."""

from __future__ import annotations

import pytest

from meshrl.weights.fleet import ReplicaState

from .simulated_fleet import BUCKET_BYTES, BUCKETS, STEP_S, WHOLE, SimulatedFleet, in_simulation

NAMES = ("one", "two", "three", "four")


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_trainer_sends_a_version_once_however_many_replicas_there_are(count: int) -> None:
    names = [f"replica-{index}" for index in range(count)]

    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*names)
        for _ in range(3):
            before = fleet.wires.sent["trainer"]
            await fleet.carry(*names)
            assert fleet.wires.sent["trainer"] - before == WHOLE
        # One channel for each pair, kept from version to version.
        assert sorted(fleet.wires.opened) == sorted(zip(["trainer", *names], names, strict=False))

    in_simulation(test)


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("index", range(BUCKETS))
@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_the_others_get_the_version_when_one_is_lost_at_any_bucket(
    how: str, index: int, end: str
) -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        others = [name for name in NAMES if name != "two"]
        edge = ("two", "three") if end == "sender" else ("one", "two")
        before = fleet.wires.sent["trainer"]

        def strike(sender: str, receiver: str, bucket: int) -> None:
            if (sender, receiver, bucket) == (*edge, index):
                fleet.wires.on_bucket = lambda sender, receiver, index: None
                getattr(fleet, how)("two")

        fleet.wires.on_bucket = strike
        await fleet.carry(*others)
        # Once for the chain, and once more what the part behind the lost one had not got.
        missing = (BUCKETS - index + (end == "receiver")) * BUCKET_BYTES
        assert WHOLE <= fleet.wires.sent["trainer"] - before <= WHOLE + missing
        await fleet.carry(*others)
        await fleet.until(lambda: fleet.state("two") is ReplicaState.OUT)
        if how == "stop":
            fleet.resume("two")
        else:
            fleet.join("two")
        await fleet.until(lambda: fleet.state("two") is ReplicaState.SERVING)
        await fleet.carry(*NAMES)
        before = fleet.wires.sent["trainer"]
        await fleet.carry(*NAMES)
        assert fleet.wires.sent["trainer"] - before <= 2 * WHOLE

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


def test_replicas_that_cannot_reach_each_other_get_everything_from_the_trainer() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        fleet.wires.cut = lambda sender, receiver: sender != "trainer"
        await fleet.start(*NAMES)
        for _ in range(3):
            await fleet.carry(*NAMES)
        opened = len(fleet.wires.opened)
        before = fleet.wires.sent["trainer"]
        await fleet.carry(*NAMES)
        assert fleet.wires.sent["trainer"] - before == len(NAMES) * WHOLE
        assert len(fleet.wires.opened) == opened == len(NAMES)
        assert all(fleet.state(name) is ReplicaState.SERVING for name in NAMES)

    in_simulation(test)


def test_bytes_that_one_replica_spoils_again_and_again_come_from_the_trainer() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        fleet.wires.spoil = lambda sender, receiver, index: sender == "two" and index == 2
        before = fleet.wires.sent["trainer"]
        await fleet.carry(*NAMES)
        assert fleet.wires.sent["trainer"] - before == WHOLE + BUCKET_BYTES
        assert all(fleet.state(name) is ReplicaState.SERVING for name in NAMES)

    in_simulation(test)


def test_replicas_that_join_together_later_form_a_chain_too() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start("one")
        source = await fleet.carry("one")
        before = fleet.wires.sent["trainer"]
        for name in NAMES[1:]:
            fleet.join(name)
        for name in NAMES[1:]:
            await fleet.until(lambda each=name: fleet.state(each) is ReplicaState.SERVING)
            assert fleet.engines[name].hashes == source.manifest.bucket_hashes
        assert fleet.wires.sent["trainer"] - before == WHOLE

    in_simulation(test)
