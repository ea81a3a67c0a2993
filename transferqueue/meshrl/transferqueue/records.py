"""The encoding of stored records: JSON behind its checksum (contract/frames.py)."""

from __future__ import annotations

import json

import orjson

from meshrl.contract.frames import strip_checksum, with_checksum
from meshrl.contract.types import Json


def fragment(value: Json) -> orjson.Fragment:
    """A JSON value that is part of others, encoded once for all of them."""
    return orjson.Fragment(to_json(value))


def to_json(value: Json) -> bytes:
    """JSON; also takes integers beyond 64 bits, and text that UTF-8 cannot encode (reasons may hold some)."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, default=lambda part: json.loads(orjson.dumps(part))).encode()


def encode_record(value: Json) -> bytes:
    """The record of a JSON value, with its checksum."""
    return with_checksum(to_json(value))


def decode_record(value: bytes, what: str) -> Json:
    """The inverse of `encode_record`. Raises CorruptError."""
    body = strip_checksum(value, what)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(bytes(body))
