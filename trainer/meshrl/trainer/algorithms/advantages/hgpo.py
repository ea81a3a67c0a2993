"""HGPO: an agent's step is judged against steps from the same state that share more and more of its history.

He et al. 2026, https://arxiv.org/abs/2602.22817; the weights as in verl-agent's `recipe/hgpo`. G_k of a step are the
steps of its prompt whose last k observations are the same, k = 1 (the observation itself) to `history_length` + 1:

    R_t = r_t + γ R_{t+1}                                           return of a step in its episode
    A_k = R_t - mean over G_k            (mean_std_norm: / (standard deviation + 1e-6), biased)
    A   = Σ_k w_k A_k,   w_k = (k + 1)^α / Σ (j + 1)^α               over the k with A_k ≠ 0

A group of one step, or of equal returns, says nothing (A_k = 0) and has no weight, so a step whose whole history
nobody shares is judged by what others share of it. `base_group` adds the episode's advantage over its prompt's group
as k = 0. What a step and an observation are: gigpo.py.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    broadcast,
    group_metrics,
)
from meshrl.trainer.algorithms.advantages.gigpo import returns_of_steps, step_returns
from meshrl.trainer.algorithms.advantages.grpo import EPSILON, group_relative
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.options import need, options


class HgpoConfig(Config):
    """HGPO: groups of steps that share their observation and ever more of what came before it."""

    history_length: NonNegativeInt = 2
    """Observations before a step's own that a group may share; 0: the observation alone."""
    length_weight_alpha: NonNegativeFloat = 1.0
    """How much more groups count whose steps share more: (shared observations + 1) to this power."""
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    """Subtract the group mean, or also divide by the group's standard deviation."""
    base_group: bool = False
    """Let the episode's advantage over its prompt's group count as well, with weight 1."""


class Options(Config):
    """Keys of `algorithm`."""

    hgpo: HgpoConfig = HgpoConfig()


NEEDS = ("steps",)
GROUP_BASELINE = True
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "hgpo",
        "gamma": 0.95,
        "hgpo": {"history_length": 2, "length_weight_alpha": 1.0, "mode": "mean_norm"},
    },
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
    },
    "rollout": {"n": 8},
}
"""Two observations of history, weights that grow linearly and γ = 0.95; the KL term as in GiGPO."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole steps.

    Raises:
        ConfigError: neither steps nor the numbers of episodes and observations.
    """
    ragged, hgpo, steps = batch.ragged, options(config, Options).hgpo, batch.steps
    A_episode = group_relative(
        ragged,
        batch.scores,
        divide_by_std=hgpo.mode == "mean_std_norm",
        conventions=config.conventions,
    )
    if steps is None:
        episodes = need(batch.trajectories, "trajectories", "algorithm.adv_estimator hgpo")
        anchors = need(batch.anchors, "anchors", "algorithm.adv_estimator hgpo")
        rewards = batch.scores if batch.step_rewards is None else batch.step_rewards
        R = step_returns(rewards, episodes, gamma=config.gamma)
        A = of_histories(R, ragged.groups, episodes, anchors, A_episode, hgpo)
        return broadcast(batch, A)
    R = returns_of_steps(batch, steps, gamma=config.gamma)
    groups, base = ragged.groups[steps.rows], A_episode[steps.rows]
    A_step = of_histories(R, groups, steps.rows, steps.anchors, base, hgpo)
    A = torch.where(ragged.mask, A_step[steps.of_token.clamp(min=0)], 0.0).float()
    return Advantages(advantages=A, returns=A, metrics=group_metrics(batch))


def of_histories(
    R: Tensor, groups: Tensor, episodes: Tensor, anchors: Tensor, base: Tensor, config: HgpoConfig
) -> Tensor:
    """A float64[S] of steps with returns R; those of an episode are in order, others may lie between."""
    order = episodes.argsort(stable=True)
    R, groups, anchors, base = R.double()[order], groups[order], anchors[order], base[order]
    lengths = torch.unique_consecutive(episodes[order], return_counts=True)[1]
    first = torch.arange(len(order)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    weighed, weights = torch.zeros_like(R), torch.zeros_like(R)
    if config.base_group:
        weighed, weights = weighed + base.double(), weights + (base != 0)
    observation = _numbered(groups, anchors)
    history = observation
    for k in range(1, config.history_length + 2):
        there = first >= k - 1  # the step has k observations
        A_k = torch.zeros_like(R)
        A_k[there] = _relative(R[there], history[there], config.mode == "mean_std_norm")
        w_k = (k + 1) ** config.length_weight_alpha
        weighed, weights = weighed + w_k * A_k, weights + w_k * (A_k != 0)
        history = _numbered(history.roll(1), observation)
    A = torch.where(weights > 0, weighed / weights.clamp(min=EPSILON), 0.0)
    return torch.empty_like(A).index_copy(0, order, A)


def _numbered(left: Tensor, right: Tensor) -> Tensor:
    """int64[S]: equal numbers are equal pairs."""
    pairs = torch.stack([left, right.to(left)], dim=1)
    numbers: Tensor = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return numbers


def _relative(R: Tensor, states: Tensor, divide_by_std: bool) -> Tensor:
    """R less the mean of its state; exactly 0 where all returns of a state are equal."""
    counts = torch.bincount(states)
    least = torch.full((len(counts),), torch.inf, dtype=R.dtype)
    most = (-least).scatter_reduce(0, states, R, "amax")
    least = least.scatter_reduce(0, states, R, "amin")
    centred = R - (torch.zeros_like(least).index_add(0, states, R) / counts.clamp(min=1))[states]
    centred = torch.where((least == most)[states], 0.0, centred)
    if not divide_by_std:
        return centred
    squares = torch.zeros_like(least).index_add(0, states, centred.square())
    return centred / ((squares / counts.clamp(min=1)).sqrt()[states] + EPSILON)
