"""Replicas that break, do not fit, hang, are late or read corrupted bytes cost the weight plane themselves alone."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from meshrl.contract.errors import CorruptError, InfraError, UserError
from meshrl.contract.types import OnUpdate, Uint8, Version, WeightManifest
from meshrl.weights.fleet import ReplicaState
from meshrl.weights.replica_controller import PoisonedError
from tests.doubles.weights import HashSink, StubSource

from ..waiting import until
from . import gated_carrier
from .weights_fleet import RUN, flip, opened


class Poisonable(HashSink):
    """Breaks in the middle of a commit."""

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        if version.step == 1:
            raise RuntimeError("half a model")
        await super().commit_weights(version, on_update)


async def test_an_engine_that_breaks_in_a_commit_is_out_and_its_process_must_end(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        healthy, ill = await fleet.joined("healthy", ill=Poisonable())
        await fleet.carry(fleet.source(0))
        await fleet.carry(fleet.source(1))
        assert fleet.published == [Version(1, 0), Version(1, 1)]
        assert (healthy.version, ill.version) == (Version(1, 1), Version(1, 0))
        assert fleet.state_of("ill") is ReplicaState.OUT
        assert "half a model" in fleet.reason_of("ill")
        with pytest.raises(PoisonedError, match="half a model"):
            await fleet.controllers.pop("ill")


class Stalled(HashSink):
    """An engine whose server does not end a load."""

    where = "vLLM at http://127.0.0.1:5 (log: /tmp/vllm.log)"

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        await asyncio.Event().wait()


async def test_a_load_that_stalls_ends_in_one_line_that_names_the_server_and_its_log(
    tmp_path: Path,
) -> None:
    async with opened("disk", tmp_path, base_s=0.5) as fleet:
        await fleet.joined(stalled=Stalled())
        await fleet.carry(fleet.source(0))
        with pytest.raises(PoisonedError) as raised:
            await fleet.controllers.pop("stalled")
    said = str(raised.value)
    assert said.startswith(f"{Stalled.where} failed at weights 1.0: ")
    assert "no progress in 3.0 s" in said and "\n" not in said


class Misfit(HashSink):
    """Another model."""

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        raise UserError("layers.0.up.weight: this model has no such tensor")


async def test_weights_that_do_not_fit_the_model_end_that_replica_alone(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        good, _ = await fleet.joined("good", misfit=Misfit())
        await fleet.carry(fleet.source(0))
        assert good.version == Version(1, 0)
        assert "no such tensor" in fleet.reason_of("misfit")
        with pytest.raises(UserError, match="no such tensor"):
            await fleet.controllers.pop("misfit")


class Stuck(HashSink):
    """Never finishes staging."""

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        await asyncio.Event().wait()


async def test_a_replica_without_progress_becomes_suspect_and_then_out_while_the_other_commits(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path, base_s=1.0) as fleet:
        good, _ = await fleet.joined("good", stuck=Stuck())
        await fleet.coordinator.publish(fleet.source(0))
        await until(lambda: fleet.state_of("stuck") is ReplicaState.SUSPECT)
        assert fleet.published == []
        assert good.version is None
        await fleet.coordinator.drained()
        assert fleet.published == [Version(1, 0)]
        assert good.version == Version(1, 0)
        assert "PREPARED" in fleet.reason_of("stuck")


async def test_stragglers_are_waited_for_half_as_long_again_where_the_late_quorum_is_lower(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()

    class Slow(HashSink):
        async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
            await gate.wait()
            await super().stage_weights(manifest, buckets)

    async with opened("disk", tmp_path, late_quorum=0.5) as fleet:
        *engines, slow = await fleet.joined("one", "two", slow=Slow())
        await fleet.carry(fleet.source(0))
        assert [engine.version for engine in engines] == [Version(1, 0)] * 2
        assert slow.version is None
        assert fleet.state_of("slow") is not ReplicaState.OUT
        await fleet.carry(fleet.source(1))
        gate.set()
        await until(lambda: slow.version == Version(1, 1))
        assert fleet.published == [Version(1, 0), Version(1, 1)]


async def test_a_joiner_that_takes_long_to_be_ready_gets_the_newest_committed_version(
    tmp_path: Path,
) -> None:
    gated_carrier.gate.set()
    async with opened("tests.integration.gated_carrier", tmp_path) as fleet:
        await fleet.joined("first")
        await fleet.carry(fleet.source(0))
        gated_carrier.gate.clear()
        late = fleet.join("late")
        await gated_carrier.waiting.wait()
        for step in range(1, 4):
            await fleet.carry(fleet.source(step))
        gated_carrier.gate.set()
        await until(lambda: fleet.state_of("late") is ReplicaState.SERVING)
        assert late.commits == [Version(1, 3)]
        views = {view.name: view for view in fleet.coordinator.fleet().replicas}
        assert views["late"].generation == views["first"].generation + 1, "it joined once"


class Failing(HashSink):
    """Cannot stage anything."""

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        raise InfraError("no memory for a second copy")


async def test_a_replica_that_fails_the_same_way_twice_is_told_as_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        found = [r.message for r in caplog.records if r.name.endswith("replica_controller")]
        return [message for message in found if "times in a row" in message]

    async with opened("disk", tmp_path) as fleet:
        await fleet.joined("good", failing=Failing())
        await fleet.coordinator.publish(fleet.source(0))
        await until(lambda: bool(told()))
    assert told()[0] == (
        "failing got no weights, 2 times in a row for the same reason:"
        " no memory for a second copy; it tries again"
    )


async def test_a_healthy_run_says_once_that_a_version_is_committed_and_ends_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened("disk", tmp_path) as fleet:
        await fleet.joined("one")
        for step in range(3):
            await fleet.carry(fleet.source(step))
    committed = [message for message in caplog.messages if message.endswith("is committed")]
    assert committed == ["version 1.0 is committed"]
    assert not [r.message for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_replica_of_another_run_is_refused(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.join("stranger", run="elsewhere")
        with pytest.raises(UserError, match="serves run 'weights-test', not 'elsewhere'"):
            await fleet.controllers.pop("stranger")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("spoil", [lambda path: flip(path, -5), cut], ids=["flipped", "cut short"])
async def test_a_file_that_was_spoiled_is_found_and_written_again(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    async with opened("disk", tmp_path) as fleet:
        await fleet.joined("one")
        source = fleet.source(0)
        await fleet.carry(source)
        path = tmp_path / "weights" / "1.0" / "model-00003-of-00004.safetensors"
        healthy = path.read_bytes()
        spoil(path)
        late = await fleet.joined_late("late")
        assert late.hashes == source.manifest.bucket_hashes
        assert path.read_bytes() == healthy


async def test_a_replica_that_reads_corrupted_bytes_again_and_again_is_quarantined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared, stale = tmp_path / "shared", tmp_path / "stale"
    async with opened("disk", shared) as fleet:
        (good,) = await fleet.joined("good")
        await fleet.carry(fleet.source(0))
        # A mount of its own, with a flipped byte in it, that no repair of the trainer's reaches.
        shutil.copytree(shared, stale)
        flip(stale / "weights" / "1.0" / "model-00002-of-00004.safetensors", -5)
        ill = fleet.join("ill", directory=stale)
        await until(lambda: fleet.state_of("ill") is ReplicaState.OUT)
        assert "buckets [1] of weights 1.0 arrived corrupted, again and again" in fleet.reason_of(
            "ill"
        )
        assert "weights 1.0 arrived damaged: bucket 1: layers.1.down.weight" in caplog.messages
        await fleet.carry(fleet.source(1))
        assert good.version == Version(1, 1)
        assert ill.commits == []


class Rotten(StubSource):
    """Its memory changed after the manifest was made."""

    def bucket(self, index: int) -> Uint8:
        bucket = super().bucket(index).copy()
        bucket[17] ^= 1
        return bucket


async def test_a_version_whose_source_changed_is_withdrawn_and_the_trainer_gets_an_error(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engines = await fleet.joined("one", "two")
        await fleet.carry(fleet.source(0))
        with pytest.raises(CorruptError, match=r"trainer's memory changed.*layers\.\d\.up\.weight"):
            await fleet.carry(Rotten(RUN, Version(1, 1)))
        assert [engine.commits for engine in engines] == [[Version(1, 0)]] * 2
        await fleet.carry(fleet.source(2))
        assert [engine.version for engine in engines] == [Version(1, 2)] * 2
        assert fleet.published == [Version(1, 0), Version(1, 2)]
