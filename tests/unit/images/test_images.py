"""Pictures of strangers: bounds, formats, and places in a prompt."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meshrl.contract.errors import UserError
from meshrl.contract.types import Media
from meshrl.images import MOST_PIXELS, ImageProcessor, read_image, reads_images

from ...pictures import picture

PLACEHOLDER = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a checkpoint that say how it reads pictures."""
    path = tmp_path_factory.mktemp("checkpoint")
    config = {"image_token_id": PLACEHOLDER, "vision_config": {"spatial_merge_size": 2}}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **config}))
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
    (path / "preprocessor_config.json").write_text(json.dumps({**kind, "size": sizes}))
    return path


def bomb(side: int) -> bytes:
    """A PNG of a few bytes whose header says `side` x `side`."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no picture that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "want PNG, JPEG"),
        (picture(0).data[:90], "no picture that can be read"),
        (bomb(12_000), f"12000 x 12000 pixels, at most {MOST_PIXELS}"),
        (bomb(60_000), "decompression bomb"),
    ],
)
def test_what_is_no_picture_is_one_line_that_says_where(data: bytes, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        read_image(data, "train.parquet:3: images[0]")
    assert str(caught.value).startswith("train.parquet:3: images[0]")


def test_a_picture_is_named_by_its_bytes_and_read_in_rgb() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (3, 2), (1, 2, 3, 128)).save(file, "PNG")
    assert read_image(file.getvalue(), "x").mode == "RGB"
    assert Media.of(file.getvalue()).sha256 == Media.of(file.getvalue()).sha256


def test_a_prompt_gets_as_many_places_as_its_pictures_have_tokens(checkpoint: Path) -> None:
    images = ImageProcessor(checkpoint)
    small, wide = picture(0, 64, 64), picture(1, 128, 64)
    ids = np.array([1, PLACEHOLDER, 2, PLACEHOLDER], dtype=np.int32)
    expanded = images.expanded(ids, (small, wide), "row")
    assert expanded.tolist() == [1, *[PLACEHOLDER] * 4, 2, *[PLACEHOLDER] * 8]
    places = images.places(np.append(expanded, PLACEHOLDER), (small, wide), "row")
    assert places == [(1, 4), (6, 8)]
    assert images.features(wide, "row").num_tokens == images.num_tokens(wide, "row") == 8


def test_more_or_fewer_places_than_pictures_are_one_line(checkpoint: Path) -> None:
    images, ids = ImageProcessor(checkpoint), np.array([1, PLACEHOLDER], dtype=np.int32)
    with pytest.raises(UserError, match=r"a:1: the prompt has places for 1 pictures.* has 2"):
        images.expanded(ids, (picture(0), picture(1)), "a:1")
    with pytest.raises(UserError, match="picture 1 wants 4 places side by side, and 1 are left"):
        images.places(ids, (picture(0),), "a:1")


def test_a_model_of_text_and_an_unknown_processor_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not reads_images(tmp_path)
    with pytest.raises(UserError, match="reads no pictures"):
        ImageProcessor(tmp_path)
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "CLIP"}')
    with pytest.raises(UserError, match="pictures are made by CLIP"):
        ImageProcessor(tmp_path)
