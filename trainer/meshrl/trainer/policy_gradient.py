"""The algorithm of a run, put together from its parts: correction, KL in the reward, advantages, loss.

Experience ──correction──▶ mask, weights ──KL in reward──▶ token rewards ──estimator──▶ Targets   (whole batch)
Micro ──actor_loss──▶ policy loss, entropy bonus, KL to the reference                             (micro-batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from meshrl.contract.errors import ConfigError
from meshrl.contract.extend import load
from meshrl.trainer.advantages._types import AdvantageBatch, Advantages, outcome_rewards
from meshrl.trainer.aggregation import Aggregator
from meshrl.trainer.batch import Experience
from meshrl.trainer.config import ActorConfig, AlgorithmConfig
from meshrl.trainer.kl import KlController, kl_in_reward
from meshrl.trainer.losses._types import LossInputs
from meshrl.trainer.objective import LOSSES, actor_loss
from meshrl.trainer.rollout_correction import correct

ADVANTAGES = "meshrl.trainer.advantages"
PROVIDED = ("old_logprobs", "sum_pi_squared", "reward_components", "group_sizes")
"""Fields of AdvantageBatch that this trainer can fill, besides the reward."""
PAIR_LOSSES = ("dpo", "ipo")
"""Their pairs must meet in one micro-batch."""
SHARES = ("actor/pg_loss", "actor/kl_loss", "actor/positive_nll")
"""Metrics of `actor_loss` that add up over micro-batches, as the loss does; the others are means."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OldPolicy:
    """What the weights before the step say of the whole batch. N = its response tokens."""

    logprobs: torch.Tensor | None = None
    """float32[N]; None: the update itself gives them, the batch is one update and nobody asks earlier."""
    sum_pi_squared: torch.Tensor | None = None
    """float32[N]: Σ_v π(v)²; only where the objective reads it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Targets:
    """What the loss needs of a whole batch, beside log-probs."""

    advantages: torch.Tensor
    """float32[N]"""
    mask: torch.Tensor
    """bool[N]: tokens that count."""
    old_logprobs: torch.Tensor | None
    """float32[N]; None as in OldPolicy."""
    weights: torch.Tensor | None
    """float32[N]: importance weights."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Micro:
    """One micro-batch as the loss sees it, on the policy's device."""

    inputs: LossInputs
    entropies: torch.Tensor
    """float32[n], with gradient."""
    correct: torch.Tensor
    """bool[b]: rows whose reward is positive."""
    mini_batch_tokens: int
    """Tokens that count in the whole mini-batch, all ranks together."""
    mini_batch_correct_tokens: int
    """Those of correct rows."""
    mini_batch_rows: int
    ranks: int
    """The loss is multiplied by this, because FSDP averages gradients over ranks."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Loss:
    """A micro-batch's share of its mini-batch's loss."""

    total: torch.Tensor
    shares: Mapping[str, float]
    """Metrics that add up over micro-batches."""
    means: Mapping[str, float]
    """Means over the tokens that count."""


class Objective(Protocol):
    """From rewards to targets, and from log-probs to a loss."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What must be fetched of each row beside what every algorithm needs."""
        ...

    @property
    def whole_groups(self) -> bool:
        """True when the loss compares rows of a group, which must then share a micro-batch."""
        ...

    @property
    def reads_old_logprobs(self) -> bool:
        """True when `targets` reads old log-probs: they are then computed before the update."""
        ...

    @property
    def reads_sum_pi_squared(self) -> bool:
        """True when `targets` reads Σ π²."""
        ...

    @property
    def rollout_is_old(self) -> bool:
        """True when the rollout's log-probs stand for the old policy's."""
        ...

    kl_coef: float
    """The coefficient of the KL penalty in the reward, as its controller has it now."""

    def targets(self, experience: Experience, old: OldPolicy) -> Targets:
        """Advantages of the whole batch."""
        ...

    def loss(self, micro: Micro) -> Loss:
        """The loss of a micro-batch."""
        ...


class PolicyGradient:
    """The objective that a recipe's `algorithm` and `actor` sections describe."""

    def __init__(
        self, algorithm: AlgorithmConfig, actor: ActorConfig, *, max_response_length: int
    ) -> None:
        """Find the parts.

        Args:
            algorithm: The estimator, KL in the reward, the correction.
            actor: The loss and its terms.
            max_response_length: The divisor of `seq-mean-token-sum-norm` where none is given.

        Raises:
            ConfigError: no such estimator or loss, or one needs what no part of the mesh provides.
        """
        self._algorithm = algorithm
        self._correction = algorithm.rollout_correction
        self._actor = _bypassed(actor, algorithm) if self._correction.bypass_mode else actor
        self._max_response_length = max_response_length
        self._controller = KlController.start(algorithm.kl_ctrl)
        self._estimate = load(ADVANTAGES, algorithm.adv_estimator, "compute")
        self._estimator_needs: tuple[str, ...] = load(ADVANTAGES, algorithm.adv_estimator, "NEEDS")
        self._loss_needs: tuple[str, ...] = load(LOSSES, self._actor.policy_loss.loss_mode, "NEEDS")
        self._check()

    @property
    def columns(self) -> tuple[str, ...]:
        """`ref_logprobs` where a KL term or a loss reads them."""
        reads = (
            self._algorithm.use_kl_in_reward
            or self._actor.use_kl_loss
            or "ref_logprobs" in self._loss_needs
        )
        return ("ref_logprobs",) if reads else ()

    @property
    def whole_groups(self) -> bool:
        """For the losses that compare pairs."""
        return self._actor.policy_loss.loss_mode in PAIR_LOSSES

    @property
    def rollout_is_old(self) -> bool:
        """In bypass mode, and when the trainer is told not to compute them."""
        return self._correction.bypass_mode or self._actor.recompute_old_log_probs is False

    @property
    def reads_old_logprobs(self) -> bool:
        """For KL in the reward, rollout correction, and the estimators that say so."""
        return (
            self._algorithm.use_kl_in_reward
            or self._corrects
            or "old_logprobs" in self._estimator_needs
        )

    @property
    def reads_sum_pi_squared(self) -> bool:
        """For the optimal token baselines."""
        return "sum_pi_squared" in self._estimator_needs

    @property
    def kl_coef(self) -> float:
        """β of the KL in the reward."""
        return self._controller.value

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        self._controller = KlController(config=self._algorithm.kl_ctrl, value=value)

    @torch.no_grad()
    def targets(self, experience: Experience, old: OldPolicy) -> Targets:
        """Advantages of the whole batch: B rows, N response tokens."""
        ragged, weights = experience.ragged, None
        metrics: dict[str, float] = {}
        if self._corrects:
            logprobs = _given(old.logprobs, "old log-probs")
            corrected = correct(ragged, logprobs, experience.rollout_logprobs, self._correction)
            ragged, weights = ragged.with_mask(corrected.mask), corrected.weights
            metrics |= corrected.metrics
        rewards = outcome_rewards(ragged, experience.rewards)
        if self._algorithm.use_kl_in_reward:
            penalised = kl_in_reward(
                ragged,
                rewards,
                _given(old.logprobs, "old log-probs"),
                _given(experience.ref_logprobs, "ref_logprobs"),
                name=self._algorithm.kl_penalty,
                controller=self._controller,
            )
            rewards = penalised.token_rewards
            metrics |= {"reward/kl": penalised.current_kl, "reward/kl_coef": self._controller.value}
            self._controller = penalised.controller
        found: Advantages = self._estimate(
            AdvantageBatch(
                ragged=ragged,
                token_rewards=rewards,
                old_logprobs=old.logprobs,
                sum_pi_squared=old.sum_pi_squared,
                rollout_is_weights=weights,
                reward_components=_components(experience),
                group_sizes=experience.group_sizes,
            ),
            self._algorithm,
        )
        metrics["advantages/abs_mean"] = float(ragged.token_mean(found.advantages.abs()))
        return Targets(
            advantages=found.advantages,
            mask=ragged.mask,
            old_logprobs=old.logprobs,
            weights=weights,
            metrics={**metrics, **found.metrics},
        )

    def loss(self, micro: Micro) -> Loss:
        """Policy loss and the terms beside it, each aggregated alike."""
        aggregate = Aggregator.for_batch(
            self._actor,
            batch_num_tokens=max(1, micro.mini_batch_tokens),
            global_batch_size=micro.mini_batch_rows,
            max_response_length=self._max_response_length,
            dp_size=micro.ranks,
        )
        found = actor_loss(
            micro.inputs,
            self._actor,
            aggregate,
            entropy=micro.entropies,
            correct=micro.correct,
            correct_num_tokens=micro.mini_batch_correct_tokens,
        )
        values = {name: float(value) for name, value in found.metrics.items()}
        return Loss(
            total=found.loss,
            shares={name: value for name, value in values.items() if name in SHARES},
            means={name: value for name, value in values.items() if name not in SHARES},
        )

    @property
    def _corrects(self) -> bool:
        """Is anything weighed or rejected before the loss? Bypass mode does it inside the loss."""
        found = self._correction
        asked = (found.rollout_is, found.rollout_rs, found.second_moment_threshold)
        return not found.bypass_mode and any(option is not None for option in asked)

    def _check(self) -> None:
        name = self._algorithm.adv_estimator
        missing = [need for need in self._estimator_needs if need not in PROVIDED]
        if missing:
            raise ConfigError(
                f"algorithm.adv_estimator {name} needs {', '.join(missing)}, which no service"
                f" provides (there are: the reward, {', '.join(PROVIDED)})"
            )
        if self._algorithm.use_pf_ppo:
            raise ConfigError(
                "algorithm.use_pf_ppo: this trainer trains every row of a batch once; set it to false"
            )


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


def _given(value: torch.Tensor | None, name: str) -> torch.Tensor:
    if value is None:
        raise ConfigError(f"the algorithm needs {name}, and the rows have none")
    return value
