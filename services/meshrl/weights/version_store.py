"""Versions of the weights in a directory that fsspec opens: whole ones (anchors), and patches between them.

    <directory>/<run>/1.10/   model-00001-of-00004.safetensors …, index, config, tokenizer, version.json    an anchor
                      1.11/   model-00001-of-00004.patch …, version.json                                    changes
                      1.12/   …
    <run.dir>/weights/1.12/   an anchor: in the run's own directory every version is one

An object store cannot rename or lock: `version.json` names the chain (anchor first) and is written last, so a folder
without one does not exist yet; nothing is changed afterwards. In a local directory each file is also flushed to disk,
and a version's folder is written under a hidden name and renamed. A chain begins with an anchor: on a start or a
resume, after `anchor_every` versions, when more than `MAX_DENSITY` has changed, and after a bucket was found
corrupted. An anchor loads as a checkpoint of its own. What the newest `keep` versions need is kept.

Everything here blocks: it runs in a thread of the carrier.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote

from meshrl.common.files import sync
from meshrl.common.object_store import ObjectStore, one_line
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, CorruptError, UnavailableError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import TensorSpec, Uint8, Version, WeightManifest
from meshrl.weights.delta import apply, head, whole
from meshrl.weights.delta.patches import MAX_DENSITY, Held, patch_between, word_bytes

logger = logging.getLogger(__name__)

MARK: Final = "meshrl-weights.json"
"""A file in the directory itself: a replica that finds it sees the trainer's store."""
_VERSION_FILE: Final = "version.json"
INDEX = "model.safetensors.index.json"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


class WeightStore(ObjectStore):
    """The directory of versions."""

    def __init__(self, location: str | Path) -> None:
        """Opens nothing yet.

        Args:
            location: a path or URL, where each run has a folder of its own (`weights.directory`); or the path of a
                directory that belongs to one run.

        Raises:
            ConfigError: no such store can be opened here.
        """
        super().__init__(location, "weights.directory")
        self._shared = isinstance(location, str)

    def folder(self, run: str, version: Version) -> str:
        """The folder of a version."""
        return f"{self._runs_folder(run)}/{version}".lstrip("/")

    def draft(self, folder: str) -> str:
        """The folder to write a version to before `publish`: hidden in a local directory, else the final one."""
        parent, slash, name = folder.rpartition("/")
        return f"{parent}{slash}.{name}" if self._local else folder

    def publish(self, folder: str) -> None:
        """Rename the draft of a complete version to its final name. Raises CapacityError."""
        if not self._local:
            return
        target, draft = Path(self._root, folder), Path(self._root, self.draft(folder))
        try:
            sync(draft)
            # A version is written twice only if a publish is repeated; then the bytes are the same.
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
            sync(target.parent)
        except OSError as error:
            raise CapacityError(f"cannot rename {draft}: {one_line(error)}") from error

    def folders(self, run: str) -> list[str]:
        """The names of the folders of a run, complete or not. Raises UnavailableError."""
        return list(self.entries(self._runs_folder(run)))

    def remove(self, folder: str) -> None:
        """Delete a folder; `version.json` first, so that nobody sees half of it. Raises UnavailableError."""
        first = f"{self._root}/{folder}/{_VERSION_FILE}"
        try:
            if self._files.exists(first):
                self._files.rm_file(first)
        except Exception as error:
            raise UnavailableError(
                f"cannot remove {folder} in {self.url}: {one_line(error)}"
            ) from error
        super().remove(folder)

    def chain(self, run: str, version: Version) -> tuple[Version, ...]:
        """The versions that `version` is made of: its anchor first, itself last.

        Raises:
            CorruptError: the version is not there, or only in part.
            UnavailableError: the store fails.
        """
        path = f"{self.folder(run, version)}/{_VERSION_FILE}"
        try:
            about: Any = json.loads(self.read(path))
            chain = tuple(Version.parse(name) for name in about["chain"])
            if about["run"] != run or not chain or chain[-1] != version:
                raise ValueError("it belongs to another version")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"{self.url}: {path} cannot be read ({error})") from error
        return chain

    def _runs_folder(self, run: str) -> str:
        return quote(run, safe="") if self._shared else ""


class VersionWriter:
    """The trainer's end: writes each version once, for all replicas."""

    def __init__(self, config: WeightsConfig, store: WeightStore, model_path: Path | None) -> None:
        """Nothing is written before `write`.

        Args:
            config: `keep`, and, for a store in `directory`, `anchor_every`.
            store: where to.
            model_path: the checkpoint whose config and tokenizer are copied into each anchor.
        """
        self._config = config
        self._anchor_every = config.anchor_every if config.directory else 1
        self._store = store
        self._model_path = model_path
        self._last: WeightSource | None = None
        self._chain: tuple[Version, ...] = ()
        """Versions from the newest anchor to `_last`; empty: the next one is an anchor."""
        self._repaired = False
        """Since `begin`."""

    def write(self, source: WeightSource) -> None:
        """Write a version that is whole, then remove what is no longer needed.

        Raises:
            CapacityError: the store refuses.
        """
        if self._chain and source.manifest.version == self._chain[-1]:
            return  # published twice
        draft = self.begin(source)
        for index in range(len(source.manifest.bucket_bytes)):
            draft.add(index)
        self.finish(draft)

    def begin(self, source: WeightSource) -> Draft:
        """A version to which buckets are added as they come, in their order; writes nothing yet."""
        manifest, last = source.manifest, self._last
        if not 0 < len(self._chain) < self._anchor_every:
            last = None
        if last is not None and (
            (manifest.run, manifest.tensors) != (last.manifest.run, last.manifest.tensors)
        ):
            last = None
        chain, self._chain = self._chain, ()  # what fails half-way is no base: an anchor follows it
        self._repaired = False
        return Draft(self._store, source, last, chain)

    def finish(self, draft: Draft) -> None:
        """Make the version visible, all of whose buckets were added; then remove what is no longer needed.

        Raises:
            CapacityError: the store refuses.
        """
        run = draft.source.manifest.run
        chain = draft.publish(self._model_path)
        self._chain = () if self._repaired else chain
        self._last = draft.source if self._anchor_every > 1 else None
        try:
            self.prune(run)
        except UnavailableError as error:  # the version is there; the next one prunes again
            logger.warning("%s", error)

    def repair(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Write a bucket that was read corrupted into the version's folder, whole. Raises CapacityError."""
        folder = self._store.folder(manifest.run, manifest.version)
        _write_whole(self._store, folder, manifest, index, bucket)
        self._chain, self._repaired = (), True  # something in it is corrupted

    def prune(self, run: str) -> None:
        """Remove what the newest `keep` versions do not need, and what a trainer that died has left unfinished.

        Raises:
            UnavailableError: the store fails.
        """
        versions = set()
        for name in self._store.folders(run):
            try:
                version = Version.parse(name.removeprefix("."))
            except ValueError:
                continue  # not ours
            if name.startswith("."):
                self._store.remove(self._store.draft(self._store.folder(run, version)))
            else:
                versions.add(version)
        needed: set[Version] = set()
        complete = 0
        for version in sorted(versions, reverse=True):
            if complete == self._config.keep:
                break
            if version in needed:
                complete += 1
                continue
            try:
                needed.update(self._store.chain(run, version))
                complete += 1
            except CorruptError:
                continue  # not complete: it does not exist
        for version in versions - needed:
            self._store.remove(self._store.folder(run, version))


class Draft:
    """A version that is being written: as patches while they are small enough together, else as an anchor."""

    def __init__(
        self,
        store: WeightStore,
        source: WeightSource,
        base: WeightSource | None,
        chain: tuple[Version, ...],
    ) -> None:
        """`base` is the version before, which `chain` ends with; None: an anchor is due."""
        self.source = source
        self._store = store
        self._base = base
        self._chain = chain
        self._folder = store.folder(source.manifest.run, source.manifest.version)
        self._draft = store.draft(self._folder)
        self._allowed = MAX_DENSITY * source.manifest.total_bytes
        """Bytes of words that may yet change before an anchor is written instead."""
        self._patches: list[bytes] = []
        self._next = 0
        """The first bucket that is not written: of an anchor."""

    def add(self, index: int) -> None:
        """Add the next bucket. Raises CapacityError."""
        if self._base is not None and not self._add_patch(self._base, index):
            self._base = None
        if self._base is None:
            self._write_up_to(index)

    def publish(self, model_path: Path | None) -> tuple[Version, ...]:
        """Let the version be seen; returns the chain that it ends.

        Raises:
            CapacityError: the store refuses.
        """
        manifest = self.source.manifest
        for index, patch in enumerate(self._patches):
            self._store.write(f"{self._draft}/{_patch_name(manifest, index)}", patch)
        if self._base is None:
            self._store.write(f"{self._draft}/{INDEX}", index_text(manifest).encode())
            for path in companions(model_path):
                self._store.write(f"{self._draft}/{path.name}", path.read_bytes())
        before = self._chain if self._base is not None else ()
        chain = (*before, manifest.version)
        about = {"run": manifest.run, "chain": [str(version) for version in chain]}
        self._store.write(f"{self._draft}/{_VERSION_FILE}", json.dumps(about).encode())
        self._store.publish(self._folder)
        return chain

    def _add_patch(self, base: WeightSource, index: int) -> bool:
        """False when too much has changed, in all buckets so far."""
        manifest, bucket = self.source.manifest, self.source.bucket(index)
        width = word_bytes(manifest, index)
        patch = patch_between(base, manifest, index, bucket)
        self._allowed -= bucket.nbytes if patch is None else width * head(patch).changed
        self._patches.append(whole(bucket, word_bytes=width) if patch is None else patch)
        return self._allowed >= 0

    def _write_up_to(self, last: int) -> None:
        self._patches = []
        manifest = self.source.manifest
        for index in range(self._next, last + 1):
            _write_whole(self._store, self._draft, manifest, index, self.source.bucket(index))
        self._next = last + 1


class VersionReader:
    """A replica's end: reads an anchor and patches, or only the patches after what the replica holds."""

    def __init__(self, store: WeightStore, run: str, held: Held) -> None:
        self._store = store
        self._run = run
        self._held = held
        self._chain: tuple[Version, ...] = ()
        """Anchor and patches of the version that was read last."""

    def check(self) -> None:
        """Raises UnavailableError when this is not the trainer's store."""
        if not self._store.has(MARK):
            raise UnavailableError(
                f"{self._store.url} holds no {MARK}: trainer and rollout need the same store "
                "(weights.directory, or without one a shared run.dir)"
            )

    def read(self, manifest: WeightManifest, index: int, into: Uint8, *, again: bool) -> int:
        """Fill `into`; returns how many bytes were read.

        Args:
            manifest: of the version.
            index: of the bucket.
            into: uint8[bucket_bytes[index]].
            again: what the chain gave was wrong, and the trainer has written the bucket there whole.

        Raises:
            CorruptError: something is missing or cannot be read.
            UnavailableError: the store fails.
        """
        if again:
            return self._read_whole(manifest, manifest.version, index, into)
        if not self._chain or self._chain[-1] != manifest.version:
            self._chain = self._store.chain(self._run, manifest.version)
        held = self._held.base(manifest, index)
        if held is not None and held[0] in self._chain:
            start, moved = self._chain.index(held[0]), 0
            into[:] = held[1]
        else:
            start, moved = 0, self._read_whole(manifest, self._chain[0], index, into)
        for version in self._chain[start + 1 :]:
            folder = self._store.folder(self._run, version)
            patch = self._store.read(f"{folder}/{_patch_name(manifest, index)}")
            apply(into, patch, into)
            moved += len(patch)
        return moved

    def _read_whole(
        self, manifest: WeightManifest, version: Version, index: int, into: Uint8
    ) -> int:
        path = f"{self._store.folder(self._run, version)}/{file_name(manifest, index)}"
        content = self._store.read(path)
        read_tensors(io.BytesIO(content), len(content), path, manifest, index, into)
        return len(content)


def _write_whole(
    store: WeightStore, folder: str, manifest: WeightManifest, index: int, bucket: Uint8
) -> None:
    content = io.BytesIO()
    write_tensors(content, manifest, index, bucket)
    store.write(f"{folder}/{file_name(manifest, index)}", content.getvalue())


def _patch_name(manifest: WeightManifest, index: int) -> str:
    return file_name(manifest, index).replace(".safetensors", ".patch")


# A version as a safetensors checkpoint: one file per bucket, index, config and tokenizer. No torch: raw bytes.


def file_name(manifest: WeightManifest, index: int) -> str:
    """The name of a bucket's file."""
    return f"model-{index + 1:05d}-of-{len(manifest.bucket_bytes):05d}.safetensors"


def index_text(manifest: WeightManifest) -> str:
    """The content of the file INDEX, which maps tensors to files."""
    index = {
        "metadata": {"total_size": manifest.total_bytes},
        "weight_map": {t.name: file_name(manifest, t.bucket) for t in manifest.tensors},
    }
    return json.dumps(index)


def companions(model_path: Path | None) -> Iterator[Path]:
    """The config and the tokenizer of a model, which make a loadable checkpoint of weights."""
    if model_path is not None:
        for pattern in _COMPANIONS:
            yield from model_path.glob(pattern)


def write_tensors(file: BinaryIO, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
    """Write one bucket as a safetensors file."""
    tensors = _tensors(manifest, index)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns its data
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        file.write(bucket.data[tensor.offset : tensor.offset + tensor.nbytes])


def read_tensors(
    file: BinaryIO, size: int, name: str, manifest: WeightManifest, index: int, into: Uint8
) -> None:
    """Read what `write_tensors` wrote, laid out as the manifest says; padding between tensors is zero.

    Args:
        file: at its beginning.
        size: its bytes.
        name: of the file, for errors.
        manifest: of the version.
        index: of the bucket.
        into: uint8[bucket_bytes[index]].

    Raises:
        CorruptError: it is cut short or not laid out as the manifest says.
        OSError: it cannot be read.
    """
    tensors = _tensors(manifest, index)
    into[:] = 0
    view = into.data
    try:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length + sum(t.nbytes for t in tensors) != size:
            raise CorruptError(f"{name}: not the size that its manifest says")
        header = json.loads(file.read(length))
        for tensor in tensors:
            begin, end = header[tensor.name]["data_offsets"]
            if end - begin != tensor.nbytes:
                raise CorruptError(f"{name}: {tensor.name} has {end - begin} bytes")
            file.seek(8 + length + begin)
            file.readinto(view[tensor.offset : tensor.offset + tensor.nbytes])  # type: ignore[attr-defined]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{name}: cannot be read ({error!r})") from error


def _tensors(manifest: WeightManifest, index: int) -> list[TensorSpec]:
    return sorted((t for t in manifest.tensors if t.bucket == index), key=lambda t: t.offset)
