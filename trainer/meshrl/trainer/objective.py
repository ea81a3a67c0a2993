"""The algorithm of a run, put together from its parts: correction, KL in the reward, advantages, loss.

Experience ──correction──▶ mask, weights ──KL in reward──▶ token rewards ──estimator──▶ Targets   (whole batch)
Micro ──policy loss──▶ pg - entropy_coeff · H + kl_loss_coef · KL                                 (micro-batch)
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
from meshrl.trainer.kl import KlController, kl_in_reward, kl_penalty
from meshrl.trainer.losses._types import LossInputs, LossOutput
from meshrl.trainer.rollout_correction import correct


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Targets:
    """What the loss needs of a whole batch, beside log-probs. N = its response tokens."""

    advantages: torch.Tensor
    """float32[N]"""
    mask: torch.Tensor
    """bool[N]: tokens that count."""
    old_logprobs: torch.Tensor | None
    """float32[N]; None: the policy's own, detached, because the batch is one update."""
    weights: torch.Tensor | None
    """float32[N]: importance weights."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Micro:
    """One micro-batch as the loss sees it, on the policy's device."""

    inputs: LossInputs
    entropies: torch.Tensor
    """float32[n], with gradient."""
    mini_batch_tokens: int
    """Tokens that count in the whole mini-batch, all ranks together."""
    mini_batch_rows: int
    ranks: int
    """The loss is multiplied by this, because FSDP averages gradients over ranks."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Loss:
    """A micro-batch's share of its mini-batch's loss."""

    total: torch.Tensor
    terms: Mapping[str, float]
    """What `total` is made of; shares too."""
    means: Mapping[str, float]
    """Means over the tokens that count."""


class Objective(Protocol):
    """From rewards to targets, and from log-probs to a loss."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What must be fetched of each row beside what every algorithm needs."""
        ...

    @property
    def reads_old_logprobs(self) -> bool:
        """True when `targets` reads old log-probs: they are then computed before the update."""
        ...

    @property
    def rollout_is_old(self) -> bool:
        """True when the rollout's log-probs stand for the old policy's."""
        ...

    kl_coef: float
    """The coefficient of the KL penalty in the reward, as its controller has it now."""

    def targets(self, experience: Experience, old_logprobs: torch.Tensor | None) -> Targets:
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
        self._actor = actor
        self._max_response_length = max_response_length
        self._correction = algorithm.rollout_correction
        loss_mode = "bypass_mode" if self._correction.bypass_mode else actor.policy_loss.loss_mode
        self._estimate = load(_ADVANTAGES, algorithm.adv_estimator, "compute")
        self._estimator_needs = load(_ADVANTAGES, algorithm.adv_estimator, "NEEDS")
        self._policy_loss = load("meshrl.trainer.losses", loss_mode, "compute")
        self._controller = KlController.start(algorithm.kl_ctrl)
        _check(algorithm.adv_estimator, self._estimator_needs, PROVIDED)

    @property
    def columns(self) -> tuple[str, ...]:
        """`ref_logprobs` where a KL term reads them."""
        uses_reference = self._algorithm.use_kl_in_reward or self._actor.use_kl_loss
        return ("ref_logprobs",) if uses_reference else ()

    @property
    def rollout_is_old(self) -> bool:
        """In bypass mode, and when the trainer is told not to compute them."""
        return self._correction.bypass_mode or not self._actor.recompute_old_log_probs

    @property
    def reads_old_logprobs(self) -> bool:
        """For KL in the reward, rollout correction, and the estimators that say so."""
        return (
            self._algorithm.use_kl_in_reward
            or self._corrects
            or "old_logprobs" in self._estimator_needs
        )

    @property
    def kl_coef(self) -> float:
        """β of the KL in the reward."""
        return self._controller.value

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        self._controller = KlController(config=self._algorithm.kl_ctrl, value=value)

    @property
    def _corrects(self) -> bool:
        """Is anything weighed or rejected before the loss? Bypass mode does it inside the loss."""
        correction = self._correction
        asked = (
            correction.rollout_is, correction.rollout_rs, correction.second_moment_threshold
        )  # fmt: skip
        return not correction.bypass_mode and any(option is not None for option in asked)

    @torch.no_grad()
    def targets(self, experience: Experience, old_logprobs: torch.Tensor | None) -> Targets:
        """Advantages of the whole batch; B = rows, N = response tokens."""
        ragged, weights = experience.ragged, None
        metrics: dict[str, float] = {}
        if self._corrects:
            correction = correct(
                ragged,
                _given(old_logprobs, "old log-probs"),
                experience.rollout_logprobs,
                self._correction,
            )
            ragged, weights = ragged.with_mask(correction.mask), correction.weights
            metrics |= correction.metrics
        rewards = outcome_rewards(ragged, experience.rewards)
        if self._algorithm.use_kl_in_reward:
            penalised = kl_in_reward(
                ragged,
                rewards,
                _given(old_logprobs, "old log-probs"),
                _given(experience.ref_logprobs, "ref_logprobs"),
                name=self._algorithm.kl_penalty,
                controller=self._controller,
            )
            rewards = penalised.token_rewards
            metrics["reward/kl"] = penalised.current_kl
            metrics["reward/kl_coef"] = self._controller.value
            self._controller = penalised.controller
        found: Advantages = self._estimate(
            AdvantageBatch(
                ragged=ragged,
                token_rewards=rewards,
                old_logprobs=old_logprobs,
                rollout_is_weights=weights,
                reward_components=self._components(experience),
                group_sizes=experience.group_sizes,
            ),
            self._algorithm,
        )
        trained = found.advantages[ragged.mask]
        if len(trained):
            metrics["advantages/mean"] = float(trained.mean())
            metrics["advantages/abs_mean"] = float(trained.abs().mean())
        return Targets(
            advantages=found.advantages,
            mask=ragged.mask,
            old_logprobs=old_logprobs,
            weights=weights,
            metrics={**metrics, **found.metrics},
        )

    def loss(self, micro: Micro) -> Loss:
        """Policy gradient - entropy_coeff · H + kl_loss_coef · KL, each aggregated alike."""
        inputs, actor = micro.inputs, self._actor
        aggregate = Aggregator.for_batch(
            actor,
            batch_num_tokens=max(1, micro.mini_batch_tokens),
            global_batch_size=micro.mini_batch_rows,
            max_response_length=self._max_response_length,
            dp_size=micro.ranks,
        )
        found: LossOutput = self._policy_loss(inputs, actor, aggregate)
        total = found.loss
        terms = {"actor/pg_loss": float(found.loss.detach())}
        means = {name: float(value) for name, value in found.metrics.items()}
        if actor.entropy_coeff:
            entropy = aggregate(micro.entropies, inputs.ragged)
            total = total - actor.entropy_coeff * entropy
            terms["actor/entropy_loss"] = float(entropy.detach())
        if actor.use_kl_loss:
            reference = _given(inputs.ref_logprobs, "ref_logprobs")
            kl = kl_penalty(inputs.logprobs, reference, actor.kl_loss_type)
            kl_loss = aggregate(kl, inputs.ragged)
            total = total + actor.kl_loss_coef * kl_loss
            terms["actor/kl_loss"] = float(kl_loss.detach())
            means["actor/kl"] = float(inputs.ragged.token_mean(kl.detach()))
        return Loss(total=total, terms=terms, means=means)

    def _components(self, experience: Experience) -> dict[str, torch.Tensor]:
        """float32[B] of every component that all rows have."""
        names = (
            set.intersection(*map(set, experience.components)) if experience.components else set()
        )
        return {
            name: torch.tensor([row[name] for row in experience.components], dtype=torch.float32)
            for name in sorted(names)
        }


_ADVANTAGES = "meshrl.trainer.advantages"
PROVIDED = ("old_logprobs", "reward_components", "group_sizes")
"""Fields of AdvantageBatch that this trainer can fill, besides the reward."""


def _check(name: str, needs: tuple[str, ...], provided: tuple[str, ...]) -> None:
    missing = [need for need in needs if need not in provided]
    if missing:
        raise ConfigError(
            f"algorithm.adv_estimator {name} needs {', '.join(missing)}, which no service provides"
            f" (there are: the reward, {', '.join(provided)})"
        )


def _given(value: torch.Tensor | None, name: str) -> torch.Tensor:
    if value is None:
        raise ConfigError(
            f"the algorithm needs {name}, and the rows have none: is its service configured?"
        )
    return value
