"""Bytes at rest: a checksum around every value, columns packed into one frame, tasks as a frame.

    value = xxh3_64 (8 bytes, little-endian) + body
    frame = count u8, then per column (name length u8, name, dtype u8, rank u8, sizes u32 …), zeros to 8,
            then each column's little-endian bytes, padded to a multiple of 8 likewise

A frame is read without copying: the arrays are views of the value. Never pickle.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.nouns import Json, Message, SamplingParams, Task

DTYPES = ("<i4", "|u1", "<f4", "<i8", "<f8", "<f2", "|i1", "<i2", "<u2", "<u4", "<u8", "|b1")
"""Code is the position; append only."""
_CODES = {name: code for code, name in enumerate(DTYPES)}
_SUM = struct.Struct("<Q")


def seal(body: bytes) -> bytes:
    """`body` with its checksum in front."""
    return _SUM.pack(xxhash.xxh3_64_intdigest(body)) + body


def unseal(value: bytes, what: str) -> memoryview:
    """The body of a sealed value.

    Raises:
        CorruptError: the checksum does not fit; names `what`.
    """
    body = memoryview(value)[_SUM.size :]
    if len(value) < _SUM.size or _SUM.unpack_from(value)[0] != xxhash.xxh3_64_intdigest(body):
        raise CorruptError(f"{what}: {len(value)} stored bytes do not match their checksum")
    return body


def seal_json(value: Json) -> bytes:
    """A JSON value, sealed."""
    return seal(json.dumps(value, separators=(",", ":")).encode())


def unseal_json(value: bytes, what: str) -> Json:
    """The inverse of `seal_json`. Raises CorruptError."""
    return json.loads(bytes(unseal(value, what)))


def storable(array: npt.NDArray[Any]) -> bool:
    """True when a column of this dtype and rank can be stored."""
    return _little(array.dtype).str in _CODES and array.ndim <= 4


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.str in _CODES else dtype.newbyteorder("<")


def pack(columns: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Columns as one sealed frame; each must be `storable`."""
    header = bytearray([len(columns)])
    bodies: list[bytes] = []
    for name, array in columns.items():
        encoded = name.encode()
        dtype = _little(array.dtype)
        header += bytes([len(encoded)]) + encoded + bytes([_CODES[dtype.str], array.ndim])
        header += struct.pack(f"<{array.ndim}I", *array.shape)
        bodies.append(np.ascontiguousarray(array, dtype=dtype).tobytes())
        bodies.append(bytes(-len(bodies[-1]) % 8))
    header += bytes(-len(header) % 8)
    return seal(b"".join([bytes(header), *bodies]))


def unpack(
    value: bytes, what: str, wanted: Iterable[str] | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The columns of a frame (all, or those `wanted` that it has), as read-only views of `value`.

    Raises:
        CorruptError: the checksum does not fit.
    """
    body = unseal(value, what)
    names = None if wanted is None else frozenset(wanted)
    entries: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
    at = 1
    for _ in range(body[0]):
        end = at + 1 + body[at]
        name = bytes(body[at + 1 : end]).decode()
        dtype, rank = np.dtype(DTYPES[body[end]]), body[end + 1]
        entries.append((name, dtype, struct.unpack_from(f"<{rank}I", body, end + 2)))
        at = end + 2 + 4 * rank
    at += -at % 8
    found: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, shape in entries:
        count = math.prod(shape)
        if names is None or name in names:
            found[name] = np.frombuffer(body, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
        at += -at % 8
    return found


def pack_task(task: Task) -> bytes:
    """A task as a sealed frame.

    Raises:
        UserError: `ground_truth` or `extra_info` is not JSON.
    """
    sampling = task.sampling
    fields = {
        "run": task.run,
        "task_id": task.task_id,
        "messages": [[message.role, message.content] for message in task.messages],
        "data_source": task.data_source,
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.extra_info),
        "program": task.program,
        "sampling": {name: getattr(sampling, name) for name in sampling.__slots__},
        "group_size": task.group_size,
        "deadline_s": task.deadline_s,
        "priority": task.priority,
    }
    try:
        text = json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"task {task.task_id}: ground_truth and extra_info must be JSON ({error})"
        ) from error
    return pack({"prompt_ids": task.prompt_ids, "task": np.frombuffer(text.encode(), np.uint8)})


def unpack_task(value: bytes, what: str) -> Task:
    """The inverse of `pack_task`. Raises CorruptError."""
    columns = unpack(value, what)
    fields = json.loads(columns["task"].tobytes())
    sampling = fields.pop("sampling")
    sampling["stop"] = tuple(sampling["stop"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    messages = tuple(Message(role=role, content=text) for role, text in fields.pop("messages"))
    return Task(
        prompt_ids=columns["prompt_ids"],
        messages=messages,
        sampling=SamplingParams(**sampling),
        **fields,
    )
