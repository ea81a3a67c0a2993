"""A dictionary for compression: learned from the rows of a backup, read from a file."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Final

from meshrl.contract.codec.compression import DICTIONARY_BYTES, train_dictionary
from meshrl.contract.errors import UserError
from meshrl.transferqueue.operations.backup import opened
from meshrl.transferqueue.store import Table

SAMPLE_BYTES: Final = 32 << 20
"""Frames to learn from; zstandard wants about a hundred times the dictionary."""
LARGEST_BYTES: Final = 1 << 20
"""Of a dictionary: it travels in one message, and every connection keeps it."""


async def train(backup: Path, nbytes: int = DICTIONARY_BYTES) -> bytes:
    """A dictionary of at most `nbytes` from the frames of a backup.

    Raises:
        NotFoundError: no backup is there. UserError: it has too few frames. CorruptError: it cannot be read.
    """
    frames: list[bytes] = []
    left = SAMPLE_BYTES
    store = opened(backup)
    try:
        await store.load()
        async with aclosing(store.export()) as pieces:
            async for piece in pieces:
                for table, key, value in piece:
                    if table is Table.PAYLOAD and key[:1] == b"c" and value and left > 0:
                        frames.append(value)
                        left -= len(value)
    finally:
        await store.close()
    try:
        return train_dictionary(frames, nbytes)
    except ValueError as error:
        raise UserError(
            f"{backup} has {len(frames)} frames of rows, too few to learn a dictionary from: take a"
            " backup while a run has a few hundred rows in its queue"
        ) from error


def read(path: Path | None) -> bytes:
    """What `queue.compression_dictionary` names; nothing for None. Raises UserError."""
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise UserError(f"queue.compression_dictionary: {path}: {error.strerror}") from error
    if not 0 < len(data) <= LARGEST_BYTES:
        raise UserError(
            f"queue.compression_dictionary: {path} is empty or larger than {LARGEST_BYTES} bytes: want"
            " a file of `meshrl queue train-dictionary`"
        )
    return data
