"""Images in packs: their places, the positions of tokens around them, and their features among the embeddings.

    row, media ──VisionReader──▶ RowImages ──pack──▶ PackedImages ──tower──▶ features ──▶ embeddings at their places

The text decoder then reads embeddings instead of token ids; its attention and everything after it stay as they are. A
picture in what the rows of a pack have in common is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import Int32, Media, Trajectory, Uint8
from meshrl.images import ImageFeatures, shared_processor

HfModel: TypeAlias = Any
"""A transformers `PreTrainedModel`: the library has no types."""
TOWERS = {"smolvlm": "vision_model", "idefics3": "vision_model"}
"""Attribute that holds the vision tower, by type of model; `visual` in others."""
VISION_ATTENTION = "sdpa"
"""Inside the tower, where each picture attends to itself."""
Int64: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowImages:
    """The pictures of one row."""

    positions: Int64
    """int64[A, T]: positions of its tokens; A is 3 where height and width have positions of their own, else 1."""
    starts: tuple[int, ...]
    """First token of each in the row."""
    features: tuple[ImageFeatures, ...]

    def keys(self, tokens: Int32, numbers: dict[str, int]) -> Int32:
        """int32[T]: the tokens, but at the places of a picture its number among all in `numbers`, below 0.

        Rows with other pictures have the same tokens at their places, and nothing in common from there on.
        """
        both = zip(self.starts, self.features, strict=True)
        places = [(start, image.num_tokens) for start, image in both]
        return _keys(tokens, places, [image.name for image in self.features], numbers)


def _keys(
    tokens: Int32, places: Sequence[tuple[int, int]], names: Sequence[str], numbers: dict[str, int]
) -> Int32:
    found = tokens.copy()
    for (start, count), name in zip(places, names, strict=True):
        found[start : start + count] = -1 - numbers.setdefault(name, len(numbers))
    return found


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedImages:
    """The pictures of a pack, in the order of their places; I of them with M tokens in all."""

    pixels: torch.Tensor
    """float32[patches, numbers of a patch], or float32[tiles, channels, height, width]."""
    grids: torch.Tensor
    """int64[I, 3]: see ImageFeatures."""
    places: torch.Tensor
    """int64[m]: the places of those tokens that this rank has, ascending."""
    own: torch.Tensor
    """int64[m]: which of the M these are."""

    def to(self, device: torch.device) -> PackedImages:
        """The same on another device."""
        return PackedImages(
            pixels=self.pixels.to(device),
            grids=self.grids.to(device),
            places=self.places.to(device),
            own=self.own.to(device),
        )

    def share(self, begin: int, width: int) -> PackedImages:
        """For a rank that has the places from `begin` on, `width` of them."""
        mine = (self.places >= begin) & (self.places < begin + width)
        return replace(self, places=self.places[mine] - begin, own=self.own[mine])


def packed_images(
    rows: Sequence[RowImages], places: Sequence[Int64], begins: Sequence[int]
) -> PackedImages | None:
    """The pictures of rows that lie at `places`, each with the tokens from `begins` on as its own; or None."""
    found = [
        (int(place[start]), image)
        for row, place, begin in zip(rows, places, begins, strict=True)
        for start, image in zip(row.starts, row.features, strict=True)
        if start >= begin
    ]
    if not found:
        return None
    found.sort(key=lambda each: each[0])
    at = np.concatenate([first + image.embeds for first, image in found])
    return PackedImages(
        pixels=torch.from_numpy(np.concatenate([image.pixels for _, image in found])),
        grids=torch.from_numpy(np.stack([image.grid for _, image in found])),
        places=torch.from_numpy(at),
        own=torch.arange(len(at)),
    )


Positions: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class VisionReader:
    """Finds the pictures of rows, for a vision-language model."""

    def __init__(self, checkpoint: Path, hf: HfModel) -> None:
        """Raises UserError where the checkpoint's pictures are not understood."""
        self._processor = shared_processor(checkpoint)
        self._rope_index: Positions | None = getattr(hf.model, "get_rope_index", None)

    def check(self, row: Trajectory) -> None:
        """Check that a row's images match its tokens, without decoding them. Raises CorruptError."""
        seen = np.where(row.loss_mask, -1, row.tokens)
        try:
            places = self._processor.places(seen, row.media, f"row {row.uid}")
        except UserError as error:
            raise CorruptError(error.message) from error
        prompt = row.tokens[: row.prompt_length] == self._processor.placeholder
        for start, count in places:
            prompt[start : start + count] = False
        if left := int(prompt.sum()):
            raise CorruptError(
                f"row {row.uid}: its prompt has {left} places for pictures that it does not have"
            )

    def of_row(self, row: Trajectory) -> RowImages:
        """The pictures of a row. Raises CorruptError where they are not those of its tokens."""
        self.check(row)
        try:
            return self.images(row.tokens, row.loss_mask, row.media, f"row {row.uid}")
        except UserError as error:
            raise CorruptError(error.message) from error

    def images(
        self, tokens: Int32, sampled: Uint8, media: tuple[Media, ...], where: str
    ) -> RowImages:
        """The pictures of `tokens`, of which the `sampled` ones are no places for any.

        Raises:
            UserError: `media` are others; names `where`.
        """
        places = self._processor.places(np.where(sampled, -1, tokens), media, where)
        features = tuple(self._processor.features(each, where) for each in media)
        return RowImages(
            positions=self._positions(tokens, places, features),
            starts=tuple(start for start, _ in places),
            features=features,
        )

    def keys(
        self,
        tokens: Int32,
        sampled: Uint8,
        media: tuple[Media, ...],
        where: str,
        numbers: dict[str, int],
    ) -> Int32:
        """As those of RowImages, without making pixels. Raises UserError as `images` does."""
        places = self._processor.places(np.where(sampled, -1, tokens), media, where)
        return _keys(tokens, places, [each.sha256 for each in media], numbers)

    def _positions(
        self,
        tokens: Int32,
        places: Sequence[tuple[int, int]],
        features: Sequence[ImageFeatures],
    ) -> Int64:
        if self._rope_index is None:
            return np.arange(len(tokens))[None]
        if not features:
            return np.broadcast_to(np.arange(len(tokens)), (3, len(tokens)))
        kinds = torch.zeros(1, len(tokens), dtype=torch.int32)
        for start, count in places:
            kinds[0, start : start + count] = 1
        found, _ = self._rope_index(
            torch.from_numpy(tokens.astype(np.int64))[None],
            mm_token_type_ids=kinds,
            image_grid_thw=torch.from_numpy(np.stack([image.grid for image in features])),
        )
        positions: Int64 = found[:, 0].numpy()
        return positions


def tower_of(hf: HfModel) -> nn.Module | None:
    """Module that makes features of pictures; None in a model of text."""
    if getattr(hf.config, "vision_config", None) is None:
        return None
    tower = getattr(getattr(hf, "model", None), TOWERS.get(hf.config.model_type, "visual"), None)
    if not isinstance(tower, nn.Module):
        raise UserError(
            f"model {type(hf).__name__}: its vision tower is not known here; Qwen2-VL, Qwen2.5-VL, Qwen3-VL and"
            " SmolVLM can be trained"
        )
    return tower


def units_of(tower: nn.Module) -> list[nn.Module]:
    """Its parts that ranks gather one by one, and then the rest of it."""
    lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
    return [*(block for blocks in lists for block in blocks), tower]


def tower_prefix(hf: HfModel) -> str:
    """How the names of the weights of its tower begin."""
    return f"model.{TOWERS.get(hf.config.model_type, 'visual')}."


def embedded(hf: HfModel, input_ids: torch.Tensor, images: PackedImages | None) -> dict[str, Any]:
    """Decoder inputs in place of `input_ids` int64[1, P]: embeddings, with the features of pictures in place.

    A pack without pictures runs the tower too, on an empty one: ranks gather its weights together.
    """
    embeddings: torch.Tensor = hf.get_input_embeddings()(input_ids)
    images = images or _no_images(hf.config.vision_config, embeddings)
    made = _features(hf, images)
    features = torch.cat(tuple(made.pooler_output)).to(embeddings.dtype)
    features = features.index_select(0, images.own)
    found: dict[str, Any] = {
        "inputs_embeds": embeddings.index_copy(1, images.places, features[None])
    }
    deep = getattr(made, "deepstack_features", None)
    if deep is not None:
        mask = torch.zeros_like(input_ids, dtype=torch.bool)
        mask[0, images.places] = True
        found["visual_pos_masks"] = mask
        found["deepstack_visual_embeds"] = [
            torch.cat(tuple(layer)).to(embeddings.dtype).index_select(0, images.own)
            for layer in deep
        ]
    return found


def _features(hf: HfModel, images: PackedImages) -> Any:
    """Transformers' output: `pooler_output` float32[M, H] in parts, and what else the decoder reads of pictures."""
    if images.pixels.dim() > 2:
        return hf.model.get_image_features(images.pixels[None], return_dict=True)
    return hf.model.get_image_features(images.pixels, images.grids, return_dict=True)


def _no_images(config: Any, embeddings: torch.Tensor) -> PackedImages:
    """The smallest picture that the tower reads, at no place."""
    if hasattr(config, "spatial_merge_size"):
        side = config.spatial_merge_size
        channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", 3)
        shape = [side * side, channels * config.temporal_patch_size * config.patch_size**2]
    else:
        side = 0
        shape = [1, config.num_channels, config.image_size, config.image_size]
    nothing = torch.zeros(0, dtype=torch.int64, device=embeddings.device)
    return PackedImages(
        pixels=embeddings.new_zeros(shape, dtype=torch.float32),
        grids=torch.tensor([[1, side, side]], device=embeddings.device),
        places=nothing,
        own=nothing,
    )
