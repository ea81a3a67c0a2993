"""Versions that arrive in memory of a server's device: our loader in it lends the memory, and loads from there.

The server is the fake of SGLang with the real loader, the device a stub, the receiver a process of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.chunk_digest import digest
from meshrl.contract.errors import CapacityError, EngineGoneError, InfraError
from meshrl.contract.types import OnUpdate, Version, WeightManifest
from meshrl.rollout.engines.sglang import build
from meshrl.rollout.server_engine import staging as lending
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.streams import sample
from meshrl.testing.contract.engine_suite import SLOTS, ask
from meshrl.weights.fleet import ReplicaState
from meshrl.weights.shared_memory import SharedMemory
from tests.doubles import nccl as double
from tests.doubles.device import GPU, PATTERN, opened

from ..sglang_checkpoint import make_checkpoint, mislabelled, weights
from ..waiting import until
from . import weights_fleet

FAKE = [sys.executable, "-m", "meshrl.testing.sglang_server"]
Maker = Callable[..., Awaitable[ServerEngine]]


class Receiver:
    """A receiver in this process that writes into lent memory."""

    memory = "stub"
    gpu = GPU

    async def settle(self) -> None:
        pass

    async def reach(self, bucket: Any) -> None:
        opened(bytes.fromhex(bucket.handle), bucket.nbytes).close()


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Maker]:
    monkeypatch.setattr(lending, "HEADROOM", 0)  # /dev/shm may be small
    checkpoint = make_checkpoint(tmp_path / "model", max_length=64)
    engines: list[ServerEngine] = []

    async def build_one(**options: Any) -> ServerEngine:
        options = {"command": FAKE, "eos_token_ids": [], "log": str(tmp_path / "log"), **options}
        engine = build(options, model=checkpoint, slots=SLOTS, tokenizer=None)
        engines.append(engine)
        await engine.start()
        return engine

    yield build_one
    for engine in engines:
        await engine.close()
    SharedMemory().sweep(PATTERN)  # of servers that were killed


async def check_serves(engine: ServerEngine, version: Version) -> None:
    answer = await sample(engine, ask("a", max_tokens=4))
    assert [span.version for span in answer.spans] == [version] and not mislabelled(answer)


async def by_the_host(engine: ServerEngine, version: Version) -> None:
    manifest, buckets = weights(version)
    assert [*await engine.lend(manifest, Receiver())] == []
    await engine.stage_weights(manifest, buckets)
    await engine.commit_weights(version, OnUpdate.IN_FLIGHT)


async def by_the_device(engine: ServerEngine, version: Version, *, wrong: int = 0) -> Any:
    """Stage it; `wrong` is what is added to its first byte afterwards."""
    manifest, buckets = weights(version)
    lent = await engine.lend(manifest, Receiver())
    assert len(lent) == len(buckets)
    digests = []
    for memory, bucket in zip(lent, buckets, strict=True):
        with opened(bytes.fromhex(memory.handle), memory.nbytes) as there:
            there[:] = bucket.tobytes()
        digests.append(digest(bucket))
    await engine.stage_lent(manifest, digests)
    if wrong:
        with opened(bytes.fromhex(lent[0].handle), lent[0].nbytes) as there:
            there[0] ^= wrong
    return lent


def server_of(engine: ServerEngine) -> int:
    """Its process's number."""
    guard = engine._server._process._process.pid  # type: ignore[union-attr]
    children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    return int(children[0])


@pytest.mark.parametrize("struck", [None, "kill", "stop"])
async def test_versions_go_from_the_trainer_to_the_memory_of_the_server_and_are_served_from_there(
    struck: str | None, make: Maker, tmp_path: Path
) -> None:
    """The receiver is killed in a bucket; or stopped, and the server, whose memory that is, killed meanwhile."""
    mark = tmp_path / "struck"
    fault = {"at": "middle", "nth": 2, "do": struck, "rank": 1, "once": str(mark)}
    nccl = double.settings(deaf=True, faults=[fault] if struck else [])
    deadlines = {"base_s": 5.0, "silence_s": 60.0}
    engine = await make()
    async with weights_fleet.opened("nccl", tmp_path, nccl=nccl, **deadlines) as fleet:
        fleet.attach("server", engine)
        seen = []
        for step in range(3):
            version = Version(1, step + 1)
            await fleet.coordinator.publish(weights_fleet.PackedSource(*weights(version)))
            if struck == "stop" and step == 2:
                await until(mark.exists)
                os.kill(server_of(engine), signal.SIGKILL)
                await until(lambda: engine._limit.ended is not None)
                assert "weights 1.2 lay in its device's memory only" in engine._limit.ended
                with pytest.raises(EngineGoneError):
                    await sample(engine, ask("gone", max_tokens=4))
                await until(lambda: fleet.state_of("server") is not ReplicaState.SERVING)
                return
            await fleet.until_serving(engine, version)
            await check_serves(engine, version)
            seen.append(engine.stats().staging)
        assert seen == ["host", "device", "device"]
        assert mark.exists() is bool(struck)
        assert engine._served is not None
        assert [path.name for path in engine._served.path.iterdir()] == [lending.ARRIVED]


async def test_what_is_staged_on_the_device_changes_nothing_before_its_commit_nor_after_it(
    make: Maker,
) -> None:
    engine = await make()
    await by_the_host(engine, Version(1, 1))
    lent = await by_the_device(engine, Version(1, 2))
    await check_serves(engine, Version(1, 1))
    await engine.commit_weights(Version(1, 2), OnUpdate.IN_FLIGHT)
    assert await by_the_device(engine, Version(1, 3)) == lent
    await check_serves(engine, Version(1, 2))
    await engine.discard_weights(Version(1, 3))
    await by_the_device(engine, Version(1, 4), wrong=1)  # after it was verified
    with pytest.raises(InfraError, match="bucket 0 is not what arrived"):
        await engine.commit_weights(Version(1, 4), OnUpdate.IN_FLIGHT)


async def test_device_without_room_is_refused_and_auto_says_why_and_stays_on_the_host(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", lending.log.name)
    monkeypatch.setattr(lending, "HEADROOM", 1 << 60)
    strict, lax = await make(weight_staging="device"), await make()
    for engine in (strict, lax):
        await by_the_host(engine, Version(1, 1))
    manifest, buckets = weights(Version(1, 2))
    with pytest.raises(CapacityError, match="weight_staging is device, and a second version takes"):
        await strict.lend(manifest, Receiver())
    await check_serves(strict, Version(1, 1))
    await by_the_host(lax, Version(1, 2))
    await check_serves(lax, Version(1, 2))
    assert "from weights 1.2 on: staged on the host, as a second version takes" in caplog.text
    monkeypatch.setattr(lending, "HEADROOM", 0)
    await by_the_host(lax, Version(1, 3))  # asks again
    await by_the_device(lax, Version(1, 4))
    fresh = await make(weight_staging="device")
    await fresh.stage_weights(*weights(Version(1, 1)))
    await fresh.commit_weights(Version(1, 1), OnUpdate.IN_FLIGHT)
    with pytest.raises(CapacityError, match=r"want weights\.carrier=nccl and a device"):
        await fresh.stage_weights(manifest, buckets)


async def test_memory_that_the_receiver_does_not_reach_is_given_back_and_not_asked_for_again(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", lending.log.name)
    engine = await make()
    await by_the_host(engine, Version(1, 1))
    memory = f"/dev/shm/{bytes.fromhex(engine._lending._lent[0].handle).decode()}"
    assert os.access(memory, os.R_OK)

    class Elsewhere(Receiver):
        gpu = "0000:01:00.0"

    for step in (2, 3):
        manifest, buckets = weights(Version(1, step))
        assert [*await engine.lend(manifest, Elsewhere())] == []
        await engine.stage_weights(manifest, buckets)
        await engine.commit_weights(manifest.version, OnUpdate.IN_FLIGHT)
        await check_serves(engine, manifest.version)
        assert not os.access(memory, os.R_OK)
    assert caplog.text.count("the receiver is on GPU 0000:01:00.0") == 1


async def test_a_server_that_is_killed_takes_its_memory_and_what_it_served_from_there(
    make: Maker,
) -> None:
    engine = await make()
    await by_the_host(engine, Version(1, 1))
    lent = await by_the_device(engine, Version(1, 2))
    os.kill(server_of(engine), signal.SIGKILL)
    # 1.1 has been loaded again, and memory asked for.
    await until(lambda: engine._lending._lent not in ((), lent))
    with pytest.raises(InfraError, match="lay in its device's memory"):
        await engine.stage_lent(weights(Version(1, 2))[0], ["0" * 16])
    with pytest.raises(InfraError, match="lay in its device's memory"):
        await engine.commit_weights(Version(1, 2), OnUpdate.IN_FLIGHT)
    await check_serves(engine, Version(1, 1))
    await by_the_device(engine, Version(1, 3))
    await engine.commit_weights(Version(1, 3), OnUpdate.IN_FLIGHT)
    await check_serves(engine, Version(1, 3))
    os.kill(server_of(engine), signal.SIGKILL)
    with pytest.raises((EngineGoneError, InfraError)):
        await sample(engine, ask("b", max_tokens=4))
    await until(lambda: engine._limit.ended is not None)
    assert "lay in its device's memory only" in engine._limit.ended


def test_what_a_loader_answers_is_read_with_care(tmp_path: Path) -> None:
    manifest: WeightManifest = weights(Version(1, 1))[0]
    for text, why in (
        ("", "gave no answer"),
        ("[]", "gave no answer"),
        ('{"handles": []}', "it lent something else"),
        ('{"handles": ["../x"]}', "it lent something else"),
        ('{"error": "2.0 GiB are free"}', "2.0 GiB are free"),
        (" " * (2 << 20) + '{"handles": ["00"]}', "gave no answer"),
    ):
        lends = lending.ServerLending("auto")
        lends._wanted = ("stub", manifest)
        lends.ask(tmp_path)
        (tmp_path / lending.ANSWER).write_text(text)
        lends.loaded(tmp_path)
        assert why in lends._refused and not lends.lends, text
