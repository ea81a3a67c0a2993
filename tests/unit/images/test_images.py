"""Pictures of strangers: bounds, formats, and places in a prompt."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meshrl.contract.errors import UserError
from meshrl.contract.types import Media
from meshrl.images import MOST_PIXELS, ImageProcessor, read_image, reads_images

from ...pictures import make_model, picture, write_processor

PLACEHOLDER = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_processor(path, PLACEHOLDER)
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


SIZES = [(64, 64), (96, 64), (200, 60), (40, 300)]


def test_tiles_stand_in_a_prompt_as_transformers_processor_writes_them(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    make_model(tmp_path, "SmolVLM")
    images, tokenizer = (
        ImageProcessor(tmp_path),
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    for width, height in SIZES:
        media = picture(0, width, height)
        made = images.features(media, "x")
        tiles, rows, columns = made.grid.tolist()
        assert tiles == rows * columns + 1 == len(made.pixels) and made.pixels.shape[1:] == (
            3,
            64,
            64,
        )
        around = ("<fake_token_around_image>", "<|image_pad|>", "<global-img>")
        text = get_image_prompt_string(rows, columns, 4, *around)
        wanted = tokenizer.encode(text, add_special_tokens=False).ids
        ids = np.array([1, PLACEHOLDER, 2], dtype=np.int32)
        expanded, source = images.expansion(ids, (media,), "x")
        assert expanded.tolist() == [1, *wanted, 2]
        assert source.tolist() == [0, *[1] * len(wanted), 2]
        assert (np.array(wanted)[made.embeds] == PLACEHOLDER).all() and len(
            made.embeds
        ) == 4 * tiles
        assert images.places(expanded, (media,), "x") == [(1, made.num_tokens)]


@pytest.mark.parametrize("kind", ["Qwen3VL", "SmolVLM"])
def test_pictures_in_another_order_than_their_places_are_one_line(
    tmp_path: Path, kind: str
) -> None:
    make_model(tmp_path, kind)
    images, small, wide = ImageProcessor(tmp_path), picture(0), picture(1, 200, 60)
    ids = np.array([1, PLACEHOLDER, 2, PLACEHOLDER], dtype=np.int32)
    tokens = images.expanded(ids, (small, wide), "x")
    assert len(images.places(tokens, (small, wide), "x")) == 2
    with pytest.raises(
        UserError, match=r"a:1: picture 1 wants \d+ places side by side, and those of"
    ):
        images.places(tokens, (wide, small), "a:1")
    with pytest.raises(UserError, match=r"a:1: picture 3 wants \d+ places .*, and 0 are left"):
        images.places(tokens, (small, wide, small), "a:1")


def test_a_processor_remembers_a_bounded_number_of_pictures(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.images.MOST_BLOCKS", 4)
    images = ImageProcessor(checkpoint)
    assert [images.num_tokens(picture(n), "x") for n in range(9)] == [4] * 9
    assert len(images._blocks) == 4


def test_a_model_of_tiles_without_their_tokens_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "SmolVLM")
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<global-img>", "<other>"))
    with pytest.raises(UserError, match="the tokenizer has no <global-img>, which surrounds tiles"):
        ImageProcessor(tmp_path)
