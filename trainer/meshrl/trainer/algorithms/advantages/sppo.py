"""SPPO: the advantage of a response is its distance from the soft mean of its group.

Wu et al. 2024, https://arxiv.org/abs/2405.00675; the reward stands in for the win rate:

    A_i = s_i - 1/b log mean_g exp(b s)        b = `sppo_beta`; b = 0 is the mean

Trained with `policy_loss.loss_mode: sppo`. verl's recipe takes the soft mean over the whole batch, mixing prompts of
different difficulty; `conventions: verl` does so too.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    broadcast,
)
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.algorithms.ragged import Ragged


class Options(Config):
    """Keys of `algorithm`."""

    sppo_beta: NonNegativeFloat = 1.0
    """Inverse temperature of the soft mean that SPPO subtracts; 0 takes the mean."""


GROUP_BASELINE = True
DEFAULTS = {
    "algorithm": {"adv_estimator": "sppo", "sppo_beta": 1.0},
    "actor": {"policy_loss": {"loss_mode": "sppo", "sppo_eta": 1.0}},
    "rollout": {"n": 5},
}
"""η is 1 as in verl's recipe (the paper writes 1e3 and divides by
it elsewhere). The group's own soft mean is subtracted, not the batch's."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses."""
    whole_batch = config.conventions == "verl"
    g = torch.zeros_like(batch.ragged.groups) if whole_batch else batch.ragged.groups
    groups = Ragged(offsets=batch.ragged.offsets, mask=batch.ragged.mask, groups=g)
    s = batch.scores.double()
    return broadcast(batch, s - soft_mean(groups, s, options(config, Options).sppo_beta)[g])


def soft_mean(groups: Ragged, s: Tensor, b: float) -> Tensor:
    """1/b log mean exp(b s), [B] to [G]."""
    if b == 0:
        return groups.group_mean(s)
    top = groups.group_max(s)
    return top + groups.group_mean(((s - top[groups.groups]) * b).exp()).log() / b
