"""Easy prompts first, by `extra_info.difficulty` (a number) of each row; equal ones in a seeded order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.contract.errors import UserError
from meshrl.trainer.data.prompts import Prompt

KEY = "difficulty"


def order(prompts: Sequence[Prompt], epoch: int, seed: int) -> list[int]:
    """Places of the prompts in the order in which `epoch` asks them.

    Raises:
        UserError: a row without the number.
    """
    for prompt in prompts:
        value = prompt.extra_info.get(KEY)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(
                f"{prompt.where}: data.curriculum difficulty: the row has extra_info.{KEY} {value!r}, want a number"
            )
    shuffled: list[int] = np.random.default_rng((seed, epoch)).permutation(len(prompts)).tolist()
    return sorted(shuffled, key=lambda place: float(prompts[place].extra_info[KEY]))
