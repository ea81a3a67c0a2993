"""Optimal token baseline: at every position the baseline that minimises the variance of the gradient.

Li et al. 2026, https://arxiv.org/abs/2602.07078:

    w_t = 1 - 2 π(y_t) + Σ_v π(v)²       squared norm of the score function of one token, from its logits
    W_t = Σ_{j ≤ t} w_j                  energy of the trajectory so far
    b_t = Σ_g G_t W_t / Σ_g W_t          over the rows of the group that reach position t
    A_t = G_t - b_t,   G_t = Σ_{t' ≥ t} r_t'

With importance weights ρ̄, w_t is multiplied by ρ̄_t². Behind the second longest row of a group one row is
left, which would be its own baseline: `otb_handle_zero_tail` leaves it without.
"""

from __future__ import annotations

from pydantic import Field

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    group_metrics,
)
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.options import need, options
from meshrl.trainer.algorithms.ragged import Ragged


class Options(Config):
    """Keys of `algorithm`."""

    otb_handle_zero_tail: bool = Field(default=True, exclude=True)
    """No baseline behind the second longest row of a group (optimal token baseline)."""


NEEDS = ("old_logprobs", "sum_pi_squared")
GROUP_BASELINE = True
EPSILON = 1e-8


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages and returns; positions count every token of the response, a tool's included.

    Raises:
        ConfigError: no old log-probs or no Σπ².
    """
    ragged = batch.ragged
    G, W = energies(batch, "algorithm.adv_estimator optimal_token_baseline")
    b = baseline(
        ragged, G, W, alone=ragged.alone, zero_tail=options(config, Options).otb_handle_zero_tail
    )
    return finish(batch, G, b, config)


def energies(batch: AdvantageBatch, asker: str) -> tuple[Tensor, Tensor]:
    """(G, W), float64[N], the reward to go and the energy so far."""
    ragged = batch.ragged
    log_pi = need(batch.old_logprobs, "old_logprobs", asker).double()
    w = 1 - 2 * log_pi.exp() + need(batch.sum_pi_squared, "sum_pi_squared", asker).double()
    if batch.rollout_is_weights is not None:
        w = w * batch.rollout_is_weights.double().square()
    r = torch.where(ragged.mask, batch.token_rewards.double(), 0.0)
    return ragged.suffix_sum(r), ragged.row_cumsum(torch.where(ragged.mask, w, 0.0))


def baseline(ragged: Ragged, G: Tensor, W: Tensor, *, alone: Tensor, zero_tail: bool) -> Tensor:
    """B [N]; 0 for the rows `alone` bool[B]."""
    g, t = ragged.groups[ragged.rows], ragged.positions
    columns = int(ragged.lengths.max()) if ragged.num_rows else 0
    place = g * columns + t
    W = torch.where(ragged.mask, W, 0.0)
    empty = W.new_zeros(ragged.num_groups * columns)
    b = empty.index_add(0, place, G * W) / (empty.index_add(0, place, W) + EPSILON)
    b = torch.where(alone[ragged.rows], 0.0, b[place])
    if zero_tail:
        b = torch.where(t >= _tail_start(ragged)[ragged.rows], 0.0, b)
    return b


def _tail_start(ragged: Ragged) -> Tensor:
    """int64[B]: the second longest length, for the unique longest row of a group; else no tail."""
    L, g = ragged.valid_lengths, ragged.groups
    zeros = torch.zeros(ragged.num_groups, dtype=torch.int64, device=L.device)
    longest = zeros.scatter_reduce(0, g, L, "amax")[g] == L
    second = zeros.scatter_reduce(0, g, torch.where(longest, 0, L), "amax")[g]
    unique = ragged.group_sum(longest.long())[g] == 1
    never = torch.iinfo(torch.int64).max
    return torch.where(longest & unique, second, never)


def finish(batch: AdvantageBatch, G: Tensor, b: Tensor, config: AlgorithmConfig) -> Advantages:
    """Advantages from G and b [N]; a row without siblings gets 0 (verl: its reward to go)."""
    ragged = batch.ragged
    valid = ragged.mask
    if config.conventions == "meshrl":
        valid = valid & ~ragged.alone[ragged.rows]
    return Advantages(
        advantages=torch.where(valid, G - b, 0.0).float(),
        returns=torch.where(ragged.mask, G, 0.0).float(),
        metrics=group_metrics(batch),
    )


def sum_pi_squared(logits: Tensor) -> Tensor:
    """Σ_v π(v)² of softmax(logits), [..., V] to [...]."""
    return (torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1)).exp()
