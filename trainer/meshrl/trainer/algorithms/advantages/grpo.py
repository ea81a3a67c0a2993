"""GRPO: a response is as good as its distance from the mean of its group.

Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2:

    A_i = (s_i - mean_g(s)) / (std_g(s) + ε)

with s_i the response's reward and std unbiased. `norm_adv_by_std_in_grpo=False` drops the division (Dr. GRPO);
`grpo_vectorized` is verl's other name for it.
"""

from __future__ import annotations

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    Conventions,
    broadcast,
)
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.algorithms.ragged import Ragged


class Options(Config):
    """Keys of `algorithm`."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide by the standard deviation of the group."""


GROUP_BASELINE = True
EPSILON = 1e-6
DEFAULTS = {
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True},
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "seq-mean-token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
        "use_kl_loss": True,
        "kl_loss_coef": 0.04,
        "kl_loss_type": "low_var_kl",
    },
    "rollout": {"n": 8},
}
"""DeepSeekMath, eq. 3 and section 4.2: ε = 0.2, β = 0.04 with the estimator k3, 64 responses a prompt (here 8: raise
`rollout.n` where the engines can afford it)."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses, the same at each of a row's trained tokens.

    Where `batch.trajectories` says that several rows belong to one episode, its last row is judged.
    """
    divide = options(config, Options).norm_adv_by_std_in_grpo
    conventions = config.conventions
    if batch.trajectories is None:
        A = group_relative(
            batch.ragged, batch.scores, divide_by_std=divide, conventions=conventions
        )
    else:
        A = last_of_each(
            batch.ragged,
            batch.scores,
            batch.trajectories,
            torch.arange(batch.ragged.num_rows, device=batch.ragged.mask.device),
            divide_by_std=divide,
            conventions=conventions,
        )
    return broadcast(batch, A)


def group_relative(
    ragged: Ragged,
    s: Tensor,
    *,
    divide_by_std: bool,
    conventions: Conventions,
    epsilon: float = EPSILON,
) -> Tensor:
    """A [B] from s [B].

    A row without siblings gets 0; verl takes mean 0 and std 1 there and returns s / (1 + ε).
    """
    s = s.double()
    g = ragged.groups
    mean, std = ragged.group_mean(s)[g], ragged.group_std(s)[g]
    if conventions == "verl":
        mean = torch.where(ragged.alone, 0.0, mean)
        std = torch.where(ragged.alone, 1.0, std)
    return (s - mean) / (std + epsilon) if divide_by_std else s - mean


def last_of_each(
    ragged: Ragged,
    s: Tensor,
    trajectories: Tensor,
    turns: Tensor,
    *,
    divide_by_std: bool,
    conventions: Conventions,
) -> Tensor:
    """A [B] where several rows make an episode: the row with its highest turn is judged for all.

    Args:
        ragged: B rows.
        s: [B].
        trajectories: int64[B], the episode of each row.
        turns: int64[B], order within the episode.
        divide_by_std: As in `group_relative`.
        conventions: As in `group_relative`.
    """
    episodes = torch.unique(trajectories, return_inverse=True)[1]
    count = int(episodes.max()) + 1 if len(episodes) else 0
    lowest = torch.full((count,), -1, dtype=torch.int64, device=turns.device)
    final = (lowest.scatter_reduce(0, episodes, turns, "amax")[episodes] == turns).nonzero()
    rows = torch.zeros_like(lowest).index_copy(0, episodes[final[:, 0]], final[:, 0])
    ones = torch.ones_like(rows)
    finals = Ragged.from_lengths(ones, ones.bool(), ragged.groups[rows])
    A = group_relative(finals, s[rows], divide_by_std=divide_by_std, conventions=conventions)
    return A[episodes]
