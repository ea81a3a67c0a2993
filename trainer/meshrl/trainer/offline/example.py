"""A tokenised row of offline training, and rows as packs of which each rank has its share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from meshrl.contract.types import Int32
from meshrl.trainer.distributed import World
from meshrl.trainer.model.packing import Pack, pack, plan, share_out


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One tokenised row."""

    tokens: Int32
    """int32[T]: prompt, then response."""
    prompt_length: int
    """Tokens before the first one that is learned."""
    mask: npt.NDArray[np.bool_] | None = None
    """bool[T]: the tokens that are learned; None: all after the prompt."""

    @property
    def num_learned(self) -> int:
        """Tokens that are learned."""
        return len(self.tokens) - self.prompt_length if self.mask is None else int(self.mask.sum())

    @property
    def fingerprint(self) -> Int32:
        """int32[T]: what another row does not have: the tokens, those of a mask that are not learned negated."""
        return self.tokens if self.mask is None else np.where(self.mask, self.tokens, ~self.tokens)


def packs(
    examples: Sequence[Example], max_tokens: int, world: World
) -> Iterator[tuple[list[Example], Pack]]:
    """This rank's packs of at most `max_tokens`, on its device, each with its rows; every rank has equally many.

    With sequence parallelism a pack is this rank's share of its tokens.
    """
    lengths = [len(example.tokens) for example in examples]
    packing = plan(lengths, ranks=world.data_size, max_tokens=max_tokens)
    for rows in packing.ranks[world.data_rank]:
        chosen = [examples[row] for row in rows]
        whole = packed(chosen, share_prefixes=world.sequence is None).to(world.device)
        yield chosen, whole if world.sequence is None else share_out(whole, world.sequence)


def packed(examples: Sequence[Example], *, share_prefixes: bool = True) -> Pack:
    """Rows in one pack; its response tokens are those that are learned."""
    made = pack(
        [each.tokens for each in examples],
        [each.prompt_length for each in examples],
        share_prefixes=share_prefixes,
    )
    if all(each.mask is None for each in examples):
        return made
    parts = [
        np.ones(each.num_learned, dtype=np.bool_)
        if each.mask is None
        else each.mask[each.prompt_length :]
        for each in examples
    ]
    learned = torch.from_numpy(np.concatenate(parts))
    return replace(made, positions=made.positions[learned], targets=made.targets[learned])
