"""Pictures as tiles of one size, row by row, and the whole of them once more (SmolVLM, Idefics3).

    <fake_token_around_image><row_1_col_1><image> … <image>, …, newline after each row, newline,
    <fake_token_around_image><global-img><image> … <image><fake_token_around_image>

A picture that is no larger than a tile is the whole alone. The form is that of transformers' processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from meshrl.contract.errors import UserError
from meshrl.contract.types import Int32
from meshrl.images import Layout

if TYPE_CHECKING:
    from PIL.Image import Image

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


class TileLayout(Layout):
    """Each tile has as many placeholders, behind the tokens that name it."""

    def __init__(self, placeholder: int, of_tile: int, processor: Any, tokenizer: Any) -> None:
        self.placeholder = placeholder
        self._of_tile = [placeholder] * of_tile
        self._processor = processor
        self._tokenizer = tokenizer

    @override
    def block(self, height: int, width: int) -> Int32:
        _, rows, columns = self._processor.get_number_of_image_patches(height, width, {})
        found: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                found += self._ids(f"{AROUND}<row_{row}_col_{column}>") + self._of_tile
            found += self._ids("\n" if row < rows else "\n\n")
        found += self._ids(AROUND + WHOLE) + self._of_tile + self._ids(AROUND)
        return np.array(found, dtype=np.int32)

    @override
    def pixels(self, image: Image) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        made = self._processor(images=[image], return_tensors="np", return_row_col_info=True)
        (pixels,), (rows,), (columns,) = made["pixel_values"], made["rows"][0], made["cols"][0]
        grid = np.array([len(pixels), rows, columns], dtype=np.int64)
        return np.ascontiguousarray(pixels, dtype=np.float32), grid

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def build(checkpoint: Path, config: Mapping[str, Any], processor: Any) -> TileLayout:
    """Raises UserError if config.json lacks a size, or the tokenizer a token around tiles."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    except Exception as error:  # it raises Exception itself
        raise UserError(f"{checkpoint}: tokenizer.json cannot be read: {error}") from error
    for token in (AROUND, WHOLE, "<row_1_col_1>"):
        if tokenizer.token_to_id(token) is None:
            raise UserError(f"{checkpoint}: the tokenizer has no {token}, which surrounds tiles")
    try:
        vision = config["vision_config"]
        side = vision["image_size"] // vision["patch_size"] // config["scale_factor"]
        return TileLayout(int(config["image_token_id"]), side**2, processor, tokenizer)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{checkpoint}: config.json lacks image_token_id, scale_factor or vision_config.image_size, .patch_size"
        ) from error
