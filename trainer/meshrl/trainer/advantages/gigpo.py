"""GiGPO: an agent's step is judged against its episode's group and against steps from the same state.

Feng et al. 2025, https://arxiv.org/abs/2505.10978, eqs. 3, 5-8. One row per environment step:

    A^E = s_i - mean over the rows of the prompt                       episode (eq. 3)
    R_t = r_t + γ R_{t+1}                                              return of a step in its episode (eq. 5)
    A^S = R_t - mean over the rows of the prompt with the same observation   step (eq. 7)
    A   = A^E + ω A^S                                                  (eq. 8)

`gigpo.mode: mean_std_norm` divides both by the unbiased standard deviation. Means run over step rows, so a
longer episode weighs more. A step whose observation nobody shares has A^S = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.advantages._types import AdvantageBatch, Advantages, broadcast, need
from meshrl.trainer.advantages.grpo import EPSILON, group_relative
from meshrl.trainer.config import AlgorithmConfig
from meshrl.trainer.ragged import Ragged

NEEDS = ("trajectories", "anchors")


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole steps.

    Raises:
        ConfigError: no episode or observation numbers.
    """
    ragged = batch.ragged
    episodes = need(batch.trajectories, "trajectories", "gigpo")
    anchors = need(batch.anchors, "anchors", "gigpo")
    rewards = batch.scores if batch.step_rewards is None else batch.step_rewards
    R = step_returns(rewards, episodes, gamma=config.gamma)
    divide = config.gigpo.mode == "mean_std_norm"
    A_episode = group_relative(
        ragged, batch.scores, divide_by_std=divide, conventions=config.conventions
    )
    A_step = step_relative(ragged, R, anchors, divide_by_std=divide)
    return broadcast(batch, A_episode + config.gigpo.step_advantage_w * A_step)


def step_returns(r: Tensor, episodes: Tensor, *, gamma: float) -> Tensor:
    """R [B] from r [B]; the rows of an episode are its steps in order, others may lie between."""
    order = episodes.argsort(stable=True)
    lengths = torch.unique_consecutive(episodes[order], return_counts=True)[1]
    steps = Ragged.from_lengths(lengths, torch.ones_like(episodes, dtype=torch.bool))
    R = steps.discounted_suffix_sum(r[order].double(), torch.full_like(r, gamma).double())
    return torch.empty_like(r).index_copy(0, order, R.to(r.dtype))


def step_relative(ragged: Ragged, R: Tensor, anchors: Tensor, *, divide_by_std: bool) -> Tensor:
    """A^S [B] from R [B]: relative to the rows of the same prompt and the same observation."""
    pairs = torch.stack([ragged.groups, anchors.to(ragged.groups)], dim=1)
    states = torch.unique(pairs, dim=0, return_inverse=True)[1]
    same_state = Ragged(offsets=ragged.offsets, mask=ragged.mask, groups=states)
    R = R.double()
    centred = R - same_state.group_mean(R)[states]
    return centred / (same_state.group_std(R)[states] + EPSILON) if divide_by_std else centred
