"""Pictures of prompts: read within bounds, and made into what a vision tower reads, the same at both ends.

    data file ──bytes──▶ Media (named by sha256) ──ImageProcessor──▶ pixels, grid ──▶ engine and trainer alike

A worker and a trainer run the same processor of transformers on the same bytes, so the engine samples from the pixels
that the trainer learns on. Needs the extra `vision` (Pillow, transformers), no torch.
"""

from __future__ import annotations

import functools
import io
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from meshrl.common.files import json_object
from meshrl.contract.errors import UserError
from meshrl.contract.types import Int32, Media
from meshrl.contract.types.rows import MOST_MEDIA_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's formats that need no other program and no library of the operating system."""
MOST_BYTES = MOST_MEDIA_BYTES
"""Limit of one file."""
MOST_PIXELS = 32 << 20
"""Limit of one picture: a file of a few kilobytes may unpack to any number of pixels."""
MOST_CACHED = 256 << 20
"""Bytes of pixels that a processor keeps: the rows of a group have the same pictures."""
MEDIA_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"RIFF": "image/webp",
}
"""Media types of the `FORMATS`, by the first bytes of a file."""
MOST_BLOCKS = 4096
"""Pictures whose places a processor remembers."""
PROCESSORS = {
    "Qwen2VLImageProcessor": "patches",
    "SmolVLMImageProcessor": "tiles",
    "Idefics3ImageProcessor": "tiles",
}
"""Classes of `preprocessor_config.json` by the module that knows them: Qwen2-VL, Qwen2.5-VL and Qwen3-VL; SmolVLM."""


def read_image(data: bytes, where: str) -> Image:
    """The picture in RGB.

    Raises:
        UserError: no picture in one of `FORMATS`, or one that is too large; names `where`.
    """
    image = open_image(data, where)
    try:
        return image.convert("RGB")
    except Exception as error:  # decoders of damaged files raise any error
        raise _unreadable(where, error) from error


def open_image(data: bytes, where: str) -> Image:
    """The picture, of which only the header has been read. Raises as `read_image` does."""
    try:
        from PIL import Image as images
    except ImportError as error:
        raise UserError(f"{where}: pictures need Pillow: pip install 'meshrl[vision]'") from error
    if len(data) > MOST_BYTES:
        raise UserError(f"{where}: the picture has {len(data)} bytes, at most {MOST_BYTES}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", images.DecompressionBombWarning)
            image = images.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise UserError(
                f"{where}: the picture has {width} x {height} pixels, at most {MOST_PIXELS}"
            )
        return image
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(where, error) from error


def media_type(data: bytes) -> str:
    """The media type of a picture's file, by its first bytes; empty for any other file."""
    found = [kind for begin, kind in MEDIA_TYPES.items() if data.startswith(begin)]
    if found == ["image/webp"] and data[8:12] != b"WEBP":
        return ""
    return found[0] if found else ""


def _unreadable(where: str, error: Exception) -> UserError:
    reason = " ".join(re.sub(r"<\S+ object at \w+>", "", str(error)).split())
    reason = reason or type(error).__name__
    kinds = ", ".join(FORMATS)
    return UserError(f"{where}: no picture that can be read ({reason:.120}); want {kinds}")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ImageFeatures:
    """One picture as the vision tower reads it."""

    pixels: npt.NDArray[np.float32]
    """float32[patches, numbers of a patch], or float32[tiles, channels, height, width]."""
    grid: npt.NDArray[np.int64]
    """int64[3]: frames, rows and columns of patches; or tiles, and rows and columns of all but the whole one."""
    num_tokens: int
    """Places that it takes in a prompt."""
    embeds: npt.NDArray[np.int64]
    """int64[M]: the places of its features among them, ascending; the others are tokens."""
    name: str
    """Name of the picture: equal ones have equal pixels."""


class Layout(Protocol):
    """How a family of models takes a picture apart."""

    placeholder: int
    """The token whose places features take."""

    def block(self, height: int, width: int) -> Int32:
        """int32[T]: the tokens of an image in a prompt, by its size. Raises ValueError for an unusable one."""
        ...

    def pixels(self, image: Image) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """`pixels` and `grid` of ImageFeatures."""
        ...


class ImageProcessor:
    """The image processor of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the checkpoint's files.

        Raises:
            UserError: the checkpoint reads no pictures, or reads them in a way that is not known here.
        """
        self.layout = _layout(checkpoint)
        self.placeholder = self.layout.placeholder
        self._cached: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._cached_bytes = 0
        self._blocks: OrderedDict[str, Int32] = OrderedDict()
        self._read: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        """Held by the thread that makes pixels: the rows of a group ask for the same ones at once."""

    def num_tokens(self, media: Media, where: str) -> int:
        """Places that a picture takes in a prompt, by its size alone. Raises UserError, which names `where`."""
        return len(self.block(media, where))

    def block(self, media: Media, where: str) -> Int32:
        """int32[T]: what stands in a prompt for a picture. Raises UserError, which names `where`."""
        if (known := self._blocks.get(media.sha256)) is not None:
            return known
        width, height = open_image(media.data, where).size
        try:
            block = self.layout.block(height, width)
        except ValueError as error:  # a picture that is 200 times as wide as high
            raise UserError(f"{where}: the model cannot read this picture: {error}") from error
        self._blocks[media.sha256] = block
        while len(self._blocks) > MOST_BLOCKS:
            self._blocks.popitem(last=False)
        return block

    def check(self, media: Media, where: str) -> None:
        """Read a picture, unless that was done before. Raises UserError, which names `where`, for a damaged one."""
        if media.sha256 not in self._read:
            self._seen(media, read_image(media.data, where))

    def _seen(self, media: Media, image: Image) -> Image:
        self._read[media.sha256] = None
        while len(self._read) > MOST_BLOCKS:
            self._read.popitem(last=False)
        return image

    def features(self, media: Media, where: str) -> ImageFeatures:
        """Pixels of a picture, in any thread; read-only, and kept for the next row.

        Raises:
            UserError: it cannot be read; names `where`.
        """
        with self._lock:
            return self._features(media, where)

    def _features(self, media: Media, where: str) -> ImageFeatures:
        if (known := self._cached.get(media.sha256)) is not None:
            self._cached.move_to_end(media.sha256)
            return known
        block = self.block(media, where)
        image = self._seen(media, read_image(media.data, where))
        pixels, grid = self.layout.pixels(image)
        pixels.flags.writeable = False
        found = ImageFeatures(
            pixels=pixels,
            grid=grid,
            num_tokens=len(block),
            embeds=np.flatnonzero(block == self.placeholder),
            name=media.sha256,
        )
        self._cached[media.sha256] = found
        self._cached_bytes += pixels.nbytes
        while self._cached_bytes > MOST_CACHED and len(self._cached) > 1:
            self._cached_bytes -= self._cached.popitem(last=False)[1].pixels.nbytes
        return found

    def expanded(self, ids: Int32, media: tuple[Media, ...], where: str) -> Int32:
        """int32[P]: a prompt with one placeholder a picture, as the model reads it: with all that stands for each.

        Raises:
            UserError: not as many placeholders as pictures, or a picture that cannot be read; names `where`.
        """
        return self.expansion(ids, media, where)[0]

    def expansion(
        self, ids: Int32, media: tuple[Media, ...], where: str
    ) -> tuple[Int32, npt.NDArray[np.int64]]:
        """The result of `expanded`, and int64[P]: the index in `ids` of each token or its placeholder.

        Raises:
            UserError: as `expanded` does.
        """
        places = np.flatnonzero(ids == self.placeholder)
        if len(places) != len(media):
            raise UserError(
                f"{where}: the prompt has places for {len(places)} pictures, and the row has {len(media)}"
            )
        blocks = [
            self.block(picture, f"{where}, picture {number + 1}")
            for number, picture in enumerate(media)
        ]
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = [len(block) for block in blocks]
        source = np.repeat(np.arange(len(ids)), counts)
        found = ids[source]
        if blocks:
            found[np.isin(source, places)] = np.concatenate(blocks)
        return found, source

    def places(self, tokens: Int32, media: tuple[Media, ...], where: str) -> list[tuple[int, int]]:
        """First token and number of tokens of each picture in a row.

        A placeholder behind those of the pictures is a token that the policy has sampled; none that it sampled
        between them may be among `tokens`.

        Raises:
            UserError: the row has too few placeholders, or they are elsewhere; names `where`.
        """
        found: list[tuple[int, int]] = []
        left = np.flatnonzero(tokens == self.placeholder)
        for number, picture in enumerate(media):
            at = f"{where}, picture {number + 1}"
            block = self.block(picture, at)
            embeds = np.flatnonzero(block == self.placeholder)
            start = int(left[0] - embeds[0]) if len(left) else len(tokens)
            if start < 0 or not np.array_equal(tokens[start : start + len(block)], block):
                few = len(left) < len(embeds)
                raise UserError(
                    f"{where}: picture {number + 1} wants {len(embeds)} places side by side, and"
                    f" {f'{len(left)} are left' if few else 'those of the row are elsewhere'}"
                )
            found.append((start, len(block)))
            left = left[len(embeds) :]
        return found


@functools.lru_cache(maxsize=2)
def shared_processor(checkpoint: Path) -> ImageProcessor:
    """The processor of all parts of a process, so that a picture is read once for them. Raises UserError."""
    return ImageProcessor(checkpoint)


def processor_class(preprocessor: Mapping[str, Any]) -> str:
    """The class that a preprocessor_config.json names, in `PROCESSORS` or not."""
    kind = str(preprocessor.get("image_processor_type", ""))
    return kind.removesuffix("Fast").removesuffix("Pil")


def _layout(checkpoint: Path) -> Layout:
    """Raises UserError."""
    if not reads_images(checkpoint):
        raise UserError(f"{checkpoint}: the model reads no pictures (no vision_config)")
    kind = processor_class(json_object(checkpoint / "preprocessor_config.json"))
    if kind not in PROCESSORS:
        raise UserError(
            f"{checkpoint}: pictures are made by {kind or 'no processor that is named'}"
            f" (preprocessor_config.json), want {', '.join(PROCESSORS)}"
        )
    from transformers import AutoImageProcessor

    load: Any = AutoImageProcessor.from_pretrained
    processor = load(checkpoint, backend="pil", local_files_only=True)
    family = import_module(f"{__name__}.{PROCESSORS[kind]}")
    made: Layout = family.build(checkpoint, json_object(checkpoint / "config.json"), processor)
    return made


def reads_images(checkpoint: Path) -> bool:
    """Whether a checkpoint's model has a vision tower."""
    return "vision_config" in json_object(checkpoint / "config.json")
