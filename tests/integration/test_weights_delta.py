"""Sparse updates over the carriers that send what changed: exact, encoded once, and whole where it must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme

from meshrl.common.sockets import Certificates
from meshrl.contract.errors import (
    CapacityError,
    ForbiddenError,
    MeshError,
    NotFoundError,
    UserError,
)
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.rpc import tls
from meshrl.rpc.errors import from_rpc
from meshrl.v1 import weight_patches_pb2 as pb
from meshrl.v1 import weight_patches_pb2_grpc as rpc
from meshrl.weights.carriers import delta
from meshrl.weights.delta import encode
from meshrl.weights.fleet import ReplicaState
from tests.doubles.weights import HashSink, StubSource

from ..waiting import until
from .weights_fleet import RUN, flip, opened

BUCKETS = 4


def sparse(step: int, density: float = 0.01, epoch: int = 1) -> StubSource:
    """64 KiB of bfloat16 a bucket, of which `density` changes with each step."""
    return StubSource(RUN, Version(epoch, step), dtype="bfloat16", density=density)


class FetchRecorder:
    """Sees what the trainer's carrier writes, and may spoil it."""

    def __init__(self) -> None:
        self.whole: list[int] = []
        """Bytes of each whole bucket, of which the tests' fit into one message."""
        self.patches: list[int] = []
        self.spoil: Callable[[bytes], bytes] | None = None
        """Applied to the next patch, once."""

    def clear(self) -> None:
        self.whole, self.patches = [], []

    def pass_on(self, part: pb.WeightPatchPart) -> pb.WeightPatchPart:
        (self.whole if part.whole else self.patches).append(len(part.data))
        if self.spoil is None or part.whole:
            return part
        spoil, self.spoil = self.spoil, None
        return pb.WeightPatchPart(whole=False, data=spoil(part.data))


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> FetchRecorder:
    fetches, serve = FetchRecorder(), delta.Carrier.serve

    async def tapped(carrier: delta.Carrier, request: pb.WeightPatchRequest, write: Any) -> None:
        await serve(carrier, request, lambda part: write(fetches.pass_on(part)))

    monkeypatch.setattr(delta.Carrier, "serve", tapped)
    return fetches


async def test_a_hundred_updates_are_exact_and_each_patch_is_encoded_once_for_all(
    tmp_path: Path, fetches: FetchRecorder
) -> None:
    async with opened("delta", tmp_path) as fleet:
        engines = await fleet.joined("one", "two", "three")
        for step in range(100):
            source = sparse(step)
            await fleet.carry(source)
            for engine in engines:
                assert engine.version == Version(1, step)
                assert engine.hashes == source.manifest.bucket_hashes
        carrier = fleet.coordinator._transport
        assert isinstance(carrier, delta.Carrier)
        assert carrier.patches.encoded == 99 * BUCKETS
        assert len(fetches.whole) == 3 * BUCKETS
        assert len(fetches.patches) == 3 * 99 * BUCKETS
        assert sum(fetches.patches) < 0.02 * 3 * 99 * source.manifest.total_bytes


async def test_a_joiner_gets_all_of_it_while_the_others_get_patches(
    tmp_path: Path, fetches: FetchRecorder
) -> None:
    async with opened("delta", tmp_path) as fleet:
        await fleet.joined("early")
        await fleet.carry(sparse(0))
        await fleet.carry(sparse(1))
        fetches.clear()
        late = await fleet.joined_late("late")
        assert (len(fetches.whole), len(fetches.patches)) == (BUCKETS, 0)
        assert fleet.moved_bytes()["late"] == sum(fetches.whole)
        fetches.clear()
        source = sparse(2)
        await fleet.carry(source)
        assert (len(fetches.whole), len(fetches.patches)) == (0, 2 * BUCKETS)
        assert list(fleet.moved_bytes().values()) == 2 * [sum(fetches.patches) // 2]
        assert late.hashes == source.manifest.bucket_hashes


async def test_a_replica_that_leaves_and_comes_back_goes_on_from_what_it_holds(
    tmp_path: Path, fetches: FetchRecorder
) -> None:
    async with opened("delta", tmp_path) as fleet:
        (engine,) = await fleet.joined("one")
        await fleet.carry(sparse(0))
        generation = fleet.coordinator.fleet().replicas[0].generation
        fleet.coordinator._remove(generation, "shown out by the test")
        await until(lambda: fleet.coordinator.fleet().replicas[0].generation != generation)
        await until(lambda: fleet.state_of("one") is ReplicaState.SERVING)
        fetches.clear()
        source = sparse(1)
        await fleet.carry(source)
        assert (len(fetches.whole), len(fetches.patches)) == (0, BUCKETS)
        assert engine.hashes == source.manifest.bucket_hashes


async def test_a_trainer_that_takes_over_has_no_base_and_sends_whole_buckets(
    tmp_path: Path, fetches: FetchRecorder
) -> None:
    async with opened("delta", tmp_path) as fleet:
        (engine,) = await fleet.joined("one")
        await fleet.carry(sparse(5))
        await fleet.close_coordinator()
        fleet.epoch = 2
        await fleet.open_coordinator()
        fetches.clear()
        await fleet.carry(sparse(4, epoch=2))
        await until(lambda: engine.version == Version(2, 4))
        assert (len(fetches.whole), len(fetches.patches)) == (BUCKETS, 0)
        await fleet.carry(sparse(5, epoch=2))
        assert (len(fetches.whole), len(fetches.patches)) == (BUCKETS, BUCKETS)
        assert engine.hashes == sparse(5, epoch=2).manifest.bucket_hashes


async def test_what_changed_too_much_goes_whole(tmp_path: Path, fetches: FetchRecorder) -> None:
    async with opened("delta", tmp_path) as fleet:
        (engine,) = await fleet.joined("one")
        await fleet.carry(sparse(0, density=0.25))
        await fleet.carry(sparse(1, density=0.25))
        assert (len(fetches.whole), len(fetches.patches)) == (2 * BUCKETS, 0)
        assert engine.hashes == sparse(1, density=0.25).manifest.bucket_hashes


async def test_a_base_is_a_version_that_was_committed_not_one_that_was_staged(
    tmp_path: Path, fetches: FetchRecorder
) -> None:
    class Refusing(HashSink):
        """Cannot stage version 1, at the first try."""

        refused = False

        async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
            if manifest.version.step == 1 and not self.refused:
                self.refused = True
                raise CapacityError("no memory left for the moment")
            await super().stage_weights(manifest, buckets)

    async with opened("delta", tmp_path) as fleet:
        (healthy,) = await fleet.joined("healthy")
        refusing = Refusing()
        await fleet.joined(refusing=refusing)
        await fleet.carry(sparse(0))
        await fleet.carry(sparse(1))
        assert (healthy.version, refusing.version) == (Version(1, 1), Version(1, 0))
        fetches.clear()
        await until(lambda: refusing.version == Version(1, 1))
        assert (len(fetches.whole), len(fetches.patches)) == (0, BUCKETS)
        assert refusing.hashes == healthy.hashes == sparse(1).manifest.bucket_hashes


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "unreadable": lambda data: b"x" + data[1:],
    "cut short": lambda data: data[:-1],
    "readable, but wrong": lambda data: encode(
        np.zeros(1 << 16, dtype=np.uint8), np.ones(1 << 16, dtype=np.uint8)
    ),
}


@pytest.mark.parametrize("spoiled", SPOILED)
async def test_a_patch_that_arrives_spoiled_is_found_and_the_bucket_sent_whole(
    tmp_path: Path, fetches: FetchRecorder, spoiled: str
) -> None:
    async with opened("delta", tmp_path) as fleet:
        (engine,) = await fleet.joined("one")
        await fleet.carry(sparse(0))
        fetches.clear()
        fetches.spoil = SPOILED[spoiled]
        source = sparse(1)
        await fleet.carry(source)
        assert fetches.spoil is None
        assert (len(fetches.whole), len(fetches.patches)) == (1, BUCKETS)
        assert engine.hashes == source.manifest.bucket_hashes
        fetches.clear()
        await fleet.carry(sparse(2))
        assert (len(fetches.whole), len(fetches.patches)) == (0, BUCKETS)
        assert engine.commits == fleet.published == [Version(1, step) for step in range(3)]


class Scribbling(HashSink):
    """An engine that writes to the memory that it was given."""

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        await super().stage_weights(manifest, buckets)
        buckets[2][::7] ^= 1


async def test_a_base_that_was_written_to_is_found_and_the_bucket_sent_whole(
    tmp_path: Path, fetches: FetchRecorder
) -> None:
    async with opened("delta", tmp_path) as fleet:
        (engine,) = await fleet.joined(one=Scribbling())
        await fleet.carry(sparse(0))
        fetches.clear()
        source = sparse(1)
        await fleet.carry(source)
        assert (len(fetches.whole), len(fetches.patches)) == (1, BUCKETS)
        assert engine.hashes == source.manifest.bucket_hashes


async def test_the_trainer_keeps_only_versions_that_replicas_serve(tmp_path: Path) -> None:
    async with opened("delta", tmp_path) as fleet:
        await fleet.joined("one", "two")
        for step in range(6):
            await fleet.carry(sparse(step))
        carrier = fleet.coordinator._transport
        assert isinstance(carrier, delta.Carrier)
        assert carrier.patches.versions == [Version(1, 4), Version(1, 5)]


async def test_only_requests_with_the_secret_may_fetch(tmp_path: Path) -> None:
    async with opened("delta", tmp_path) as fleet:
        await fleet.joined("one")
        await fleet.carry(sparse(0))
        carrier = fleet.coordinator._transport
        assert isinstance(carrier, delta.Carrier)
        endpoint = carrier.endpoint
        address, _, secret = endpoint.rpartition("#")
        async with grpc.aio.insecure_channel(address) as channel:

            async def ask(**request: Any) -> MeshError:
                call = rpc.WeightPatchesStub(channel).Fetch(pb.WeightPatchRequest(**request))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                return from_rpc(caught.value, "it")

            assert isinstance(await ask(run=RUN, generation=1, version="1.0"), ForbiddenError)
            assert isinstance(
                await ask(secret=secret, run=RUN, generation=9, version="1.0"), NotFoundError
            )
            assert isinstance(
                await ask(secret=secret, run=RUN, generation=1, version="seven"), UserError
            )


async def test_patches_travel_over_tls_where_the_mesh_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetches: FetchRecorder
) -> None:
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    mine = authority.issue_cert("127.0.0.1")
    (tmp_path / "key.pem").touch(0o600)
    mine.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in mine.cert_chain_pems:
        blob.write_to_path(tmp_path / "cert.pem", append=True)
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    monkeypatch.setattr(tls, "_in_use", Certificates(**files))
    async with opened("delta", tmp_path) as fleet:
        (engine,) = await fleet.joined("one")
        await fleet.carry(sparse(0))
        await fleet.carry(sparse(1))
        assert engine.hashes == sparse(1).manifest.bucket_hashes
        assert len(fetches.patches) == BUCKETS
        carrier = fleet.coordinator._transport
        assert isinstance(carrier, delta.Carrier)
        endpoint = carrier.endpoint
        address = endpoint.partition("#")[0]
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await rpc.WeightPatchesStub(channel).Fetch(pb.WeightPatchRequest()).read()


@pytest.mark.parametrize("scheme", ["", "file://"])
async def test_a_hundred_updates_through_a_directory_are_exact_also_for_who_joins_late(
    tmp_path: Path, scheme: str
) -> None:
    async with opened("disk", tmp_path, directory=f"{scheme}{tmp_path}/objects") as fleet:
        engines = await fleet.joined("one", "two")
        for step in range(100):
            if step == 47:
                engines.append(await fleet.joined_late("late"))
            source = sparse(step)
            await fleet.carry(source)
            for engine in engines:
                assert engine.hashes == source.manifest.bucket_hashes
        folders = sorted(path.name for path in (tmp_path / "objects" / RUN).iterdir())
        assert folders == [f"1.{step}" for step in range(90, 100)]
        anchor, patch = (tmp_path / "objects" / RUN / name for name in ("1.90", "1.99"))
        size = {
            path: sum(each.stat().st_size for each in path.iterdir()) for path in (anchor, patch)
        }
        assert size[patch] < 0.02 * size[anchor]
        sent = sum(file.stat().st_size for file in patch.glob("*.patch"))
        assert set(fleet.moved_bytes().values()) == {sent}
        assert fleet.published == [Version(1, step) for step in range(100)]


async def test_a_patch_that_rots_in_the_store_is_found_and_put_there_whole(tmp_path: Path) -> None:
    async with opened("disk", tmp_path, directory=str(tmp_path / "objects")) as fleet:
        (early,) = await fleet.joined("early")
        for step in range(3):
            await fleet.carry(sparse(step))
        path = tmp_path / "objects" / RUN / "1.1" / "model-00003-of-00004.patch"
        flip(path, path.stat().st_size // 2)
        late = await fleet.joined_late("late")
        assert late.hashes == early.hashes == sparse(2).manifest.bucket_hashes
        source = sparse(3)
        await fleet.carry(source)
        assert late.hashes == early.hashes == source.manifest.bucket_hashes
        anchors = sorted((tmp_path / "objects" / RUN).glob("*/model.safetensors.index.json"))
        assert [each.parent.name for each in anchors] == ["1.0", "1.3"]


async def test_a_trainer_that_takes_over_begins_a_chain_of_its_own(tmp_path: Path) -> None:
    async with opened("disk", tmp_path, directory=str(tmp_path / "objects")) as fleet:
        (engine,) = await fleet.joined("one")
        for step in range(4):
            await fleet.carry(sparse(step))
        await fleet.close_coordinator()
        fleet.epoch = 2
        await fleet.open_coordinator()
        for step in (2, 3):
            await fleet.carry(sparse(step, epoch=2))
        await until(lambda: engine.version == Version(2, 3))
        late = await fleet.joined_late("late")
        assert late.hashes == engine.hashes == sparse(3, epoch=2).manifest.bucket_hashes
        folders = sorted(path.name for path in (tmp_path / "objects" / RUN).iterdir())
        assert folders == ["2.2", "2.3"]
