"""Pictures as a grid of patches, `merge` x `merge` of which become one token (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)."""

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


class PatchLayout(Layout):
    """A layout with a placeholder for each token."""

    def __init__(self, placeholder: int, merge: int, processor: Any) -> None:
        self.placeholder = placeholder
        self._merge = merge
        self._processor = processor

    @override
    def block(self, height: int, width: int) -> Int32:
        patches = self._processor.get_number_of_image_patches(height, width, {})
        return np.full(int(patches) // self._merge**2, self.placeholder, dtype=np.int32)

    @override
    def pixels(self, image: Image) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        made = self._processor(images=[image], return_tensors="np")
        pixels = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        return pixels, made["image_grid_thw"][0].astype(np.int64)


def build(checkpoint: Path, config: Mapping[str, Any], processor: Any) -> PatchLayout:
    """Raises UserError if config.json lacks a size."""
    try:
        merge = int(config["vision_config"]["spatial_merge_size"])
        return PatchLayout(int(config["image_token_id"]), merge, processor)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{checkpoint}: config.json lacks image_token_id or vision_config.spatial_merge_size"
        ) from error
