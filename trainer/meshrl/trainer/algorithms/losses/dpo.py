"""DPO on pairs of responses, offline or chosen by reward while training.

Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7; label smoothing λ: Mitchell 2023,
https://ericmitchell.ai/cdpo.pdf. With the margin h of `_pairs`:

    l = -(1 - λ) log σ(β h) - λ log σ(-β h)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._options.dpo import Options
from meshrl.trainer.algorithms.losses._pairs import compute_with
from meshrl.trainer.algorithms.losses._types import LossInputs, LossOutput
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.config import ActorConfig

NEEDS = ("ref_logprobs",)
OF_ROWS = True
"""It reads one advantage of a row, not one of each token."""
WHOLE_GROUPS = True
"""The rows of a group must be in one micro-batch."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Preference loss; see `_pairs` for what is raised."""
    p = options(config.policy_loss, Options)

    def of_margin(h: Tensor) -> Tensor:
        return pair_loss(h, beta=p.dpo_beta, label_smoothing=p.dpo_label_smoothing)

    return compute_with(of_margin, inputs, p, aggregate, "dpo")


def pair_loss(h: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """L of margins h, any shape."""
    ls = label_smoothing
    return -(1 - ls) * logsigmoid(beta * h) - ls * logsigmoid(-beta * h)
