"""A version as the files of a safetensors checkpoint: one file per bucket, index, config and tokenizer.

The format only; version_store.py knows the paths. No torch: a bucket's tensors are written and read as raw bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import TensorSpec, Uint8, WeightManifest

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
