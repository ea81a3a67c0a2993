"""PRIME's implicit reward model: a language model whose log-ratio to its reference is a process reward.

Cui et al. 2025, https://arxiv.org/abs/2502.01456; Yuan et al. 2024, https://arxiv.org/abs/2412.01981:

    q_t = log π_φ(y_t) - log π_ref(y_t),     r_t = β q_t

trained on the outcomes (acc in {0, 1}) of the same rollouts, with cross-entropy or with a pairwise loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from meshrl.trainer.algorithms.ragged import Ragged

BestOfN = Literal["none", "bon_acc", "bon_rm"]


def process_rewards(ragged: Ragged, q: Tensor, *, beta: float) -> Tensor:
    """R float32[N] from q [N]: the last trained token of a row gets none, the outcome is paid there.

    Divided by the largest |reward to go| of the batch, so that β does not set the scale of advantages.
    """
    with torch.no_grad():
        r = beta * q[ragged.mask]
        steps = ragged.valid_only()
        last = steps.positions == steps.lengths[steps.rows] - 1
        r = torch.where(last, 0.0, r)
        to_go = steps.suffix_sum(r)
        largest = to_go.abs().max() if len(to_go) else torch.zeros(())
        return ragged.from_valid(r / (largest + 1e-6))


def row_cross_entropy(ragged: Ragged, q: Tensor, acc: Tensor, *, beta: float) -> Tensor:
    """BCE(σ(β Σ_t q_t), acc) of each row [B]: q [N], acc [B] in [0, 1]."""
    Q = beta * ragged.row_sum(q)
    return functional.binary_cross_entropy_with_logits(Q, acc, reduction="none")


def detached_dpo(
    ragged: Ragged,
    q: Tensor,
    acc: Tensor,
    sibling_q: Tensor,
    sibling_acc: Tensor,
    *,
    beta: float,
    best_of_n: BestOfN = "none",
) -> Tensor:
    """-log σ(±(β Q - β mean Q_others)): a row against the detached rows of its prompt with the other outcome.

    Args:
        ragged: B rows.
        q: [N].
        acc: [B], 0 or 1.
        sibling_q: [B, n], Σ_t q_t of the n rows of each row's prompt.
        sibling_acc: [B, n].
        beta: β.
        best_of_n: `none` averages over rows; otherwise rows are weighed by the density of being the best of n,
            n · F^(n-1) with F the share of siblings that are no better in accuracy or in reward, and summed.
    """
    Q = beta * ragged.row_sum(q)
    correct = (acc > 0).unsqueeze(1)
    other = torch.where(correct, sibling_acc < acc[:, None], sibling_acc > acc[:, None])
    count = other.sum(1)
    others = beta * (sibling_q * other).sum(1) / count.clamp(min=1)
    sign = (acc > 0).to(Q.dtype) * 2 - 1
    loss = -functional.logsigmoid((Q - others) * sign)
    if best_of_n == "none":
        return loss.mean()
    n = sibling_acc.shape[1]
    by_accuracy = best_of_n == "bon_acc"
    no_better = sibling_acc <= acc[:, None] if by_accuracy else beta * sibling_q <= Q[:, None]
    return (loss * n * no_better.to(Q.dtype).mean(1).pow(n - 1)).sum()
