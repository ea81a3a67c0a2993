"""Tasks in the bytes in which they are stored and sent: a serialised meshrl.v1.Task, packed by whoever admits it."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from meshrl.contract.codec.types import decode_task, encode_task
from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import PackedTask, Task
from meshrl.v1 import trajectory_pb2 as pb


def pack_task(task: Task) -> PackedTask:
    """In the bytes in which it came, if it did. Raises UserError when `ground_truth` or `extra_info` is not JSON."""
    return PackedTask(task.packed or encode_task(task).SerializeToString(), unpack_task)


def packed_task(data: bytes) -> PackedTask:
    """What `pack_task` has made of a task; nobody looks into it before its `task` is asked for."""
    return PackedTask(data, unpack_task)


def unpack_task(data: bytes) -> Task:
    """The task of packed bytes. Raises CorruptError."""
    try:
        return decode_task(pb.Task.FromString(data))
    except (DecodeError, UserError) as error:
        raise CorruptError(f"{len(data)} bytes are no task: {error}") from error
