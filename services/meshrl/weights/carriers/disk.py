"""Weights through a directory that trainer and replicas share: one safetensors checkpoint per version.

<run dir>/weights/<epoch>.<step>/    model-00001-of-00003.safetensors …, model.safetensors.index.json, and
the config and tokenizer of the model, so that any engine loads the directory as it is. A version is written
beside its place, flushed to disk and renamed, so whoever sees the directory sees all of it. Bytes are checked
by the receiver, against the manifest. No torch: a bucket is one file, written and read as raw bytes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, CorruptError, UnavailableError
from meshrl.contract.files import sync
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.carrier import Link, Place
from meshrl.weights.checkpoint_files import (
    INDEX,
    companions,
    file_name,
    index_text,
    read_tensors,
    write_tensors,
)
from meshrl.weights.worker_thread import WorkerThread

REACH = "directory"
RATE = 0.5e9

FOLDER = "weights"


class Carrier:
    """Writes versions, keeps the newest, and gives out cells that read them."""

    def __init__(self, config: WeightsConfig, place: Place) -> None:
        self._config = config
        self._place = place
        self._lane = WorkerThread("weights-disk")

    async def listen(self) -> str:
        """The folder, relative to the run's directory."""
        root = self._place.directory / FOLDER
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".*"):  # half-written by a trainer that died
            shutil.rmtree(left, ignore_errors=True)
        return FOLDER

    async def stage(self, source: WeightSource) -> None:
        """Write the whole version once, for all replicas. Raises CapacityError when the disk refuses it."""
        try:
            await self._lane.run(self._stage, source)
        except OSError as error:
            raise CapacityError(
                f"cannot write weights {source.manifest.version} under {self._place.directory}: {error}"
            ) from error

    def cell(self, link: Link) -> DiskChannel:
        """One end of a cell; it has a thread of its own, so that a slow disk delays only this replica."""
        return DiskChannel(self._place.directory / link.endpoint, link)

    async def close(self) -> None:
        """Nothing stays open; the newest versions remain on disk."""
        self._lane.close()

    def _stage(self, source: WeightSource) -> None:
        manifest = source.manifest
        root = self._place.directory / FOLDER
        target, temporary = root / str(manifest.version), root / f".{manifest.version}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for index in range(len(manifest.bucket_bytes)):
            write_bucket(temporary, manifest, index, source.bucket(index))
        self._write_companions(temporary, manifest)
        sync(temporary)
        # A version is written twice only if a publish is repeated; then the bytes are the same.
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        sync(root)
        self._prune(root)

    def _write_companions(self, folder: Path, manifest: WeightManifest) -> None:
        (folder / INDEX).write_text(index_text(manifest))
        for path in companions(self._place.model_path):
            shutil.copyfile(path, folder / path.name)

    def _prune(self, root: Path) -> None:
        versions = sorted(Version.parse(path.name) for path in root.iterdir() if path.is_dir())
        for version in versions[: -self._config.keep]:
            shutil.rmtree(root / str(version), ignore_errors=True)


class DiskChannel:
    """Reads a version bucket by bucket; on the trainer's end, rewrites a bucket that was read corrupted."""

    def __init__(self, root: Path, link: Link) -> None:
        self._root = root
        self._lane = WorkerThread(f"weights-disk-{link.generation}")
        self._sent: set[tuple[Version, int]] = set()

    async def open(self, deadline_s: float) -> None:
        """See the folder. Raises UnavailableError when this process does not."""
        if not await self._lane.run(self._root.is_dir):
            raise UnavailableError(
                f"{self._root} does not exist here: the disk carrier needs a shared run.dir"
            )

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Nothing the first time, because the version is staged; a second time, write the bucket again."""
        key = (manifest.version, index)
        if key in self._sent:
            folder = self._root / str(manifest.version)
            try:
                await self._lane.run(write_bucket, folder, manifest, index, bucket)
            except OSError as error:
                raise UnavailableError(
                    f"cannot rewrite bucket {index} in {folder}: {error}"
                ) from error
        self._sent.add(key)

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        """Read one file into `into`; padding between tensors is zero."""
        await self._lane.run(read_bucket, self._root / str(manifest.version), manifest, index, into)

    def committed(self, version: Version) -> None:
        """Nothing: every version is sent whole."""

    def abort(self) -> None:
        """Leave; a read that is stuck ends in its own thread."""
        self._lane.close()

    async def close(self) -> None:
        """The same."""
        self._lane.close()


def write_bucket(folder: Path, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
    """Write one bucket as a safetensors file, durable and atomic."""
    path = folder / file_name(manifest, index)
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        write_tensors(file, manifest, index, bucket)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_bucket(folder: Path, manifest: WeightManifest, index: int, into: Uint8) -> None:
    """Read what `write_bucket` wrote, laid out as the manifest says.

    Raises:
        CorruptError: the file is missing, cut short or not laid out as the manifest says.
    """
    path = folder / file_name(manifest, index)
    try:
        with path.open("rb") as file:
            read_tensors(file, path.stat().st_size, str(path), manifest, index, into)
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read ({error!r})") from error
