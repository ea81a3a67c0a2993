"""All replicas that take a version are one channel: what leaves the trainer, and who is lost at which bucket."""

from __future__ import annotations

from functools import partial

import pytest

from meshrl.weights.fleet import ReplicaState

from .simulated_fleet import (
    BUCKET_BYTES,
    BUCKETS,
    GROUP,
    WHOLE,
    SimulatedFleet,
    in_simulation,
)

NAMES = ("one", "two", "three", "four")
in_simulation = partial(in_simulation, carrier=GROUP)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_trainer_sends_a_version_once_into_one_channel_that_is_kept(count: int) -> None:
    names = [f"replica-{index}" for index in range(count)]

    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*names)
        for _ in range(3):
            before = fleet.wires.sent["trainer"]
            await fleet.carry(*names)
            assert fleet.wires.sent["trainer"] - before == WHOLE
        assert len(fleet.wires.opened) == 1

    in_simulation(test)


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("index", range(BUCKETS))
@pytest.mark.parametrize("victim", [NAMES[0], NAMES[-1]])
def test_the_others_get_the_version_when_one_is_lost_at_any_bucket(
    how: str, index: int, victim: str
) -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        others = [name for name in NAMES if name != victim]
        before = fleet.wires.sent["trainer"]

        def strike(sender: str, receiver: str, bucket: int) -> None:
            if bucket == index:
                fleet.wires.on_bucket = lambda sender, receiver, index: None
                getattr(fleet, how)(victim)

        fleet.wires.on_bucket = strike
        await fleet.carry(*others)
        # Once, and only what somebody had not verified is sent again, into one channel of those that are left.
        assert WHOLE <= fleet.wires.sent["trainer"] - before <= WHOLE + BUCKET_BYTES
        assert len(fleet.wires.opened) == 2
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
        assert fleet.wires.sent["trainer"] - before == WHOLE

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

    in_simulation(test)


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

    in_simulation(test)


def test_a_bucket_that_is_spoilt_is_sent_again_and_nothing_else() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        struck: list[int] = []

        def spoil(sender: str, receiver: str, index: int) -> bool:
            struck.append(index)
            return index == 2 and struck.count(2) == 1

        fleet.wires.spoil = spoil
        before = fleet.wires.sent["trainer"]
        await fleet.carry(*NAMES)
        assert fleet.wires.sent["trainer"] - before == WHOLE + BUCKET_BYTES
        assert all(fleet.state(name) is ReplicaState.SERVING for name in NAMES)

    in_simulation(test)


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

    in_simulation(test)
