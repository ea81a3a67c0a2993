"""SPIN: DPO against the policy before the step, the opponent that self-play has just moved on from.

Chen et al. 2024, https://arxiv.org/abs/2401.01335, eq. 4.7, with the opponent renewed every step:

    h = (log π_θ(y_c) - log π_θ(y_r)) - (log π_old(y_c) - log π_old(y_r)),     l = -log σ(β h)

At the first update h = 0, and the gradient is that of β/2 (log π(y_r) - log π(y_c)); with several mini-batches or
epochs the margin holds it back. β is `policy_loss.dpo_beta`. See `dpo` for how pairs are found.
"""

from __future__ import annotations

import dataclasses

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import Tensor
from meshrl.trainer.algorithms.losses._types import ActorConfig, LossInputs, LossOutput
from meshrl.trainer.algorithms.losses.dpo import Options, compute_with, pair_loss
from meshrl.trainer.algorithms.options import options

OF_ROWS = True
WHOLE_GROUPS = True
DEFAULTS = {
    "algorithm": {"adv_estimator": "preference"},
    "actor": {"policy_loss": {"loss_mode": "spin", "dpo_beta": 0.1}},
    "rollout": {"n": 2},
}
"""Section 4, with a reward as the judge of which of two own responses is the better one: the opponent
is renewed every step, so no reference service is needed. With `adv_estimator: data_answer` and `rollout.n: 1` the
data's own answers are chosen instead, as in the paper."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Preference loss; raises what `dpo.compute_with` raises."""
    p = options(config.policy_loss, Options).model_copy(update={"dpo_reference_free": False})
    against_old = dataclasses.replace(inputs, ref_logprobs=inputs.old_logprobs)

    def of_margin(h: Tensor) -> Tensor:
        return pair_loss(h, beta=p.dpo_beta, label_smoothing=p.dpo_label_smoothing)

    return compute_with(of_margin, against_old, p, aggregate, "spin")
