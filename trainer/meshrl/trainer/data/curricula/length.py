"""Short prompts first, equal ones in a seeded order: the first epoch sees them so, later ones are shuffled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.trainer.data.prompts import Prompt


def order(prompts: Sequence[Prompt], epoch: int, seed: int) -> list[int]:
    """Places of the prompts in the order in which `epoch` asks them."""
    shuffled: list[int] = np.random.default_rng((seed, epoch)).permutation(len(prompts)).tolist()
    if epoch:
        return shuffled
    return sorted(shuffled, key=lambda place: len(prompts[place].prompt_ids))
