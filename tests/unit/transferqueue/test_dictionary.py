"""A dictionary learned from a backup of a queue, and one read from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshrl.contract.codec.compression import FrameCompressor
from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.frames import pack
from meshrl.transferqueue import dictionary
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.disk import DiskStore


def frame(seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    return pack([{"tokens": draw.zipf(1.3, 60).clip(max=60_000).astype(np.int32)}])


async def backup(folder: Path, frames: int) -> Path:
    store = DiskStore(folder)
    await store.load()
    keys = [b"c" + number.to_bytes(16, "big") for number in range(frames)]
    await store.apply(
        [Operation(Table.PAYLOAD, key, frame(number)) for number, key in enumerate(keys)]
    )
    await store.apply([Operation(Table.PAYLOAD, b"t" + bytes(12), b"a task, which is no frame")])
    await store.close()
    return folder


async def test_a_dictionary_is_learned_from_the_frames_of_a_backup(tmp_path: Path) -> None:
    learned = await dictionary.train(await backup(tmp_path / "b", 400), 4096)
    assert 0 < len(learned) <= 4096
    sizes = [
        sum(len(by.squeeze(frame(seed)) or frame(seed)) for seed in range(500, 600))
        for by in (FrameCompressor(dictionary=learned), FrameCompressor())
    ]
    assert sizes[0] < sizes[1]


async def test_what_has_too_few_rows_or_is_no_backup_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 frames of rows, too few"):
        await dictionary.train(await backup(tmp_path / "b", 1))
    with pytest.raises(NotFoundError, match="no backup"):
        await dictionary.train(tmp_path / "none")


def test_a_file_that_is_no_dictionary_is_told(tmp_path: Path) -> None:
    assert dictionary.read(None) == b""
    with pytest.raises(UserError, match=r"queue\.compression_dictionary: .*No such file"):
        dictionary.read(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="train-dictionary"):
        dictionary.read(tmp_path / "empty")
