"""The protocol between the service and its scoring processes: length-prefixed JSON. Nothing is pickled.

frame = uint32 (big-endian) n, then n bytes of JSON
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from typing import BinaryIO

from meshrl.contract.types import Json

MAX_COMPONENTS = 64
MAX_NAME = 80
"""Characters of a key's name in the log."""
MAX_TEXTS, MAX_TEXT = 16, 2000
"""Texts of a score, and characters of each."""
MAX_FLOAT32 = 3.4028234663852886e38
MAX_REASON = 2000
"""Characters of a reason."""
HEADER = struct.Struct(">I")
log = logging.getLogger(__name__)


class DroppedKeys:
    """Keys of results that are no component: each is logged once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, dropped: Mapping[str, str]) -> None:
        """Warn of those that were not reported."""
        for key, why in dropped.items():
            if key not in self._told and len(self._told) < MAX_COMPONENTS:
                self._told.add(key)
                log.warning("%s: this key is dropped, now and in other rows", printable(why))


def printable(text: str) -> str:
    """A function's text, cut, and without characters that a log or a column cannot hold."""
    text = text[:MAX_REASON]
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


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
