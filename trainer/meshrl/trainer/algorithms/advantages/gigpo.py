"""GiGPO: an agent's step is judged against its episode's group and against steps from the same state.

Feng et al. 2025, https://arxiv.org/abs/2505.10978, eqs. 3, 5-8:

    A^E = s_i - mean over the episodes of the prompt                         (eq. 3)
    R_t = r_t + γ R_{t+1}                                                    return of a step in its episode (eq. 5)
    A^S = R_t - mean over the steps of the prompt with the same observation  (eq. 7)
    A   = A^E + ω A^S                                                        (eq. 8)

A row of this mesh is an episode: its steps are runs of sampled tokens, an observation is what precedes a run
(`anchors_of`), each token has its step's A. In verl-agent's layout, one row per step (`trajectories`, `anchors`),
the mean of eq. 3 runs over step rows, so that a longer episode weighs more. `gigpo.mode: mean_std_norm` divides both
by the unbiased standard deviation. A step whose observation nobody shares has A^S = 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    Steps,
    broadcast,
    group_metrics,
)
from meshrl.trainer.algorithms.advantages.grpo import EPSILON, group_relative
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.options import need, options
from meshrl.trainer.algorithms.ragged import Ragged

if TYPE_CHECKING:
    from meshrl.contract.types import Trajectory


class GigpoConfig(Config):
    """GiGPO: groups of steps that start from the same observation."""

    step_advantage_w: float = 1.0
    """Weight of the step advantage beside the episode's."""
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    """Subtract the group mean, or also divide by the group's standard deviation."""


class Options(Config):
    """Keys of `algorithm`."""

    gigpo: GigpoConfig = GigpoConfig()


NEEDS = ("steps",)
GROUP_BASELINE = True
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "gigpo",
        "gamma": 0.95,
        "gigpo": {"step_advantage_w": 1.0, "mode": "mean_norm"},
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
"""ω = 1, γ = 0.95 and means without deviations (`mean_norm`, their default). A row is an episode,
its steps are what the policy said between two observations."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole steps.

    Raises:
        ConfigError: neither steps nor the numbers of episodes and observations.
    """
    if batch.steps is not None:
        return _of_episodes(batch, batch.steps, config)
    ragged = batch.ragged
    episodes = need(batch.trajectories, "trajectories", "algorithm.adv_estimator gigpo")
    anchors = need(batch.anchors, "anchors", "algorithm.adv_estimator gigpo")
    rewards = batch.scores if batch.step_rewards is None else batch.step_rewards
    gigpo = options(config, Options).gigpo
    R = step_returns(rewards, episodes, gamma=config.gamma)
    divide = gigpo.mode == "mean_std_norm"
    A_episode = group_relative(
        ragged, batch.scores, divide_by_std=divide, conventions=config.conventions
    )
    A_step = step_relative(ragged, R, anchors, divide_by_std=divide)
    return broadcast(batch, A_episode + gigpo.step_advantage_w * A_step)


def _of_episodes(batch: AdvantageBatch, steps: Steps, config: AlgorithmConfig) -> Advantages:
    """Rows are episodes of `steps`, S in all."""
    ragged, gigpo = batch.ragged, options(config, Options).gigpo
    divide = gigpo.mode == "mean_std_norm"
    R = returns_of_steps(batch, steps, gamma=config.gamma)
    ones = torch.ones(len(steps.rows), dtype=torch.bool)
    of_prompt = Ragged.from_lengths(torch.ones_like(steps.rows), ones, ragged.groups[steps.rows])
    A_step = step_relative(of_prompt, R, steps.anchors, divide_by_std=divide)
    A_episode = group_relative(
        ragged, batch.scores, divide_by_std=divide, conventions=config.conventions
    )
    tokens = ragged.to_tokens(A_episode.double())
    tokens = tokens + gigpo.step_advantage_w * A_step[steps.of_token.clamp(min=0)]
    A = torch.where(ragged.mask, tokens, 0.0).float()
    shared = _shared(of_prompt, steps)
    metrics = {**group_metrics(batch), "advantages/steps_with_shared_observation": shared}
    return Advantages(advantages=A, returns=A, metrics=metrics)


def returns_of_steps(batch: AdvantageBatch, steps: Steps, *, gamma: float) -> Tensor:
    """R float64[S] of the steps of rows that are episodes: what their tokens earned, and what follows."""
    counts = torch.bincount(steps.rows, minlength=batch.ragged.num_rows)
    layout = Ragged.from_lengths(counts, torch.ones(len(steps.rows), dtype=torch.bool))
    sampled = steps.of_token >= 0
    r = torch.zeros(len(steps.rows), dtype=torch.float64)
    r = r.index_add(0, steps.of_token[sampled], batch.token_rewards[sampled].double())
    return layout.discounted_suffix_sum(r, torch.full_like(r, gamma))


def _shared(of_prompt: Ragged, steps: Steps) -> float:
    """The share of steps whose observation another step of their prompt has too."""
    pairs = torch.stack([of_prompt.groups, steps.anchors], dim=1)
    _, states, counts = torch.unique(pairs, dim=0, return_inverse=True, return_counts=True)
    return float((counts[states] > 1).float().mean()) if len(states) else 0.0


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


def anchors_of(row: Trajectory) -> list[str]:
    """A hash of the tokens between the last step (or the beginning) and each step of `row`; of parts, as they say.

    prompt │ ●●●● │ tool says A │ ●● │ tool says B │ ●●●      three steps; their anchors are prompt, A, B
    """
    if row.parts:
        return [anchor for part in row.parts for anchor in part.anchors]
    sampled = np.asarray(row.loss_mask, dtype=bool)
    edges = np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    before = np.concatenate([[0], ends[:-1]]) if len(starts) else ends
    return [
        hashlib.blake2b(np.ascontiguousarray(row.tokens[a:b]).tobytes(), digest_size=8).hexdigest()
        for a, b in zip(before, starts, strict=True)
    ]


def steps_of(ragged: Ragged, anchors: Sequence[Sequence[str]]) -> Steps:
    """The steps of rows with `anchors` (`anchors_of` each); the mask of `ragged` says what was sampled."""
    mask = ragged.mask
    follows = mask.roll(1) & (ragged.positions > 0)
    starts = mask & ~follows
    names = [name for row in anchors for name in row]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Steps(
        of_token=torch.where(mask, starts.long().cumsum(0) - 1, -1),
        rows=ragged.rows[starts],
        anchors=torch.tensor([numbers[name] for name in names], dtype=torch.int64),
    )
