"""Pictures of prompts: read within bounds, and made into what a vision tower reads, the same at both ends.

    data file ──bytes──▶ Media (named by sha256) ──ImageProcessor──▶ pixels, grid ──▶ engine and trainer alike

A worker and a trainer run the same processor of transformers on the same bytes, so the engine samples from the pixels
that the trainer learns on. Needs the extra `vision` (Pillow, transformers), no torch.
"""

from __future__ import annotations

import io
import json
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import UserError
from meshrl.contract.types import Int32, Media

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Of the formats that Pillow reads, those that need no other program and no library of the operating system."""
MOST_BYTES = 16 << 20
"""Of one file."""
MOST_PIXELS = 32 << 20
"""Of one picture: a file of a few kilobytes may unpack to any number of them."""
MOST_CACHED = 256 << 20
"""Bytes of pixels that a processor keeps: the rows of a group have the same pictures."""
MEDIA_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"RIFF": "image/webp",
}
"""Of the `FORMATS`, by how their files begin."""
PROCESSORS = ("Qwen2VLImageProcessor",)
"""Classes of `preprocessor_config.json` whose pictures become patches: Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""


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
    """float32[patches, numbers of a patch]"""
    grid: npt.NDArray[np.int64]
    """int64[3]: frames, rows and columns of patches."""
    num_tokens: int
    """Places that it takes in a prompt."""
    name: str
    """Of the picture: equal ones have equal pixels."""


class ImageProcessor:
    """The image processor of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the checkpoint's files.

        Raises:
            UserError: the checkpoint reads no pictures, or reads them in a way that is not known here.
        """
        self.placeholder, self.merge = _vision_of(checkpoint)
        self._processor = _processor(checkpoint)
        self._cached: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._cached_bytes = 0
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        """Held by the thread that makes pixels: the rows of a group ask for the same ones at once."""

    def num_tokens(self, media: Media, where: str) -> int:
        """Places that a picture takes in a prompt, by its size alone. Raises UserError, which names `where`."""
        if media.sha256 not in self._counts:
            width, height = open_image(media.data, where).size
            try:
                patches = self._processor.get_number_of_image_patches(height, width, {})
            except ValueError as error:  # a picture that is 200 times as wide as high
                raise UserError(f"{where}: the model cannot read this picture: {error}") from error
            self._counts[media.sha256] = int(patches) // self.merge**2
        return self._counts[media.sha256]

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
        num_tokens = self.num_tokens(media, where)
        made = self._processor(images=[read_image(media.data, where)], return_tensors="np")
        pixels = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        pixels.flags.writeable = False
        grid = made["image_grid_thw"][0].astype(np.int64)
        found = ImageFeatures(
            pixels=pixels,
            grid=grid,
            num_tokens=num_tokens,
            name=media.sha256,
        )
        self._cached[media.sha256] = found
        self._cached_bytes += pixels.nbytes
        while self._cached_bytes > MOST_CACHED and len(self._cached) > 1:
            self._cached_bytes -= self._cached.popitem(last=False)[1].pixels.nbytes
        return found

    def expanded(self, ids: Int32, media: tuple[Media, ...], where: str) -> Int32:
        """int32[P]: a prompt with one placeholder a picture, as the model reads it: as many as it has tokens.

        Raises:
            UserError: not as many placeholders as pictures, or a picture that cannot be read; names `where`.
        """
        places = np.flatnonzero(ids == self.placeholder)
        if len(places) != len(media):
            raise UserError(
                f"{where}: the prompt has places for {len(places)} pictures, and the row has {len(media)}"
            )
        counts = np.ones(len(ids), dtype=np.int64)
        for number, (place, picture) in enumerate(zip(places, media, strict=True)):
            counts[place] = self.num_tokens(picture, f"{where}, picture {number + 1}")
        return np.repeat(ids, counts)

    def places(self, tokens: Int32, media: tuple[Media, ...], where: str) -> list[tuple[int, int]]:
        """Where each picture stands in a row: its first token and how many.

        A placeholder behind those of the pictures is a token that the policy has sampled; none that it sampled
        between them may be among `tokens`.

        Raises:
            UserError: the row has too few placeholders side by side; names `where`.
        """
        found: list[tuple[int, int]] = []
        found_at = np.flatnonzero(tokens == self.placeholder)
        used = 0
        for number, picture in enumerate(media):
            count = self.num_tokens(picture, f"{where}, picture {number + 1}")
            own = found_at[used : used + count]
            if len(own) < count or own[-1] - own[0] != count - 1:
                raise UserError(
                    f"{where}: picture {number + 1} wants {count} places side by side, and {len(own)} are left"
                )
            found.append((int(own[0]), count))
            used += count
        return found


def _processor(checkpoint: Path) -> Any:
    from transformers import AutoImageProcessor

    load: Any = AutoImageProcessor.from_pretrained
    return load(checkpoint, backend="pil", local_files_only=True)


def reads_images(checkpoint: Path) -> bool:
    """Whether a checkpoint's model has a vision tower."""
    return "vision_config" in _json(checkpoint / "config.json")


def _vision_of(checkpoint: Path) -> tuple[int, int]:
    """The token id that stands for a picture, and how many patches a side become one token. Raises UserError."""
    config = _json(checkpoint / "config.json")
    kind = str(_json(checkpoint / "preprocessor_config.json").get("image_processor_type", ""))
    if "vision_config" not in config:
        raise UserError(f"{checkpoint}: the model reads no pictures (no vision_config)")
    if kind.removesuffix("Fast").removesuffix("Pil") not in PROCESSORS:
        raise UserError(
            f"{checkpoint}: pictures are made by {kind or 'no processor that is named'}"
            f" (preprocessor_config.json), want {', '.join(PROCESSORS)}"
        )
    try:
        return int(config["image_token_id"]), int(config["vision_config"]["spatial_merge_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{checkpoint}: config.json lacks image_token_id or vision_config.spatial_merge_size"
        ) from error


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
