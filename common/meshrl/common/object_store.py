"""Objects under a path or URL that fsspec opens. Whatever its library raises becomes one of our errors, in one line.

An object store cannot rename or lock; what is written there comes in one put. In a local directory an object is
written under a hidden name, flushed and renamed. Everything here blocks.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from meshrl.common.files import sync
from meshrl.contract.errors import CapacityError, ConfigError, CorruptError, UnavailableError


class ObjectStore:
    """A directory that fsspec opens."""

    def __init__(self, location: str | Path, key: str) -> None:
        """Opens nothing yet.

        Args:
            location: a path or URL; a Path is a local directory whatever is in its name.
            key: of the recipe, for errors.

        Raises:
            ConfigError: no such store can be opened here.
        """
        self.url = str(location)
        if isinstance(location, Path):
            self._files, self._root = LocalFileSystem(), str(location.absolute())
        else:
            self._files, self._root = _opened(location, key)
        self._local = isinstance(self._files, LocalFileSystem)

    def write(self, path: str, content: bytes) -> None:
        """Write one object, and its folder; durable and atomic in a local directory.

        Raises:
            CapacityError: the store refuses.
        """
        full = f"{self._root}/{path}"
        try:
            if self._local:
                _write_file(Path(full), content)
                return
            if (
                not self._files.async_impl
            ):  # object stores have no folders; s3fs would make a bucket
                self._files.makedirs(full.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(full, content)
        except Exception as error:  # every store has errors of its own
            raise CapacityError(f"cannot write {path} to {self.url}: {one_line(error)}") from error

    def upload(self, path: str, file: Path) -> None:
        """Write one object from a file, as `write` does, without reading all of it into memory.

        Raises:
            CapacityError: the store refuses.
        """
        full = f"{self._root}/{path}"
        try:
            if self._local:
                _write_file(Path(full), file)
                return
            if not self._files.async_impl:
                self._files.makedirs(full.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), full)
        except Exception as error:
            raise CapacityError(f"cannot write {path} to {self.url}: {one_line(error)}") from error

    def read(self, path: str) -> bytes:
        """Read one object.

        Raises:
            CorruptError: there is none.
            UnavailableError: the store fails.
        """
        try:
            content: bytes = self._files.cat_file(f"{self._root}/{path}")
        except FileNotFoundError as error:
            raise CorruptError(f"{self.url}: {path} is missing") from error
        except Exception as error:
            raise UnavailableError(
                f"cannot read {path} from {self.url}: {one_line(error)}"
            ) from error
        return content

    def has(self, path: str) -> bool:
        """Whether there is such an object. Raises UnavailableError when the store fails."""
        try:
            self._files.invalidate_cache()
            return bool(self._files.exists(f"{self._root}/{path}"))
        except Exception as error:
            raise UnavailableError(f"cannot see {path} in {self.url}: {one_line(error)}") from error

    def entries(self, path: str) -> dict[str, int]:
        """Entries of a folder: objects with their bytes, folders with 0. Raises UnavailableError."""
        try:
            self._files.invalidate_cache()
            found: list[dict[str, Any]] = self._files.ls(f"{self._root}/{path}", detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise UnavailableError(
                f"cannot list {path} in {self.url}: {one_line(error)}"
            ) from error
        named = ((each["name"].rstrip("/").rpartition("/")[2], each) for each in found)
        return {name: int(each["size"] or 0) for name, each in named if name}

    def remove(self, folder: str) -> None:
        """Delete a folder; nothing where there is none. Raises UnavailableError."""
        try:
            self._files.invalidate_cache()
            self._files.rm(f"{self._root}/{folder}", recursive=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise UnavailableError(
                f"cannot remove {folder} in {self.url}: {one_line(error)}"
            ) from error


def is_local(location: str) -> bool:
    """Whether a path or URL names a directory, or memory, of the machine that opens it."""
    return fsspec.utils.get_protocol(location) in (*LocalFileSystem.protocol, "memory")


def one_line(error: Exception) -> str:
    """The text of an error."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _opened(url: str, key: str) -> tuple[Any, str]:
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ConfigError(f"{key}: {url}: {error} (for S3: pip install 'meshrl[s3]')") from error
    except ValueError as error:
        raise ConfigError(f"{key}: {url}: {error}") from error
    return files, root


def _write_file(path: Path, content: bytes | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same object at once.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 22)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
