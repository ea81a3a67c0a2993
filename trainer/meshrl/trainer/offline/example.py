"""A tokenised row of offline training, and rows as packs of which each rank has its share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from meshrl.contract.types import Int32, Media
from meshrl.trainer.model.packing import Pack, pack, plan, share_out
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One tokenised row."""

    tokens: Int32
    """int32[T]: prompt, then response."""
    prompt_length: int
    """Tokens before the first one that is learned."""
    mask: npt.NDArray[np.bool_] | None = None
    """bool[T]: the tokens that are learned; None: all after the prompt."""
    media: tuple[Media, ...] = ()
    """Its pictures, in the order of their places."""

    @property
    def num_learned(self) -> int:
        """Tokens that are learned."""
        return len(self.tokens) - self.prompt_length if self.mask is None else int(self.mask.sum())

    @property
    def fingerprint(self) -> Int32:
        """int32[n]: what another row does not have: tokens (negated, where a mask says not learned), pictures."""
        said = self.tokens if self.mask is None else np.where(self.mask, self.tokens, ~self.tokens)
        names = bytes.fromhex("".join(each.sha256 for each in self.media))
        return np.concatenate([said, np.frombuffer(names, dtype=np.int32)])

    @property
    def learned(self) -> npt.NDArray[np.bool_]:
        """bool[T]: the tokens that are learned."""
        return np.arange(len(self.tokens)) >= self.prompt_length if self.mask is None else self.mask


def packs(
    examples: Sequence[Example], max_tokens: int, world: World, reader: VisionReader | None = None
) -> Iterator[tuple[list[Example], Pack]]:
    """This rank's packs of at most `max_tokens`, on its device, each with its rows; every rank has equally many.

    With sequence parallelism a pack is this rank's share of its tokens.
    """
    lengths = [len(example.tokens) for example in examples]
    packing = plan(lengths, ranks=world.data_size, max_tokens=max_tokens)
    for rows in packing.ranks[world.data_rank]:
        chosen = [examples[row] for row in rows]
        alike = world.sequence is None
        whole = packed(chosen, share_prefixes=alike, reader=reader).to(world.device)
        yield chosen, whole if world.sequence is None else share_out(whole, world.sequence)


def packed(
    examples: Sequence[Example], *, share_prefixes: bool = True, reader: VisionReader | None = None
) -> Pack:
    """Rows in one pack; its response tokens are those that are learned. `reader` finds their pictures."""
    made = pack(
        [each.tokens for each in examples],
        [each.prompt_length for each in examples],
        share_prefixes=share_prefixes,
        images=[
            reader.images(each.tokens, each.learned.astype(np.uint8), each.media, "a row")
            for each in examples
        ]
        if reader is not None
        else (),
    )
    if all(each.mask is None for each in examples):
        return made
    parts = [each.learned[each.prompt_length :] for each in examples]
    learned = torch.from_numpy(np.concatenate(parts))
    return replace(made, positions=made.positions[learned], targets=made.targets[learned])
