"""SPIN's pairs: the data's own answer is chosen, what the policy says to the same prompt is rejected.

Chen et al. 2024, https://arxiv.org/abs/2401.01335, section 4.1; no reward is read:

    +1 at the tokens of the data's answer,   -1 at those of the policy's

Trained with `policy_loss.loss_mode: spin`. The pairs are made by the trainer (`learner/unfolding.py`).
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    broadcast,
)
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.options import need

NEEDS = ("data_answers",)


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Signs of whole responses; a pair of which one side has no trained token has none."""
    chosen = need(batch.data_answers, "data_answers", "algorithm.adv_estimator data_answer")
    ragged = batch.ragged
    whole = ragged.group_sum(ragged.nonempty.long())[ragged.groups] == 2
    signs = torch.where(chosen, 1.0, -1.0)
    return broadcast(batch, torch.where(whole, signs, 0.0))
