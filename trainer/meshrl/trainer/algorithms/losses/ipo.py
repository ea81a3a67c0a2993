"""IPO: DPO with a squared loss, which does not push a certain preference without end.

Azar et al. 2023, https://arxiv.org/abs/2310.12036, eq. 17. With the margin h of `dpo` (summed log-probs):

    l = (h - 1/(2 β))²
"""

from __future__ import annotations

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import Tensor
from meshrl.trainer.algorithms.losses._types import ActorConfig, LossInputs, LossOutput
from meshrl.trainer.algorithms.losses.dpo import Options, compute_with
from meshrl.trainer.algorithms.options import options

NEEDS = ("ref_logprobs",)
OF_ROWS = True
WHOLE_GROUPS = True


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Preference loss; raises what `dpo.compute_with` raises."""
    p = options(config.policy_loss, Options)

    def of_margin(h: Tensor) -> Tensor:
        return pair_loss(h, beta=p.dpo_beta)

    return compute_with(of_margin, inputs, p, aggregate, "ipo")


def pair_loss(h: Tensor, *, beta: float) -> Tensor:
    """L of margins h, any shape."""
    return (h - 1 / (2 * beta)).square()
