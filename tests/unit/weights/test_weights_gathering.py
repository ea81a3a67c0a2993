"""A version is published with its plan alone: what has been gathered is under way while the rest still comes."""

from __future__ import annotations

import pytest

from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.weights.fleet import ReplicaState
from meshrl.weights.messages import SourceError
from meshrl.weights.transport import Pairs, WholeVersions
from tests.doubles.weights import GatheredStub
from tests.simulation.weight_fleet import (
    BUCKET_BYTES,
    BUCKETS,
    KINDS,
    WHOLE,
    SimulatedFleet,
    WireCarrier,
    in_simulation,
    times,
)

NAMES = ("one", "two", "three")
LONG_S = 100.0
"""More than any deadline of the fleet."""


async def come(fleet: SimulatedFleet, source: GatheredStub, *buckets: int) -> None:
    """These are there, and what can be sent of them is."""
    for index in buckets:
        source.come(index)
    await fleet.pass_time(5.0)


@KINDS
def test_each_bucket_is_sent_once_as_soon_as_it_is_gathered_and_no_deadline_counts_the_gather(
    carrier: str,
) -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        before = fleet.wires.sent["trainer"]
        source = fleet.source(GatheredStub)
        await fleet.publish(source)
        for index in range(BUCKETS):
            await fleet.pass_time(LONG_S)
            sent = fleet.wires.sent["trainer"] - before
            assert sent == times(carrier, len(NAMES)) * index * BUCKET_BYTES
            assert source.manifest.version not in fleet.published
            assert all(fleet.state(name) is ReplicaState.SERVING for name in NAMES)
            await come(fleet, source, index)
        await fleet.serve(source, *NAMES)
        assert fleet.wires.sent["trainer"] - before == times(carrier, len(NAMES)) * WHOLE
        before = fleet.wires.sent["trainer"]
        await fleet.carry(*NAMES)  # one that was gathered before
        assert fleet.wires.sent["trainer"] - before == times(carrier, len(NAMES)) * WHOLE

    in_simulation(test, carrier=carrier)


@KINDS
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("victim", [NAMES[0], NAMES[-1]])
def test_the_others_get_what_is_gathered_after_one_is_lost_and_a_joiner_gets_all(
    carrier: str, how: str, victim: str
) -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        await fleet.carry(*NAMES)
        others = [name for name in NAMES if name != victim]
        source = fleet.source(GatheredStub)
        before = fleet.wires.sent["trainer"]
        await fleet.publish(source)
        await come(fleet, source, 0, 1)
        getattr(fleet, how)(victim)
        await fleet.pass_time(LONG_S)
        await come(fleet, source, 2)
        fleet.join("late")
        await come(fleet, source, 3)
        await fleet.serve(source, *others)
        # Once to those that are left; the joiner gets the committed version, then this one.
        await fleet.until(lambda: fleet.engines["late"].version == source.manifest.version)
        most = (times(carrier, len(others)) + 2) * WHOLE + 2 * BUCKET_BYTES
        assert fleet.wires.sent["trainer"] - before <= most
        assert fleet.engines["late"].hashes == source.manifest.bucket_hashes
        await fleet.carry(*others, "late")

    in_simulation(test, carrier=carrier)


@KINDS
def test_a_gather_that_fails_changes_no_engine_and_the_trainer_is_told(carrier: str) -> None:
    async def test(fleet: SimulatedFleet) -> None:
        await fleet.start(*NAMES)
        served = await fleet.carry(*NAMES)
        source = fleet.source(GatheredStub)
        await fleet.publish(source)
        await come(fleet, source, 0, 1)
        source.fail(RuntimeError("rank 1 has died"))
        with pytest.raises(SourceError, match=r"weights 1\.1 were not gathered: rank 1 has died"):
            await fleet.coordinator.drained()
        await fleet.pass_time(LONG_S)
        for name in NAMES:
            assert fleet.state(name) is ReplicaState.SERVING
            assert fleet.engines[name].hashes == served.manifest.bucket_hashes
        await fleet.carry(*NAMES)

    in_simulation(test, carrier=carrier)


class OwnCarrier:
    """A carrier of 0.2, of somebody's own: it knows nothing of transports, and stages whole versions."""

    def __init__(self, carrier: WireCarrier) -> None:
        self.listen, self.channel, self.close = carrier.listen, carrier.channel, carrier.close
        self.staged: list[Version] = []

    async def stage(self, source: WeightSource) -> None:
        self.staged.append(source.manifest.version)
        for index in range(BUCKETS):
            source.bucket(index)


def test_a_carrier_of_somebodys_own_is_given_whole_versions_and_serves_a_fleet() -> None:
    async def test(fleet: SimulatedFleet) -> None:
        own: list[OwnCarrier] = []

        def carrier() -> Pairs:
            own.append(OwnCarrier(WireCarrier(fleet.config, fleet.wires)))
            return WholeVersions(fleet.config, own[-1])  # type: ignore[arg-type]

        fleet.carrier = carrier  # type: ignore[method-assign]
        await fleet.start(*NAMES)
        source = fleet.source(GatheredStub)
        await fleet.publish(source)
        await come(fleet, source, *range(BUCKETS - 1))
        assert not fleet.wires.sent["trainer"]
        assert not own[0].staged
        await come(fleet, source, BUCKETS - 1)
        await fleet.serve(source, *NAMES)
        assert own[0].staged == [source.manifest.version]

    in_simulation(test)
