"""SPIN: DPO against the policy before the step, the opponent that self-play has just moved on from.

Chen et al. 2024, https://arxiv.org/abs/2401.01335, eq. 4.7, with the opponent renewed every step:

    h = (log π_θ(y_c) - log π_θ(y_r)) - (log π_old(y_c) - log π_old(y_r)),     l = -log σ(β h)

At the first update h = 0, and the gradient is that of β/2 (log π(y_r) - log π(y_c)); with several mini-batches or
epochs the margin holds it back. β is `policy_loss.dpo_beta`. See `_pairs` for how pairs are found.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses import dpo
from meshrl.trainer.algorithms.losses._options.dpo import Options
from meshrl.trainer.algorithms.losses._pairs import compute_with
from meshrl.trainer.algorithms.losses._types import LossInputs, LossOutput
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.config import ActorConfig

NEEDS: tuple[str, ...] = ()
OF_ROWS = True
"""It reads one advantage of a row, not one of each token."""
WHOLE_GROUPS = True
"""The rows of a group must be in one micro-batch."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Preference loss; see `_pairs` for what is raised."""
    p = options(config.policy_loss, Options).model_copy(update={"dpo_reference_free": False})
    against_old = dataclasses.replace(inputs, ref_logprobs=inputs.old_logprobs)

    def of_margin(h: Tensor) -> Tensor:
        return dpo.pair_loss(h, beta=p.dpo_beta, label_smoothing=p.dpo_label_smoothing)

    return compute_with(of_margin, against_old, p, aggregate, "spin")
