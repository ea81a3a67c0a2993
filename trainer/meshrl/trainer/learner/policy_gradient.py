"""The algorithm of a run, composed of correction, KL in the reward, advantages and loss.

Experience ──correction──▶ mask, weights ──KL in reward──▶ token rewards ──estimator, teacher──▶ Targets (whole batch)
MicroBatch ──actor_loss──▶ pg - c_entropy · agg(H) + c_kl · agg(KL(π_θ, π_ref)) + c_nll · NLL(correct)

All terms of the loss share the aggregation, so each is the same for every split of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshrl.common import plugins
from meshrl.common.plugins import load
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, outcome_rewards
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.distillation import distil, forward_kl
from meshrl.trainer.algorithms.kl import KlController, kl_in_reward, kl_penalty
from meshrl.trainer.algorithms.losses._types import LossInputs, LossOutput
from meshrl.trainer.algorithms.needs import (
    Needs,
    check,
    corrects,
    loss_name,
    needs_of,
)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES, need
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.algorithms.recipes.dapo import overlong_penalty
from meshrl.trainer.algorithms.recipes.pf_ppo import resample
from meshrl.trainer.algorithms.rollout_correction import bounded_weights, correct, interpolate
from meshrl.trainer.config import ActorConfig, AlgorithmConfig
from meshrl.trainer.learner.experience import Experience

SHARES = ("actor/pg_loss", "actor/kl_loss", "actor/positive_nll", "distillation/loss")
"""Metrics of `actor_loss` that add up over micro-batches, as the loss does; the others are means."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardOutputs:
    """Outputs of the models before the policy's update, for the whole batch of N response tokens."""

    logprobs: torch.Tensor | None = None
    """float32[N]; None: the batch is one update, which computes them itself, and nothing reads them earlier."""
    sum_pi_squared: torch.Tensor | None = None
    """float32[N]: Σ_v π(v)²; only where the objective reads it."""
    values: torch.Tensor | None = None
    """float32[N]: the critic's, where there is one."""
    implicit_rewards: torch.Tensor | None = None
    """float32[N]: PRIME's process rewards."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Targets:
    """Inputs of the loss for a whole batch, besides log-probs."""

    advantages: torch.Tensor
    """float32[N]"""
    returns: torch.Tensor
    """float32[N]: targets of a critic."""
    token_rewards: torch.Tensor
    """float32[N]: after shaping and the KL penalty."""
    mask: torch.Tensor
    """bool[N]: tokens that count."""
    old_logprobs: torch.Tensor | None
    """float32[N]; None as in ForwardOutputs."""
    weights: torch.Tensor | None
    """float32[N]: importance weights."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One micro-batch as the loss sees it, on the policy's device."""

    inputs: LossInputs
    entropies: torch.Tensor
    """float32[n], with gradient."""
    staleness: torch.Tensor
    """int64[n]: optimizer steps between the version that sampled a token and this step."""
    correct: torch.Tensor
    """bool[b]: rows whose reward is positive."""
    mini_batch_tokens: int
    """Tokens that count in the whole mini-batch, all ranks together."""
    mini_batch_correct_tokens: int
    """Such tokens of correct rows."""
    mini_batch_rows: int
    ranks: int
    """The loss is multiplied by this, because FSDP averages gradients over ranks."""
    candidates: torch.Tensor | None = None
    """float32[n, k], with gradient: log-probs of the tokens that a teacher thinks likeliest."""
    teacher: torch.Tensor | None = None
    """float32[n, k]: the teacher's."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Loss:
    """A micro-batch's share of its mini-batch's loss."""

    total: torch.Tensor
    shares: Mapping[str, float]
    """Metrics that add up over micro-batches."""
    means: Mapping[str, float]
    """Means over the tokens that count."""


class Objective(Protocol):
    """Computes targets of rewards, and a loss of log-probs."""

    @property
    def needs(self) -> Needs:
        """Columns, models and passes that it needs."""
        ...

    @property
    def rollout_is_old(self) -> bool:
        """Whether the rollout's log-probs are used as the old policy's."""
        ...

    kl_coef: float
    """The coefficient of the KL penalty in the reward, as its controller has it now."""

    def targets(self, experience: Experience, before: ForwardOutputs) -> Targets:
        """Advantages of the whole batch."""
        ...

    def resampled(self, experience: Experience, generator: torch.Generator) -> Sequence[int] | None:
        """Rows to train on, drawn with replacement; None: each once."""
        ...

    def loss(self, micro: MicroBatch) -> Loss:
        """The loss of a micro-batch."""
        ...


class PolicyGradient:
    """The objective that a recipe's `algorithm` and `actor` sections describe."""

    def __init__(
        self, algorithm: AlgorithmConfig, actor: ActorConfig, *, max_response_length: int
    ) -> None:
        """Load the estimator and the loss.

        Args:
            algorithm: The estimator, KL in the reward, the correction.
            actor: The loss and its terms.
            max_response_length: The divisor of `seq-mean-token-sum-norm` where none is given.

        Raises:
            ConfigError: no such estimator or loss, or one needs what no part of the mesh provides.
        """
        check(algorithm, actor)
        self._algorithm = algorithm
        self._correction = algorithm.rollout_correction
        actor = actor.model_copy(update={"conventions": algorithm.conventions})
        self._actor = _bypassed(actor, algorithm) if self._correction.bypass_mode else actor
        self._max_response_length = max_response_length
        self._controller = KlController.start(algorithm.kl_ctrl)
        self._estimate = load(ADVANTAGES, algorithm.adv_estimator, "compute")
        self._needs = needs_of(algorithm, actor)
        load(LOSSES, loss_name(algorithm, actor), "compute")

    @property
    def needs(self) -> Needs:
        """Columns, models and passes that the algorithm needs."""
        return self._needs

    @property
    def rollout_is_old(self) -> bool:
        """In bypass mode, with an interpolated anchor, or with `actor.recompute_old_log_probs: false`."""
        return (
            self._correction.bypass_mode
            or self._interpolates
            or self._actor.recompute_old_log_probs is False
        )

    @property
    def kl_coef(self) -> float:
        """β of the KL in the reward."""
        return self._controller.value

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        self._controller = KlController(config=self._algorithm.kl_ctrl, value=value)

    @torch.no_grad()
    def targets(self, experience: Experience, before: ForwardOutputs) -> Targets:
        """Advantages of the whole batch: B rows, N response tokens."""
        ragged, weights = experience.ragged, None
        metrics: dict[str, float] = {}
        if corrects(self._algorithm):
            logprobs = _required(before.logprobs, "old log-probs")
            corrected = correct(ragged, logprobs, experience.rollout_logprobs, self._correction)
            ragged, weights = ragged.with_mask(corrected.mask), corrected.weights
            metrics |= corrected.metrics
        outcomes = self._outcomes(experience, metrics)
        if experience.token_rewards is None:
            rewards = outcome_rewards(ragged, outcomes)
        else:  # the judge's own token rewards, plus what was added to the score: the overlong penalty
            extra = outcome_rewards(ragged, outcomes - experience.rewards)
            rewards = experience.token_rewards + extra
        if self._algorithm.use_kl_in_reward:
            penalised = kl_in_reward(
                ragged,
                rewards,
                _required(before.logprobs, "old log-probs"),
                _required(experience.ref_logprobs, "ref_logprobs"),
                name=self._algorithm.kl_penalty,
                controller=self._controller,
            )
            rewards = penalised.token_rewards
            metrics |= {"reward/kl": penalised.current_kl, "reward/kl_coef": self._controller.value}
            self._controller = penalised.controller
        estimate: Advantages = self._estimate(
            AdvantageBatch(
                ragged=ragged,
                token_rewards=rewards,
                row_rewards=outcomes if experience.token_rewards is None else None,
                values=before.values,
                old_logprobs=before.logprobs,
                reward_baselines=experience.reward_baselines,
                sum_pi_squared=before.sum_pi_squared,
                rollout_is_weights=weights,
                reward_components=_components(experience),
                group_sizes=experience.group_sizes,
                implicit_rewards=before.implicit_rewards,
                steps=experience.steps,
                data_answers=experience.data_answers,
            ),
            self._algorithm,
        )
        advantages = estimate.advantages
        if self._algorithm.distillation.weight:
            rollout = (
                experience.rollout_logprobs
            )  # the same policy, where there is no pass of its own
            distilled = distil(
                ragged,
                advantages,
                rollout if before.logprobs is None else before.logprobs,
                _required(experience.ref_logprobs, "ref_logprobs"),
                self._algorithm.distillation,
            )
            advantages = distilled.advantages
            metrics |= distilled.metrics
        metrics["advantages/abs_mean"] = float(ragged.token_mean(advantages.abs()))
        return Targets(
            advantages=advantages,
            returns=estimate.returns,
            token_rewards=rewards,
            mask=ragged.mask,
            old_logprobs=before.logprobs,
            weights=weights,
            metrics={**metrics, **estimate.metrics},
        )

    def resampled(self, experience: Experience, generator: torch.Generator) -> Sequence[int] | None:
        """PF-PPO's draw, by the reward before the KL penalty."""
        if not self._algorithm.use_pf_ppo:
            return None
        scores = self._outcomes(experience, {})
        rows: list[int] = resample(scores, self._algorithm.pf_ppo, generator=generator).tolist()
        return sorted(rows)

    def _outcomes(self, experience: Experience, metrics: dict[str, float]) -> torch.Tensor:
        """float32[B]: rewards with the overlong penalty, which is also added to `metrics`."""
        buffer = self._algorithm.overlong_buffer
        if not buffer.enable:
            return experience.rewards
        penalty = overlong_penalty(
            experience.ragged.lengths,
            max_response_length=self._max_response_length,
            buffer=buffer.len or max(1, self._max_response_length // 5),
            factor=buffer.penalty_factor,
        )
        metrics["reward/overlong_penalty"] = float(penalty.mean())
        return experience.rewards + penalty

    def loss(self, micro: MicroBatch) -> Loss:
        """Policy loss and the terms beside it, each aggregated alike."""
        aggregate = Aggregator.for_batch(
            self._actor,
            batch_num_tokens=max(1, micro.mini_batch_tokens),
            global_batch_size=micro.mini_batch_rows,
            max_response_length=self._max_response_length,
            dp_size=micro.ranks,
        )
        result = actor_loss(
            self._anchored(micro) if self._interpolates else micro.inputs,
            self._actor,
            aggregate,
            entropy=micro.entropies,
            correct=micro.correct,
            correct_num_tokens=micro.mini_batch_correct_tokens,
        )
        total, metrics = result.loss, dict(result.metrics)
        teaches = self._algorithm.distillation
        if teaches.top_k:
            told = forward_kl(
                _required(micro.candidates, "log-probs of what the teacher thinks likeliest"),
                _required(micro.teacher, "ref_top_logprobs"),
                micro.inputs.ragged,
                teaches,
            )
            taught = aggregate(told.loss, micro.inputs.ragged)
            total = total + teaches.weight * taught
            metrics |= {"distillation/loss": taught.detach(), **told.metrics}
        values = {name: float(value) for name, value in metrics.items()}
        return Loss(
            total=total,
            shares={name: value for name, value in values.items() if name in SHARES},
            means={name: value for name, value in values.items() if name not in SHARES},
        )

    @property
    def _interpolates(self) -> bool:
        return self._correction.proximal == "interpolate"

    def _anchored(self, micro: MicroBatch) -> LossInputs:
        """Decoupled PPO without a forward pass: clip around a policy between the sampling and the current one."""
        inputs = micro.inputs
        rollout = inputs.old_logprobs
        anchor = interpolate(rollout, inputs.logprobs, micro.staleness)
        weights, _ = bounded_weights(
            inputs.ragged,
            anchor - rollout,
            level="token",
            threshold=self._correction.rollout_is_threshold,
        )
        return dataclasses.replace(inputs, old_logprobs=anchor, rollout_is_weights=weights)


def _bypassed(actor: ActorConfig, algorithm: AlgorithmConfig) -> ActorConfig:
    """The actor with the loss that corrects for itself, as `algorithm.rollout_correction` says."""
    policy_loss = actor.policy_loss.model_copy(
        update={
            "loss_mode": "bypass_mode",
            "rollout_correction": algorithm.rollout_correction,
        }
    )
    return actor.model_copy(update={"policy_loss": policy_loss})


def _components(experience: Experience) -> dict[str, torch.Tensor]:
    """float32[B] of every reward component that all rows have."""
    rows = experience.components
    names = set.intersection(*map(set, rows)) if rows else set()
    return {
        name: torch.tensor([row[name] for row in rows], dtype=torch.float32)
        for name in sorted(names)
    }


def _required(value: torch.Tensor | None, name: str) -> torch.Tensor:
    if value is None:
        raise ConfigError(f"the algorithm needs {name}, and the rows have none")
    return value


def actor_loss(
    inputs: LossInputs,
    config: ActorConfig,
    aggregate: Aggregator,
    *,
    entropy: Tensor | None = None,
    correct: Tensor | None = None,
    correct_num_tokens: int | None = None,
) -> LossOutput:
    """The scalar to differentiate for one micro-batch.

    Args:
        inputs: The micro-batch.
        config: Which loss, and the coefficients.
        aggregate: Aggregation over the mini-batch.
        entropy: float32[N]; needed when `entropy_coeff` is not 0, reported whenever it is given.
        correct: bool[B], rows with a right answer; needed when `positive_nll_coef` is not 0.
        correct_num_tokens: Trained tokens of correct rows of the mini-batch over all ranks.

    Raises:
        ConfigError: an unknown loss, or one that lacks an input.
    """
    compute = plugins.load(LOSSES, config.policy_loss.loss_mode, "compute")
    output: LossOutput = compute(inputs, config, aggregate)
    ragged, loss, metrics = inputs.ragged, output.loss, dict(output.metrics)
    metrics["actor/pg_loss"] = output.loss.detach()
    if entropy is not None:
        metrics["actor/entropy"] = ragged.token_mean(entropy.detach())
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * aggregate(
            need(entropy, "entropy", "actor.entropy_coeff"), ragged
        )
    if config.use_kl_loss:
        reference = need(inputs.ref_logprobs, "ref_logprobs", "actor.use_kl_loss")
        kl = kl_penalty(inputs.logprobs, reference, config.kl_loss_type)
        kl_loss = aggregate(kl, ragged)
        metrics["actor/kl_loss"] = kl_loss.detach()
        loss = loss + config.kl_loss_coef * kl_loss
    if config.policy_loss.positive_nll_coef:
        rows = need(correct, "correct rows", "actor.policy_loss.positive_nll_coef")
        nll = positive_nll(ragged, inputs.logprobs, rows, aggregate, correct_num_tokens)
        metrics["actor/positive_nll"] = nll.detach()
        loss = loss + config.policy_loss.positive_nll_coef * nll
    return LossOutput(loss=loss, metrics=metrics)


def positive_nll(
    ragged: Ragged,
    logprobs: Tensor,
    correct: Tensor,
    aggregate: Aggregator,
    correct_num_tokens: int | None = None,
) -> Tensor:
    """-mean log π_θ over the trained tokens of correct rows bool[B] (VAPO, arXiv 2504.05118).

    Without the global count `correct_num_tokens` the rows at hand are counted; 0 without correct rows.
    """
    chosen = ragged.with_mask(ragged.mask & correct[ragged.rows])
    if correct_num_tokens is not None:
        correct_num_tokens = max(1, correct_num_tokens)
    over_tokens = dataclasses.replace(
        aggregate, mode="token-mean", batch_num_tokens=correct_num_tokens
    )
    return over_tokens(-torch.where(chosen.mask, logprobs, 0.0), chosen)
