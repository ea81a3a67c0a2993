from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    ConfigError,
    CorruptError,
    UnavailableError,
    WaitTimeoutError,
)
from meshrl.contract.types import TensorSpec, Uint8, Version, WeightManifest
from meshrl.weights.carrier import Channel, Link, RunPaths
from meshrl.weights.carriers.nccl import Rendezvous
from meshrl.weights.delta.patches import Held
from meshrl.weights.groups import SharedChannel
from meshrl.weights.messages import (
    digest,
    manifest_from_message,
    manifest_to_message,
    stamp,
    tensor_digest,
    wrong_tensors,
)
from meshrl.weights.nccl import messages
from meshrl.weights.transport import load_carrier
from meshrl.weights.version_store import VersionReader, VersionWriter, WeightStore
from meshrl.weights.waiting import WorkerThread, first_ends, together, within
from tests.doubles.weights import StubSource


def test_coordinator_and_replica_controller_import_no_torch() -> None:
    modules = ("replica_controller", "coordinator", "servicer", "carriers.disk", "carriers.delta")
    lines = [f"import meshrl.weights.{module}" for module in modules]
    lines += ["import meshrl.config.weights", "import tests.doubles.weights"]
    lines.append("import sys; assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_carrier_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'gloo'\? \(known: auto, .*disk, gloo,"):
        load_carrier(WeightsConfig(carrier="glo"), RunPaths(directory=Path()))


def test_deadlines_grow_with_the_bytes() -> None:
    config = WeightsConfig(base_s=2.0, min_bytes_per_s=1e6)
    assert config.deadline_s(0) == 2.0
    assert config.deadline_s(3_000_000) == 5.0


@pytest.mark.parametrize(("base_s", "silence_s"), [(10.0, 30.0), (0.5, 60.0), (60.0, 1.0)])
def test_a_living_replica_is_heard_in_half_of_each_deadline(
    base_s: float, silence_s: float
) -> None:
    config = WeightsConfig(base_s=base_s, silence_s=silence_s)
    shortest = min(config.deadline_s(0), config.ready_s, config.commit_s, silence_s)
    assert 2 * config.beat_s <= shortest / 2


def test_a_manifest_survives_its_protobuf_form() -> None:
    manifest = StubSource("run", Version(2, 9)).manifest
    about = stamp("run", 4, manifest.version)
    assert manifest_from_message(about, manifest_to_message(manifest)) == manifest


async def test_a_wait_without_progress_ends_and_warns_at_half_of_its_deadline() -> None:
    warnings: list[str] = []
    with pytest.raises(WaitTimeoutError, match=r"the moon: no progress in 0\.2 s"):
        await within(asyncio.Event().wait(), 0.2, "the moon", lambda: warnings.append("late"))
    assert warnings == ["late"]


async def test_a_stall_of_this_process_uses_up_nobodys_deadline() -> None:
    async def steps() -> str:
        for _ in range(3):
            await asyncio.sleep(0.05)
        return "done"

    asyncio.get_running_loop().call_later(0.02, time.sleep, 1.0)
    assert await within(steps(), 0.8, "steps") == "done"


async def test_the_first_failure_of_two_cancels_the_other_and_is_raised_bare() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        raise CorruptError("no")

    with pytest.raises(CorruptError, match="no"):
        await together(waits(), fails())
    assert cancelled.is_set()
    cancelled.clear()
    with pytest.raises(CorruptError, match="no"):
        await first_ends(waits(), fails())
    assert cancelled.is_set()


async def test_a_stuck_call_in_a_worker_thread_blocks_neither_the_loop_nor_another_worker_thread() -> (
    None
):
    release = threading.Event()
    stuck, free = WorkerThread("stuck"), WorkerThread("free")
    waiting = asyncio.create_task(stuck.run(release.wait))
    assert await free.run(lambda: 42) == 42
    waiting.cancel()
    release.set()
    assert await stuck.run(lambda: 43) == 43
    stuck.close()
    with pytest.raises(UnavailableError, match="stuck is closed"):
        await stuck.run(lambda: 44)
    free.close()


async def test_a_gloo_channel_whose_peer_never_comes_gives_up_by_itself(tmp_path: Path) -> None:
    carrier = load_carrier(WeightsConfig(), RunPaths(directory=tmp_path))
    link = Link(run="r", epoch=1, generation=1, endpoint=await carrier.listen(), rank=0)
    channel = carrier.channel(link)
    with pytest.raises(UnavailableError, match="r/e1/g1, rank 0"):
        await channel.open(0.3)
    channel.abort()
    await carrier.close()


async def test_a_gloo_port_in_use_is_a_configuration_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        carrier = load_carrier(WeightsConfig(port=port), RunPaths(directory=tmp_path))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await carrier.listen()


async def test_a_disk_replica_without_the_shared_directory_says_so(tmp_path: Path) -> None:
    carrier = load_carrier(
        WeightsConfig(carrier="disk"), RunPaths(directory=tmp_path / "elsewhere")
    )
    link = Link(run="r", epoch=1, generation=1, endpoint="weights", rank=1)
    channel = carrier.channel(link)
    with pytest.raises(UnavailableError, match=r"a shared run\.dir"):
        await channel.open(1.0)
    await channel.close()
    await carrier.close()


@pytest.mark.parametrize("carrier", ["shm", "disk"])
async def test_a_channel_keeps_nothing_of_the_versions_that_it_has_moved(
    carrier: str, tmp_path: Path
) -> None:
    config, paths = WeightsConfig(carrier=carrier), RunPaths(directory=tmp_path)
    trainer, replica = load_carrier(config, paths), load_carrier(config, paths)
    link = Link(run="r", epoch=1, generation=1, endpoint=await trainer.listen(), rank=0)
    sender, receiver = trainer.channel(link), replica.channel(replace(link, rank=1))
    await receiver.open(60.0)
    versions = [Version(1, step) for step in range(2 + config.keep)]
    for version in versions:
        source = StubSource("r", version)
        await trainer.prepare(source)
        await sender.send(source.manifest, 0, source.bucket(0))
        await receiver.receive(source.manifest, 0, np.empty_like(source.bucket(0)))
    first, alone = versions.pop(0), Version(2, 0)
    assert sys.getrefcount(first) == sys.getrefcount(alone)
    for end in (sender, receiver, trainer, replica):
        await end.close()


@pytest.mark.parametrize("sent", [messages.pack({"token": "\u00fc"}), b"\xff" * 8, b""])
async def test_who_is_no_end_of_a_channel_is_refused_in_one_line(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    rendezvous = Rendezvous()
    host, _, port = (await rendezvous.listen("127.0.0.1", 0)).partition("/")[0].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await rendezvous.close()
    assert "".join(caplog.messages).startswith("a connection to the weight carrier was refused: ")


async def test_a_group_whose_end_cannot_be_opened_fails_at_once_whatever_the_reason() -> None:
    class NoProcess(Channel):
        async def open(self, deadline_s: float) -> None:
            raise OSError("no more processes")

    group = SharedChannel(1, [1, 2], NoProcess())
    group.open(60.0)
    await group.broken.wait()
    assert group.reason == "OSError('no more processes')"


def padded() -> tuple[WeightManifest, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """One bucket of two tensors with four bytes of padding between them."""
    tensors = (
        TensorSpec(name="a", dtype="bfloat16", shape=(2,), bucket=0, offset=0, nbytes=4),
        TensorSpec(name="b", dtype="float32", shape=(1, 2), bucket=0, offset=8, nbytes=8),
    )
    bucket = np.zeros(16, dtype=np.uint8)
    bucket[:4], bucket[8:] = 7, 9
    manifest = WeightManifest(
        run="r",
        version=Version(1, 0),
        tensors=tensors,
        bucket_bytes=(16,),
        bucket_hashes=(digest(bucket),),
    )
    return manifest, bucket


def test_wrong_tensors_are_named_where_each_has_a_hash() -> None:
    manifest, bucket = padded()
    spoiled = bucket.copy()
    spoiled[0] ^= 1
    assert wrong_tensors(manifest, 0, spoiled, ()) == "bucket 0"
    hashes = tuple(tensor_digest(bucket, tensor) for tensor in manifest.tensors)
    assert wrong_tensors(manifest, 0, spoiled, hashes) == "bucket 0: a"
    spoiled[8] ^= 1
    assert wrong_tensors(manifest, 0, spoiled, hashes) == "bucket 0: a and 1 more"
    bucket[4] ^= 1
    assert wrong_tensors(manifest, 0, bucket, hashes) == "bucket 0, between its tensors"


def write_bucket(directory: Path, manifest: WeightManifest, bucket: Uint8) -> None:
    VersionWriter(WeightsConfig(), WeightStore(directory), None).repair(manifest, 0, bucket)


def read_bucket(directory: Path, manifest: WeightManifest, into: Uint8) -> None:
    VersionReader(WeightStore(directory), "r", Held()).read(manifest, 0, into, again=True)


def test_a_bucket_on_disk_comes_back_with_its_padding(tmp_path: Path) -> None:
    manifest, bucket = padded()
    write_bucket(tmp_path, manifest, bucket)
    into = np.full(16, 255, dtype=np.uint8)
    read_bucket(tmp_path, manifest, into)
    assert digest(into) == manifest.bucket_hashes[0]


@pytest.mark.parametrize("spoil", ["missing", "short", "garbage"])
def test_a_file_that_cannot_be_read_is_corrupt(tmp_path: Path, spoil: str) -> None:
    manifest, bucket = padded()
    write_bucket(tmp_path, manifest, bucket)
    (path,) = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    if spoil == "missing":
        path.unlink()
    elif spoil == "short":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(content[:8] + b"x" * 16 + content[24:])
    with pytest.raises(CorruptError, match="model-00001-of-00001"):
        read_bucket(tmp_path, manifest, np.empty(16, dtype=np.uint8))
