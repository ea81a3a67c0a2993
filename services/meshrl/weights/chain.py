"""Versions in object storage: an anchor, now and then, that holds all of the weights, and patches from there on.

    <directory>/<run>/1.10/   model-00001-of-00004.safetensors …, index, config, tokenizer, version.json    an anchor
                      1.11/   model-00001-of-00004.patch …, version.json                                    changes
                      1.12/   …

A store need not rename or lock: `version.json` names the chain (anchor first) and is written last, so a folder
without one does not exist yet; nothing is changed afterwards. An anchor begins a chain: on a start or a resume, after
`anchor_every` versions, when more than `max_density` has changed, and after a bucket was found corrupted. An anchor
loads as a checkpoint of its own. What the newest `keep` versions need is kept.

Everything here blocks: it runs in a thread of the carrier's.
"""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import fsspec.core

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, ConfigError, CorruptError, UnavailableError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.checkpoint_files import (
    INDEX,
    companions,
    file_name,
    index_text,
    read_tensors,
    write_tensors,
)
from meshrl.weights.delta import apply, head, whole
from meshrl.weights.delta.held_versions import Held
from meshrl.weights.delta.patches import patch_between, word_bytes

logger = logging.getLogger(__name__)

MARK: Final = "meshrl-weights.json"
"""In the directory itself: both ends see the same store."""
_ABOUT: Final = "version.json"


class Store:
    """A directory that fsspec opens. Whatever its library raises becomes one of our errors, in one line."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError when no such store can be opened here."""
        if not url:
            raise ConfigError("weights.directory: the carrier object needs a path or a URL")
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ConfigError(
                f"weights.directory: {url}: {error} (for S3: pip install 'meshrl[s3]')"
            ) from error
        except ValueError as error:
            raise ConfigError(f"weights.directory: {url}: {error}") from error
        self.url = url

    def write(self, path: str, content: bytes) -> None:
        """One object, with the folder that it lies in. Raises CapacityError."""
        full = f"{self._root}/{path}"
        try:
            if (
                not self._files.async_impl
            ):  # object stores have no folders; s3fs would make a bucket
                self._files.makedirs(full.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(full, content)
        except Exception as error:  # every store has errors of its own
            raise CapacityError(f"cannot write {path} to {self.url}: {_line(error)}") from error

    def read(self, path: str) -> bytes:
        """One object. Raises CorruptError when there is none, UnavailableError when the store fails."""
        try:
            content: bytes = self._files.cat_file(f"{self._root}/{path}")
        except FileNotFoundError as error:
            raise CorruptError(f"{self.url}: {path} is missing") from error
        except Exception as error:
            raise UnavailableError(f"cannot read {path} from {self.url}: {_line(error)}") from error
        return content

    def has(self, path: str) -> bool:
        """Whether there is such an object. Raises UnavailableError when the store fails."""
        try:
            self._files.invalidate_cache()
            return bool(self._files.exists(f"{self._root}/{path}"))
        except Exception as error:
            raise UnavailableError(f"cannot see {path} in {self.url}: {_line(error)}") from error

    def folders(self, path: str) -> list[str]:
        """The names under `path`. Raises UnavailableError."""
        try:
            self._files.invalidate_cache()
            found: list[str] = self._files.ls(f"{self._root}/{path}", detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise UnavailableError(f"cannot list {path} in {self.url}: {_line(error)}") from error
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def remove(self, path: str) -> None:
        """A folder; `version.json` first, so that nobody sees half of it. Raises UnavailableError."""
        full = f"{self._root}/{path}"
        try:
            if self._files.exists(f"{full}/{_ABOUT}"):
                self._files.rm_file(f"{full}/{_ABOUT}")
            self._files.rm(full, recursive=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise UnavailableError(f"cannot remove {path} in {self.url}: {_line(error)}") from error


class ChainWriter:
    """The trainer's end: writes each version once, for all replicas."""

    def __init__(self, config: WeightsConfig, store: Store, model_path: Path | None) -> None:
        self._config = config
        self._store = store
        self._model_path = model_path
        self._last: WeightSource | None = None
        self._chain: tuple[Version, ...] = ()
        """From the newest anchor to `_last`; empty: the next one is an anchor."""

    def write(self, source: WeightSource) -> None:
        """A version, then what is no longer needed is removed.

        Raises:
            CapacityError: the store refuses.
        """
        manifest = source.manifest
        if self._chain and manifest.version == self._chain[-1]:
            return  # published twice
        patches = self._patches(source)
        chain = (*(self._chain if patches is not None else ()), manifest.version)
        self._chain = ()  # what fails half-way is no base: an anchor follows it
        folder = _folder(manifest.run, manifest.version)
        if patches is None:
            self._write_anchor(folder, source)
        else:
            for index, patch in enumerate(patches):
                self._store.write(f"{folder}/{_patch_name(manifest, index)}", patch)
        about = {"run": manifest.run, "chain": [str(version) for version in chain]}
        self._store.write(f"{folder}/{_ABOUT}", json.dumps(about).encode())
        self._chain, self._last = chain, source
        try:
            self._prune(manifest.run)
        except UnavailableError as error:  # the version is there; the next one prunes again
            logger.warning("%s", error)

    def repair(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Put a bucket that was read corrupted beside what is there, whole. Raises CapacityError."""
        self._write_whole(_folder(manifest.run, manifest.version), manifest, index, bucket)
        self._chain = ()  # something in it is spoiled

    def _patches(self, source: WeightSource) -> list[bytes] | None:
        """One for each bucket; None when an anchor is due."""
        manifest, last = source.manifest, self._last
        if last is None or not 0 < len(self._chain) < self._config.anchor_every:
            return None
        if manifest.run != last.manifest.run or manifest.tensors != last.manifest.tensors:
            return None
        allowed = self._config.max_density * manifest.total_bytes
        patches = []
        for index in range(len(manifest.bucket_bytes)):
            bucket, width = source.bucket(index), word_bytes(manifest, index)
            patch = patch_between(last, manifest, index, bucket, self._config.max_density)
            allowed -= bucket.nbytes if patch is None else width * head(patch).changed
            if allowed < 0:
                return None
            patches.append(whole(bucket, word_bytes=width) if patch is None else patch)
        return patches

    def _write_anchor(self, folder: str, source: WeightSource) -> None:
        manifest = source.manifest
        for index in range(len(manifest.bucket_bytes)):
            self._write_whole(folder, manifest, index, source.bucket(index))
        self._store.write(f"{folder}/{INDEX}", index_text(manifest).encode())
        for path in companions(self._model_path):
            self._store.write(f"{folder}/{path.name}", path.read_bytes())

    def _write_whole(
        self, folder: str, manifest: WeightManifest, index: int, bucket: Uint8
    ) -> None:
        content = io.BytesIO()
        write_tensors(content, manifest, index, bucket)
        self._store.write(f"{folder}/{file_name(manifest, index)}", content.getvalue())

    def _prune(self, run: str) -> None:
        """Remove what the newest `keep` versions do not need, and what a trainer that died has left."""
        found = {}
        for name in self._store.folders(quote(run, safe="")):
            try:
                found[Version.parse(name)] = name
            except ValueError:
                continue  # not ours
        needed: set[Version] = set()
        kept = 0
        for version in sorted(found, reverse=True):
            if kept == self._config.keep:
                break
            if version in needed:
                kept += 1
                continue
            try:
                needed.update(read_chain(self._store, run, version))
                kept += 1
            except CorruptError:
                continue  # not complete: it does not exist
        for version in found.keys() - needed:
            self._store.remove(_folder(run, version))


class ChainReader:
    """A replica's end: an anchor and patches, or only the patches after what it holds."""

    def __init__(self, store: Store, run: str, held: Held) -> None:
        self._store = store
        self._run = run
        self._held = held
        self._chain: tuple[Version, ...] = ()
        """Of the version that was read last."""

    def check(self) -> None:
        """Raises UnavailableError when this is not the trainer's store."""
        if not self._store.has(MARK):
            raise UnavailableError(
                f"weights.directory: {self._store.url} holds no {MARK}: trainer and rollout need the same store"
            )

    def read(self, manifest: WeightManifest, index: int, into: Uint8, *, again: bool) -> None:
        """Fill `into`; `again` when what the chain gave was wrong, and the trainer has put the bucket there whole.

        Raises:
            CorruptError: something is missing or cannot be read.
            UnavailableError: the store fails.
        """
        if again:
            self._read_whole(manifest, manifest.version, index, into)
            return
        if not self._chain or self._chain[-1] != manifest.version:
            self._chain = read_chain(self._store, self._run, manifest.version)
        held = self._held.base(manifest, index)
        if held is not None and held[0] in self._chain:
            start = self._chain.index(held[0])
            into[:] = held[1]
        else:
            start = 0
            self._read_whole(manifest, self._chain[0], index, into)
        for version in self._chain[start + 1 :]:
            path = f"{_folder(self._run, version)}/{_patch_name(manifest, index)}"
            apply(into, self._store.read(path), into)

    def _read_whole(
        self, manifest: WeightManifest, version: Version, index: int, into: Uint8
    ) -> None:
        path = f"{_folder(self._run, version)}/{file_name(manifest, index)}"
        content = self._store.read(path)
        read_tensors(io.BytesIO(content), len(content), path, manifest, index, into)


def read_chain(store: Store, run: str, version: Version) -> tuple[Version, ...]:
    """Anchor first, `version` last. Raises CorruptError when it is not there, UnavailableError."""
    path = f"{_folder(run, version)}/{_ABOUT}"
    try:
        about: Any = json.loads(store.read(path))
        chain = tuple(Version.parse(name) for name in about["chain"])
        if about["run"] != run or not chain or chain[-1] != version:
            raise ValueError("it is of something else")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{store.url}: {path} cannot be read ({error})") from error
    return chain


def _folder(run: str, version: Version) -> str:
    return f"{quote(run, safe='')}/{version}"


def _patch_name(manifest: WeightManifest, index: int) -> str:
    return file_name(manifest, index).replace(".safetensors", ".patch")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
