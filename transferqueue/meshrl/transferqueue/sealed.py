"""Records and tasks at rest: JSON and frames, each with its checksum in front (contract/frames.py)."""

from __future__ import annotations

import json

import numpy as np
import orjson

from meshrl.contract.errors import UserError
from meshrl.contract.frames import Frame, pack, seal, unseal
from meshrl.contract.nouns import Json, Message, SamplingParams, Task


class Encoded:
    """A part of a JSON value that is JSON already. No dataclass: orjson would write its fields."""

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        self.text = text


def to_json(value: Json) -> bytes:
    """JSON, also of text that UTF-8 cannot say (reasons may be) and of integers beyond 64 bits."""
    try:
        return orjson.dumps(value, default=lambda part: orjson.Fragment(part.text))
    except TypeError:
        return json.dumps(value, default=lambda part: json.loads(part.text)).encode()


def seal_json(value: Json) -> bytes:
    """A JSON value, sealed."""
    return seal(to_json(value))


def unseal_json(value: bytes, what: str) -> Json:
    """The inverse of `seal_json`. Raises CorruptError."""
    body = unseal(value, what)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(bytes(body))


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
    return pack([{"prompt_ids": task.prompt_ids, "task": np.frombuffer(text.encode(), np.uint8)}])


def unpack_task(value: bytes, what: str) -> Task:
    """The inverse of `pack_task`. Raises CorruptError."""
    columns = Frame(value, what).row(0)
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
