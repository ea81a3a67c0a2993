"""Frames compressed and decompressed: the same bytes come back, fewer travel, and no input crashes it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshrl.contract import codec
from meshrl.contract.codec import bulk as compression
from meshrl.contract.codec.bulk import (
    FrameCompressor,
    Narrowing,
    compressed,
    decompressed,
    narrowed,
    wanted,
)
from meshrl.contract.errors import CorruptError
from meshrl.contract.frames import Frame, pack
from meshrl.v1 import queue_pb2 as pb

COMPRESSOR = FrameCompressor()


def row(seed: int, length: int = 700) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "tokens": draw.zipf(1.3, length).clip(max=60_000).astype(np.int32),
        "loss_mask": (np.arange(length) > 200).astype(np.uint8),
        "rollout_logprobs": -draw.exponential(1.0, length).astype(np.float32),
        "spans": np.array([[1, 2, 200, length]], dtype=np.int64),
        "reward": np.array([0.5], dtype=np.float32),
    }


def frame(rows: int = 8, seed: int = 0) -> bytes:
    return pack([row(seed + number) for number in range(rows)])


def test_a_frame_comes_back_to_the_byte() -> None:
    original = frame()
    smaller = COMPRESSOR.compress(original)
    assert smaller is not None
    assert len(smaller) < 0.7 * len(original)
    assert COMPRESSOR.decompress(smaller) == original


DTYPES = st.sampled_from(["<i4", "|u1", "<f4", "<i8", "<f8", "<f2", "|i1", "<i2", "<u2", "|b1"])


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.lists(DTYPES, min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_any_frame_comes_back_to_the_byte(
    data: st.DataObject, dtypes: list[str], rows: int
) -> None:
    shapes = [(data.draw(st.integers(0, 40)),) for _ in range(rows)]
    columns = [
        {f"c{number}": data.draw(hnp.arrays(dtype, shape)) for number, dtype in enumerate(dtypes)}
        for shape in shapes
    ]
    original = pack(columns)
    smaller = COMPRESSOR.compress(original)
    assert smaller is None or COMPRESSOR.decompress(smaller) == original


@pytest.mark.parametrize(
    ("column", "narrowing"),
    [
        (np.array([0, 65535], np.int32), Narrowing.UINT16),
        (np.array([0, 65536], np.int32), Narrowing.NONE),
        (np.array([-1, 5], np.int32), Narrowing.NONE),
        (np.array([0, 1, 1], np.uint8), Narrowing.BITS),
        (np.array([0, 2], np.uint8), Narrowing.NONE),
        (np.array([0.1], np.float32), Narrowing.NONE),
        (np.array([], np.int32), Narrowing.NONE),
    ],
)
def test_a_column_is_narrowed_only_where_no_bit_is_lost(
    column: np.ndarray, narrowing: Narrowing
) -> None:
    assert narrowed(column)[0] is narrowing


def test_noise_is_left_alone() -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 62, 5000)
    assert COMPRESSOR.compress(pack([{"noise": noise}])) is None


def test_a_cut_or_changed_frame_is_corrupt_and_never_larger_than_announced() -> None:
    smaller = COMPRESSOR.compress(frame(2))
    assert smaller is not None
    draw = np.random.default_rng(2)
    for cut in range(0, len(smaller), 37):
        with pytest.raises(CorruptError):
            COMPRESSOR.decompress(smaller[:cut])
    for _ in range(400):
        broken = bytearray(smaller)
        broken[draw.integers(0, len(broken))] ^= 1 << draw.integers(0, 8)
        try:
            result = COMPRESSOR.decompress(bytes(broken))
            Frame(result).columns  # noqa: B018
        except CorruptError:
            continue
        assert result == frame(2), "the checksum missed a changed byte"


def test_a_frame_larger_than_the_limit_is_refused_before_it_is_made() -> None:
    bomb = COMPRESSOR.compress(pack([{"zeros": np.zeros(1 << 20, np.int64)}]))
    assert bomb is not None
    assert len(bomb) < 10_000
    with pytest.raises(CorruptError, match="at most 1048576"):
        COMPRESSOR.decompress(bomb, limit=1 << 20)


@pytest.mark.parametrize(
    ("mode", "address", "on"),
    [
        ("auto", "127.0.0.1:7001", False),
        ("auto", "[::1]:7001", False),
        ("auto", "ipv6:%5B::1%5D:7001", False),
        ("auto", "localhost:7001", False),
        ("auto", "unix:/run/queue", False),
        ("auto", "10.0.0.4:7001", True),
        ("auto", "ipv4:10.0.0.4:7001", True),
        ("auto", "queue.cluster:7001", True),
        ("zstd", "127.0.0.1:7001", True),
        ("off", "10.0.0.4:7001", False),
    ],
)
def test_auto_compresses_between_hosts(mode: str, address: str, on: bool) -> None:
    assert wanted(mode, address) is on  # type: ignore[arg-type]


def test_a_message_is_compressed_when_it_is_sent_and_decompressed_when_it_is_parsed() -> None:
    frames = [frame(2, seed) for seed in range(4)]
    message = codec.Bulk(pb.WriteRequest(), frames)
    sent = message.compressed().SerializeToString()
    assert len(sent) < 0.7 * len(message.SerializeToString())
    received = codec.parser(pb.WriteRequest)(sent)
    assert received.frames == frames
    assert received.ByteSize() > sum(map(len, frames))


def test_a_message_of_bombs_is_refused() -> None:
    bomb = compressed(pack([{"zeros": np.zeros(1 << 20, np.int64)}]))
    assert len(bomb) < 10_000
    sent = codec.Bulk(pb.WriteRequest(), [bomb] * 9).SerializeToString()
    with pytest.raises(DecodeError, match="compressed frame of at most"):
        codec.parser(pb.WriteRequest)(sent)


def test_a_frame_whose_checksum_looks_like_the_magic_is_known_by_its_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = frame(1)
    # What happens to one frame in four billion.
    monkeypatch.setattr(compression, "MAGIC", made[:4])
    assert decompressed(made) == made
    with pytest.raises(CorruptError):
        decompressed(made[:4] + b"something else")


def test_a_column_that_states_another_size_than_its_frame_is_refused_before_it_is_made() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    assert len(bomb) < 32 << 10
    column = compression._COLUMN.pack(0, 1, len(bomb), 8)
    start = compression._HEAD.pack(compression.MAGIC, 8, 0, 1, 0)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="states 268435456 bytes, 8 announced"):
            COMPRESSOR.decompress(start + column + bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_column_that_states_no_size_is_made_up_to_the_announced_one_only() -> None:
    maker = zstandard.ZstdCompressor(write_content_size=False)
    bomb = maker.compress(bytes(256 << 20))
    column = compression._COLUMN.pack(0, 1, len(bomb), 8)
    start = compression._HEAD.pack(compression.MAGIC, 8, 0, 1, 0)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            COMPRESSOR.decompress(start + column + bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
