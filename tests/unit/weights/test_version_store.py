"""Anchors and patches in a store: what is written when, what is kept, what is seen, and what a reader makes of it."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import deserialize

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, ConfigError, CorruptError, UnavailableError
from meshrl.contract.types import Uint8, Version
from meshrl.weights import version_store
from meshrl.weights.delta.patches import Held
from meshrl.weights.version_store import MARK, VersionReader, VersionWriter, WeightStore
from tests.doubles.weights import StubSource

RUN = "a run/with a slash"
BUCKETS = 2


class Flaky(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """Memory that refuses writes on request."""

    protocol = "flaky"
    writes_left = 1 << 30
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the class that it extends
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        assert type(value) is bytes  # s3fs takes nothing else
        if Flaky.writes_left == 0:
            raise OSError("no room\nno room at all")
        Flaky.writes_left -= 1
        super().pipe_file(path, value, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(params=["memory", "flaky", "local", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "store")
    if request.param == "file":
        return f"file://{tmp_path}/store"
    Flaky.writes_left = 1 << 30
    return f"{request.param}://{secrets.token_hex(4)}/weights"


def source_at(step: int, density: float = 0.01, epoch: int = 1, run: str = RUN) -> StubSource:
    return StubSource(
        run,
        Version(epoch, step),
        buckets=BUCKETS,
        bucket_bytes=1 << 13,
        dtype="bfloat16",
        density=density,
    )


def writer(url: str, **options: Any) -> VersionWriter:
    return VersionWriter(
        WeightsConfig.model_validate({"directory": url, **options}), WeightStore(url), None
    )


def read(url: str, source: StubSource, held: Held | None = None) -> list[Uint8]:
    reader = VersionReader(WeightStore(url), source.manifest.run, held or Held())
    buckets = [np.empty(nbytes, dtype=np.uint8) for nbytes in source.manifest.bucket_bytes]
    for index, into in enumerate(buckets):
        reader.read(source.manifest, index, into, again=False)
    return buckets


def same(buckets: list[Uint8], source: StubSource) -> bool:
    return all(np.array_equal(bucket, source.bucket(i)) for i, bucket in enumerate(buckets))


def chain_of(url: str, source: StubSource) -> list[int]:
    chain = WeightStore(url).chain(source.manifest.run, source.manifest.version)
    return [version.step for version in chain]


def test_every_version_that_is_kept_can_be_read_by_a_joiner_at_any_moment(url: str) -> None:
    chain = writer(url, keep=3, anchor_every=4)
    for step in range(14):
        chain.write(source_at(step))
        assert chain_of(url, source_at(step)) == list(range(step - step % 4, step + 1))
        for number in range(max(0, step - 2), step + 1):
            assert same(read(url, source_at(number)), source_at(number))


def test_what_no_kept_version_needs_is_removed(url: str) -> None:
    chain, store = writer(url, keep=2, anchor_every=5), WeightStore(url)
    left = {}
    for step in range(7):
        chain.write(source_at(step))
        left[step] = sorted(store.folders(RUN))
    assert left[4] == [f"1.{each}" for each in range(5)]
    assert left[5] == [f"1.{each}" for each in range(6)]  # 1.4 is kept, and needs all before it
    assert left[6] == ["1.5", "1.6"]


def test_a_patch_is_small_and_an_anchor_a_checkpoint(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    chain = VersionWriter(
        WeightsConfig(directory="store"), WeightStore(str(tmp_path / "store")), model
    )
    for step in range(2):
        chain.write(source_at(step, run="r"))
    anchor, patch = tmp_path / "store/r/1.0", tmp_path / "store/r/1.1"
    assert (anchor / "config.json").read_text() == "{}"
    assert sum(path.stat().st_size for path in patch.iterdir()) < 0.1 * (BUCKETS << 13)
    source = source_at(0, run="r")
    tensor = source.manifest.tensors[3]
    loaded = dict(deserialize((anchor / "model-00002-of-00002.safetensors").read_bytes()))
    sent = source.bucket(1)[tensor.offset : tensor.offset + tensor.nbytes]
    assert loaded[tensor.name]["data"] == sent.tobytes()
    assert loaded[tensor.name]["dtype"] == "BF16"


def test_an_anchor_is_written_when_too_much_changed_and_on_a_resume(url: str) -> None:
    chain = writer(url)
    for step in range(3):
        chain.write(source_at(step))
    assert chain_of(url, source_at(2)) == [0, 1, 2]
    dense = source_at(3, density=0.5)
    chain.write(dense)
    assert chain_of(url, dense) == [3]
    chain.write(source_at(4, density=0.5))
    assert chain_of(url, source_at(4)) == [4]
    resumed = writer(url)
    resumed.write(source_at(2, epoch=2))
    resumed.write(source_at(3, epoch=2))
    assert chain_of(url, source_at(3, epoch=2)) == [2, 3]
    assert same(read(url, source_at(3, epoch=2)), source_at(3, epoch=2))


def test_one_dense_bucket_among_sparse_ones_goes_whole_in_a_patch(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        version_store, "MAX_DENSITY", 0.6
    )  # of a version: as if it had more buckets
    chain = writer(url)
    old, new, dense = source_at(0), source_at(1), source_at(1, density=0.99)
    new._buckets[1] = dense.bucket(1)
    hashes = new.manifest.bucket_hashes[0], dense.manifest.bucket_hashes[1]
    new._manifest = replace(new.manifest, bucket_hashes=hashes)
    chain.write(old)
    chain.write(new)
    assert chain_of(url, new) == [0, 1]
    assert same(read(url, new), new)


def test_a_replica_reads_only_what_it_lacks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, held = writer(url), Held()
    for step in range(3):
        chain.write(source_at(step))
    first = read(url, source_at(1))
    for index, bucket in enumerate(first):
        held.arrived(source_at(1).manifest, index, bucket)
    held.commit(Version(1, 1))
    chain.write(source_at(3))
    paths: list[str] = []
    original = WeightStore.read

    def spy(store: WeightStore, path: str) -> bytes:
        paths.append(path.partition("/1.")[2])
        return original(store, path)

    monkeypatch.setattr(WeightStore, "read", spy)
    assert same(read(url, source_at(3), held), source_at(3))
    assert {path[0] for path in paths} == {"2", "3"}
    assert same(first, source_at(1))  # what the engine may hold is not written to


def test_a_version_without_its_last_object_does_not_exist_and_is_removed(url: str) -> None:
    store, chain = WeightStore(url), writer(url)
    chain.write(source_at(0))
    folder = "a%20run%2Fwith%20a%20slash/1.1"
    store.write(f"{folder}/model-00001-of-00002.patch", b"half")  # killed here
    with pytest.raises(CorruptError, match=r"1\.1/version\.json is missing"):
        read(url, source_at(1))
    resumed = writer(url)
    resumed.write(source_at(1, epoch=2))
    assert "1.1" not in store.folders(RUN)
    assert same(read(url, source_at(0)), source_at(0))


def test_after_a_write_that_failed_half_way_comes_an_anchor() -> None:
    url = f"flaky://{secrets.token_hex(4)}"
    Flaky.writes_left = 1 << 30
    chain = writer(url)
    chain.write(source_at(0))
    for left in range(3):  # two patches and the last object
        Flaky.writes_left = left
        with pytest.raises(
            CapacityError, match=r"cannot write .* to flaky://\w+: no room no room at all$"
        ):
            chain.write(source_at(1 + left))
        Flaky.writes_left = 1 << 30
        with pytest.raises(CorruptError):
            read(url, source_at(1 + left))
        chain.write(source_at(1 + left))
        assert chain_of(url, source_at(1 + left)) == [1 + left]
        assert same(read(url, source_at(1 + left)), source_at(1 + left))


def test_a_spoiled_patch_is_repaired_whole_and_an_anchor_follows(url: str) -> None:
    chain, store = writer(url), WeightStore(url)
    for step in range(2):
        chain.write(source_at(step))
    store.write("a%20run%2Fwith%20a%20slash/1.1/model-00001-of-00002.patch", b"mdp1 spoiled")
    source = source_at(1)
    reader, into = VersionReader(store, RUN, Held()), np.empty(1 << 13, dtype=np.uint8)
    with pytest.raises(CorruptError, match="patch"):
        reader.read(source.manifest, 0, into, again=False)
    chain.repair(source.manifest, 0, source.bucket(0))
    reader.read(source.manifest, 0, into, again=True)
    assert np.array_equal(into, source.bucket(0))
    chain.write(source_at(2))
    assert chain_of(url, source_at(2)) == [2]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"run": "other", "chain": ["1.0"]}', b'{"chain": ["x"]}']
)
def test_a_version_file_that_makes_no_sense_is_corrupt_in_one_line(content: bytes) -> None:
    url = f"memory://{secrets.token_hex(4)}"
    writer(url).write(source_at(0))
    WeightStore(url).write("a%20run%2Fwith%20a%20slash/1.0/version.json", content)
    with pytest.raises(CorruptError, match=r"version\.json cannot be read") as caught:
        read(url, source_at(0))
    assert "\n" not in str(caught.value)


def test_runs_do_not_mix_in_one_directory(url: str) -> None:
    for run in ("one", "two"):
        writer(url).write(source_at(0, run=run))
        writer(url).write(source_at(3 if run == "one" else 4, epoch=2, run=run))
    assert same(read(url, source_at(3, epoch=2, run="one")), source_at(3, epoch=2, run="one"))
    assert same(read(url, source_at(4, epoch=2, run="two")), source_at(4, epoch=2, run="two"))


def test_stores_that_cannot_be_used_give_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"weights\.directory: nfs4://x: Protocol not known"):
        WeightStore("nfs4://x")

    def absent(*_: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(ConfigError, match=r"Install s3fs to access S3 .*'meshrl\[s3\]'"):
        WeightStore("s3://bucket/weights")


def test_a_replica_that_sees_another_store_gets_an_error() -> None:
    url = f"memory://{secrets.token_hex(4)}"
    reader = VersionReader(WeightStore(url), RUN, Held())
    with pytest.raises(UnavailableError, match="trainer and rollout need the same store"):
        reader.check()
    WeightStore(url).write(MARK, b"{}")
    reader.check()


def test_in_the_directory_of_a_run_every_version_is_a_whole_checkpoint(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    chain = VersionWriter(WeightsConfig(anchor_every=10, keep=3), store, None)
    for step in range(5):
        chain.write(source_at(step))
    folders = sorted((tmp_path / "weights").iterdir())
    assert [folder.name for folder in folders] == ["1.2", "1.3", "1.4"]
    for step, folder in zip(range(2, 5), folders, strict=True):
        content = (folder / "model-00001-of-00002.safetensors").read_bytes()
        tensor = source_at(step).manifest.tensors[1]
        sent = source_at(step).bucket(0)[tensor.offset : tensor.offset + tensor.nbytes]
        assert dict(deserialize(content))[tensor.name]["data"] == sent.tobytes()


def test_a_local_version_has_no_name_before_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = WeightStore(tmp_path), []
    original = WeightStore.write

    def spy(store: WeightStore, path: str, content: bytes) -> None:
        original(store, path, content)
        seen.append(sorted(each.name for each in tmp_path.iterdir()))
        if len(seen) == 5:
            raise KeyboardInterrupt  # killed with one bucket of 1.1 written

    monkeypatch.setattr(WeightStore, "write", spy)
    chain = VersionWriter(WeightsConfig(), store, None)
    chain.write(source_at(0))
    with pytest.raises(KeyboardInterrupt):
        chain.write(source_at(1))
    assert seen == [[".1.0"]] * 4 + [[".1.1", "1.0"]]
    monkeypatch.setattr(WeightStore, "write", original)
    VersionWriter(WeightsConfig(), store, None).write(source_at(0, epoch=2))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["1.0", "2.0"]
