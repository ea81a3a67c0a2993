"""DCP checkpoints, read without trusting them and written so that the reason of a failure reaches every rank.

DCP keeps its index as a pickle: it is read by an unpickler that knows DCP's classes and no others.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from meshrl.contract.errors import CorruptError

INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint"
_SAFE = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {
        "Size",
        "float32",
        "float16",
        "bfloat16",
        "float64",
        "int64",
        "int32",
        "uint8",
        "bool",
    },
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its place in Python 3.13
    "collections": {"OrderedDict"},
}
"""By module: plain records of DCP, and the values in them."""


class SafeReader(FileSystemReader):
    """DCP's file reader, for an index of DCP's own classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            CorruptError: it names anything that DCP does not write.
        """
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                index = _IndexUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError) as error:
            raise CorruptError(f"{path}: not an index that DCP wrote ({error})") from error
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        metadata: Metadata = index
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner, which would unpickle whatever is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Numbers, strings and containers pass; anything else raises `pickle.UnpicklingError`."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _member(owner: Any, name: str) -> Any:
    """Stands for `getattr`, by which some Pythons (Debian 12's 3.11.2) store a member of an enum."""
    if not (isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__):
        raise pickle.UnpicklingError(f"builtins.getattr of {owner!r}, {name!r}")
    return owner[name]


class _FolderOfAnother(FileSystem):
    """Never makes the folder above again: whoever removed it wants nothing written there."""

    @override
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(exist_ok=True)


class PlainWriter(FileSystemWriter):
    """Raises the operating system's error where one is the cause of torch's, and writes below a folder that is there.

    On a full disk torch's archive writer reports its position in the file, and the cause of that error is lost when
    DCP pickles it for the other ranks.
    """

    def __init__(self, path: Path) -> None:
        """`path` is made; the folder above it must be there."""
        super().__init__(path)
        self.fs = _FolderOfAnother()

    @override
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with _operating_system_errors():
            return super().write_data(*args, **kwargs)

    @override
    def finish(self, *args: Any, **kwargs: Any) -> None:
        with _operating_system_errors():
            super().finish(*args, **kwargs)


@contextmanager
def _operating_system_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error.__context__
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror) from error
