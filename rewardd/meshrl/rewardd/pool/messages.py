"""The protocol between the service and its scoring processes: length-prefixed JSON. Nothing is pickled.

frame = uint32 (big-endian) n, then n bytes of JSON
"""

from __future__ import annotations

import json
import struct
from typing import BinaryIO

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Json

HEADER = struct.Struct(">I")
MAX_REPLY_BYTES = 1 << 20
"""Replies are small: a longer one did not come from our code."""


def encode_frame(message: Json) -> bytes:
    """One frame. Raises TypeError or ValueError for what JSON cannot carry."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Json | None:
    """The next frame of a blocking stream; None at its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None


class FrameDecoder:
    """Reads frames from chunks of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Json]:
        """The frames that `chunk` completes.

        Raises:
            CorruptError: the bytes are not frames.
        """
        self._buffer += chunk
        frames, start = [], 0
        while len(self._buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, start)
            if size > MAX_REPLY_BYTES:
                raise CorruptError(f"a scoring process announced a reply of {size} bytes")
            end = start + HEADER.size + size
            if len(self._buffer) < end:
                break
            try:
                frames.append(json.loads(self._buffer[start + HEADER.size : end]))
            except (ValueError, RecursionError) as error:
                raise CorruptError(f"a scoring process sent no JSON: {error}") from error
            start = end
        del self._buffer[:start]
        return frames
