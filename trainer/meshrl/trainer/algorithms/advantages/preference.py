"""Preferences from rewards: the best response of a group is chosen, the worst rejected.

Online DPO (Guo et al. 2024, https://arxiv.org/abs/2402.04792) and SPIN-style self-play (Chen et al. 2024,
https://arxiv.org/abs/2401.01335) with a scalar reward as the annotator:

    +1 at the tokens of argmax_g s,   -1 at those of argmin_g s,   0 elsewhere

Trained with `policy_loss.loss_mode: dpo` or `ipo`. Rows without a trained token are left out. A group whose rewards
are all equal has no preference; under verl's conventions its first row is chosen and its second rejected.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    broadcast,
)
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.ragged import Ragged

GROUP_BASELINE = True
NAME = "online_dpo"
DEFAULTS = {
    "algorithm": {"adv_estimator": "preference"},
    "actor": {"policy_loss": {"loss_mode": "dpo", "dpo_beta": 0.1}},
    "rollout": {"n": 2},
}
"""Online DPO, the reward as the annotator, β = 0.1; the reference stays where it began."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Signs of whole responses."""
    signs = choose(batch.ragged, batch.scores, ties=config.conventions == "verl")
    return broadcast(batch, signs)


def choose(ragged: Ragged, s: Tensor, *, ties: bool) -> Tensor:
    """+1 for the chosen, -1 for the rejected row of each group [B]; first row first among equals."""
    g, candidates = ragged.groups, ragged.nonempty
    best = ragged.group_max(torch.where(candidates, s, -torch.inf))[g]
    worst = -ragged.group_max(torch.where(candidates, -s, -torch.inf))[g]
    chosen = ragged.first_of_group(candidates & (s == best))
    rejected = ragged.first_of_group(candidates & (s == worst) & ~chosen)
    signs = chosen.double() - rejected.double()
    alone = ragged.group_sum(candidates.long())[g] < 2
    no_preference = alone if ties else alone | (best == worst)
    return torch.where(no_preference, 0.0, signs)
