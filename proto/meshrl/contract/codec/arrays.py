"""Arrays as little-endian bytes with a dtype and a shape; decoding copies nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshrl.contract.codec.checks import decoder, encoder, malformed
from meshrl.v1 import trajectory_pb2 as pb

DTYPES: Final = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64"),
    )
}
"""The dtypes that can be sent, by numpy's names."""
_NAMES: Final = {
    given: name for name, dtype in DTYPES.items() for given in (dtype, dtype.newbyteorder(">"))
}
MAX_AXES: Final = 8


def little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array itself where it is C-contiguous and little-endian already, else a copy that is.

    Raises:
        ValueError: the dtype may not travel.
    """
    name = _NAMES.get(array.dtype)
    if name is None:
        raise ValueError(f"dtype {array.dtype.name} is none of {', '.join(DTYPES)}")
    return np.asarray(array, DTYPES[name], order="C")


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, uncopied."""
    return array.reshape(-1).view(np.uint8).data


def dtype_of(name: str) -> np.dtype[Any]:
    """Raises ValueError for a name that may not travel."""
    if name not in DTYPES:
        malformed(f"unknown dtype {name!r} (known: {', '.join(DTYPES)})")
    return DTYPES[name]


def byte_count(dtype: np.dtype[Any], shape: Iterable[int]) -> int:
    """Bytes of an array; raises ValueError for a shape that none has."""
    sizes = tuple(shape)
    if len(sizes) > MAX_AXES or min(sizes, default=0) < 0:
        malformed(f"no array has the shape {list(sizes)}")
    return math.prod(sizes) * dtype.itemsize


def view(data: bytes | memoryview, dtype: np.dtype[Any], shape: Iterable[int]) -> npt.NDArray[Any]:
    """A read-only array over `data`, which is exactly as long as it has to be."""
    if len(data) == 0:
        empty = np.empty(tuple(shape), dtype)
        empty.flags.writeable = False
        return empty
    found = np.frombuffer(data, dtype)
    sizes = tuple(shape)
    return found if len(sizes) == 1 else found.reshape(sizes)


@encoder
def encode_array(array: npt.NDArray[Any]) -> pb.Array:
    """Any array of a known dtype."""
    array = little_endian(array)
    return pb.Array(dtype=_NAMES[array.dtype], shape=array.shape, data=array.tobytes())


@decoder
def decode_array(
    message: pb.Array, dtype: str = "", axes: int | None = None, name: str = ""
) -> npt.NDArray[Any]:
    """A read-only view of the message's bytes; the caller accepts `dtype` and `axes`; `name` is for errors.

    Raises:
        UserError: unknown or other dtype, impossible shape, wrong byte count.
    """
    what = f"{name}: " if name else ""
    given, shape, data = message.dtype, message.shape[:], message.data
    found = dtype_of(given)
    wanted = byte_count(found, shape)
    if len(data) != wanted:
        malformed(f"{what}{given}{shape} takes {wanted} bytes, {len(data)} were sent")
    if dtype and given != dtype:
        malformed(f"{what}want {dtype}, got {given}")
    if axes is not None and len(shape) != axes:
        malformed(f"{what}want {axes} axes, got shape {shape}")
    return view(data, found, shape)
