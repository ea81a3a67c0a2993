"""Inputs and results of advantage estimators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.ragged import Ragged

if TYPE_CHECKING:
    from meshrl.trainer.config import AlgorithmConfig as AlgorithmConfig
    from meshrl.trainer.config import Conventions as Conventions
else:  # it is put together from the options beside the formulas
    AlgorithmConfig = Conventions = Any


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steps:
    """The steps of B rows over N tokens, in order. S = steps."""

    of_token: Tensor
    """int64[N]: the step of each sampled token; -1 where the policy sampled none."""
    rows: Tensor
    """int64[S]: the row of each step."""
    anchors: Tensor
    """int64[S]: equal numbers are equal observations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageBatch:
    """A whole training batch, all groups; estimators see it before it is cut into mini-batches."""

    ragged: Ragged
    token_rewards: Tensor
    """float32[N]: the reward, usually the outcome at the last trained token (`outcome_rewards`)."""
    row_rewards: Tensor | None = None
    """float32[B]: rewards of rows; those of rows without tokens have no place in `token_rewards`."""
    values: Tensor | None = None
    """float32[N]: the critic's V_t."""
    old_logprobs: Tensor | None = None
    """float32[N]: under the policy that is about to be trained."""
    reward_baselines: Tensor | None = None
    """float32[B]: reward of the prompt's greedy response (ReMax)."""
    sum_pi_squared: Tensor | None = None
    """float32[N]: Σ_v π(v)² over the vocabulary."""
    rollout_is_weights: Tensor | None = None
    """float32[N]: see rollout_correction."""
    reward_components: Mapping[str, Tensor] = field(default_factory=dict)
    """float32[B] each, by name."""
    group_sizes: Tensor | None = None
    """int64[B]: rows that each row's group was asked for; a partial group has fewer in the batch."""
    implicit_rewards: Tensor | None = None
    """float32[N]: PRIME's β (log π_φ - log π_ref)."""
    data_answers: Tensor | None = None
    """bool[B]: rows that are the data's own answers; the others are the policy's (SPIN)."""
    steps: Steps | None = None
    """The steps of rows that are whole episodes (GiGPO)."""
    trajectories: Tensor | None = None
    """int64[B]: rows that are steps of the same episode, in order (GiGPO)."""
    anchors: Tensor | None = None
    """int64[B]: rows whose step starts from the same observation (GiGPO)."""
    step_rewards: Tensor | None = None
    """float32[B]: reward of each step (GiGPO); None takes the row's reward."""

    @property
    def scores(self) -> Tensor:
        """s, float32[B]: each row's reward, summed over trained and masked tokens alike."""
        of_tokens = self.ragged.row_sum(self.token_rewards, masked=False)
        if self.row_rewards is None:
            return of_tokens
        return torch.where(self.ragged.lengths > 0, of_tokens, self.row_rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Result of an estimator; both tensors are 0 at masked tokens."""

    advantages: Tensor
    """float32[N]"""
    returns: Tensor
    """float32[N]: targets of a critic; the advantages again where there is no critic."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Estimator(Protocol):
    """A module of this package.

    It may also have `Options` (`algorithms.options`) and these literals, which are read without importing it:

    NEEDS           fields of AdvantageBatch that must be given, besides the reward
    GROUP_BASELINE  True: rows of a group are compared, one row alone teaches nothing
    DEFAULTS        what `algorithm.name` sets where it names the module, or its NAME (`recipe_defaults`)
    """

    def compute(self, batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
        """Estimate."""
        ...


def outcome_rewards(ragged: Ragged, row_rewards: Tensor) -> Tensor:
    """[B] to [N]: each row's reward at its last trained token, so that no estimator can miss it.

    A row without trained tokens carries it at its last token; an empty row carries none (`row_rewards` has it).
    """
    where = torch.where(ragged.mask, ragged.positions, -1)
    last = torch.full_like(ragged.lengths, -1).scatter_reduce(0, ragged.rows, where, "amax")
    last = torch.where(last < 0, ragged.lengths - 1, last)
    rewards = torch.zeros(ragged.num_tokens, dtype=torch.float32, device=ragged.mask.device)
    present = ragged.lengths > 0
    rewards[(ragged.offsets[:-1] + last)[present]] = row_rewards[present].float()
    return rewards


def broadcast(batch: AdvantageBatch, row_advantages: Tensor) -> Advantages:
    """Outcome advantages [B] at every trained token."""
    tokens = batch.ragged.to_tokens(row_advantages.float())
    return Advantages(advantages=tokens, returns=tokens, metrics=group_metrics(batch))


def group_metrics(batch: AdvantageBatch) -> dict[str, float]:
    """Shares of rows that a group-relative estimator learns nothing from."""
    ragged = batch.ragged
    if not ragged.num_rows:
        return {}
    flat = ragged.group_std(batch.scores.double())[ragged.groups] == 0
    metrics = {
        "advantages/rows_alone": float(ragged.alone.float().mean()),
        "advantages/rows_in_equal_groups": float((flat & ~ragged.alone).float().mean()),
    }
    if batch.group_sizes is not None:
        partial = ragged.group_counts[ragged.groups] < batch.group_sizes
        metrics["advantages/rows_in_partial_groups"] = float(partial.float().mean())
    return metrics
