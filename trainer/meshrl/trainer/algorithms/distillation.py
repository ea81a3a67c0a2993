"""On-policy distillation: the policy samples, and a teacher judges each of its tokens, or says what it would say.

Agarwal et al. 2024, https://arxiv.org/abs/2306.13649 (reverse KL, student's own samples), in the form of
https://thinkingmachines.ai/blog/on-policy-distillation: one number a token, used as an advantage,

    D_t = clip(log π_T(y_t) - log π_old(y_t), ±c)          A_t ← w_r A_t + w D_t

The expected gradient is that of the reverse KL of each next token, KL(π || π_T), given what the policy itself has
said before. Tokens that the policy did not sample have no judgement.

With `top_k` the teacher tells its k likeliest tokens instead, and the loss of a place is the forward KL over them,

    L_t = clip(Σ_{v in top k} π_T(v) (log π_T(v) - log π(v)), 0, c)                    loss ← loss + w agg(L)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import DistillationConfig


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Distilled:
    """Result of `distil`."""

    advantages: Tensor
    """float32[N]"""
    metrics: Mapping[str, float]
    """`distillation/reverse_kl`: nats a token, the mean over the batch, not clipped."""


@torch.no_grad()
def distil(
    ragged: Ragged,
    advantages: Tensor,
    old_logprobs: Tensor,
    teacher_logprobs: Tensor,
    config: DistillationConfig,
) -> Distilled:
    """Advantages from rewards and from a teacher; all inputs float32[N]."""
    judged = torch.where(ragged.mask, teacher_logprobs - old_logprobs, 0.0)
    c = config.max_log_ratio
    D = judged.clamp(-c, c)
    weight = 0.0 if config.top_k else config.weight  # else the teacher is in the loss
    mixed = config.reward_weight * advantages + weight * D
    beyond = ragged.token_mean((judged.abs() > c).float())
    return Distilled(
        advantages=torch.where(ragged.mask, mixed, 0.0),
        metrics={
            "distillation/reverse_kl": float(ragged.token_mean(-judged)),
            "distillation/clipped": float(beyond),
        },
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Told:
    """Result of `forward_kl`."""

    loss: Tensor
    """float32[N], with gradient: nats."""
    metrics: Mapping[str, Tensor]
    """Means over the tokens that count: the probability that teacher and policy give to the k tokens together."""


def forward_kl(policy: Tensor, teacher: Tensor, ragged: Ragged, config: DistillationConfig) -> Told:
    """The forward KL over the tokens that the teacher thinks likeliest.

    Args:
        policy: float32[N, k], with gradient: the policy's log-probs of these tokens.
        teacher: float32[N, k]: the teacher's.
        ragged: The layout of the N places.
        config: The bounds.
    """
    mass = {
        "distillation/teacher_mass": ragged.token_mean(teacher.exp().sum(-1)),
        "distillation/policy_mass": ragged.token_mean(policy.detach().exp().sum(-1)),
    }
    if config.min_log_prob is not None:
        policy, teacher = (
            policy.clamp_min(config.min_log_prob),
            teacher.clamp_min(config.min_log_prob),
        )
    # Over some of the tokens only, so it may be negative: then the policy says them more often than the teacher.
    kl = (teacher.exp() * (teacher - policy)).sum(-1)
    return Told(loss=kl.clamp(0, config.max_log_ratio), metrics=mass)
