"""How far the policy that sampled is from the policy that is trained: the first thing to look at when a run diverges.

All metrics are over one log-prob of the trainer and one of the engine for each sampled token; group rows by
engine replica or by version before calling to see which replica or version drifted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.algorithms.ragged import Ragged

LOG_RATIO_BOUND = 20.0


def mismatch_metrics(
    ragged: Ragged, train_logprobs: Tensor, rollout_logprobs: Tensor
) -> dict[str, float]:
    """Metrics without a prefix; all inputs float32[N]; nothing when no token is trained.

    kl, k3_kl              KL(π_rollout || π_train) per token, estimators k1 and k3, nats
    training_ppl, rollout_ppl, ppl_ratio, *log_ppl*     perplexities, mean over rows
    chi2_token, chi2_seq   E[ρ²] - 1 with ρ = π_train/π_rollout of a token, of a row
    """
    if not bool(ragged.mask.any()):
        return {}
    x = train_logprobs - rollout_logprobs
    rho_token = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    log_rho_row = ragged.row_sum(x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    train, rollout = ragged.row_mean(train_logprobs), ragged.row_mean(rollout_logprobs)
    log_ppl_diff = rollout - train
    metrics = {
        "training_ppl": (-train).exp().mean(),
        "training_log_ppl": (-train).mean(),
        "kl": ragged.token_mean(-x),
        "k3_kl": ragged.token_mean(x.exp() - x - 1),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "log_ppl_diff": log_ppl_diff.mean(),
        "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "ppl_ratio": log_ppl_diff.exp().mean(),
        "chi2_token": ragged.token_mean(rho_token.square()) - 1,
        "chi2_seq": (2 * log_rho_row).exp().mean() - 1,
    }
    return {name: float(value) for name, value in metrics.items()}


@torch.no_grad()
def mismatch_by(
    ragged: Ragged, train_logprobs: Tensor, rollout_logprobs: Tensor, labels: Tensor
) -> dict[int, dict[str, float]]:
    """`mismatch_metrics` of the tokens with each label int64[N], for example their policy step."""
    return {
        int(label): mismatch_metrics(
            ragged.with_mask(ragged.mask & (labels == label)), train_logprobs, rollout_logprobs
        )
        for label in torch.unique(labels[ragged.mask])
    }
