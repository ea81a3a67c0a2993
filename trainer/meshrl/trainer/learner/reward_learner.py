"""PRIME's implicit reward model in a step: trained on the outcomes of the batch, it scores each of its tokens.

q_t = log π_φ(y_t) - log π_ref(y_t)          π_ref: the reference service, from which φ starts
update   BCE(σ(β Σ_t q_t), acc)              before (or after) the batch is scored
r        `implicit_reward.process_rewards`
"""

from __future__ import annotations

import torch

from meshrl.trainer.algorithms.advantages.prime import (
    PrimeConfig,
    process_rewards,
    row_cross_entropy,
)
from meshrl.trainer.learner.experience import Experience
from meshrl.trainer.learner.metrics import MetricSums
from meshrl.trainer.learner.micro_batcher import MicroBatcher
from meshrl.trainer.learner.optimizer import Optimizers, learning_rate, norms_of
from meshrl.trainer.model.packing import Pack
from meshrl.trainer.model.policy import Policy
from meshrl.trainer.ranks.world import World

ACCURACY = "acc"
"""The reward component that is the outcome; without it the reward itself is."""


class RewardLearner:
    """Implicit reward model and optimizer of one rank."""

    def __init__(
        self,
        model: Policy,
        optimizers: Optimizers,
        config: PrimeConfig,
        world: World,
        *,
        temperature: float,
        total_steps: int | None,
    ) -> None:
        """Prepare.

        Args:
            model: π_φ.
            optimizers: Its optimizer.
            config: β, learning rate, order of update and scoring.
            world: The ranks.
            temperature: What the logits of the reference's log-probs were divided by.
            total_steps: Where a falling learning rate ends; None keeps it from falling.
        """
        self.model = model
        self.optimizers = optimizers
        self._config = config
        self._world = world
        self._temperature = temperature
        self._total_steps = total_steps

    def learn(
        self, own: MicroBatcher, experience: Experience, step: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Train on the batch and score it.

        Returns:
            Process rewards float32[N] of the whole batch, and metrics; the same on every rank.
        """
        metrics: dict[str, float] = {}
        if self._config.update == "before":
            metrics = self._update(own, experience, step)
        q = own.forward(self.model, self._logprobs) - _reference(experience)
        rewards = process_rewards(experience.ragged, q, beta=self._config.beta_train)
        if self._config.update == "after":
            metrics = self._update(own, experience, step)
        return rewards, metrics

    def _update(self, own: MicroBatcher, experience: Experience, step: int) -> dict[str, float]:
        reference, acc = _reference(experience), outcomes(experience)
        device = self._world.device
        tally = MetricSums()
        norms = []
        rate = learning_rate(self._config.optim, step, self._total_steps or step + 1)
        for mini in own.schedule.mini_batches:
            for chosen, (logprobs,) in own.micro_batches(
                mini, self.model, lambda p: (self._logprobs(p),)
            ):
                places = experience.tokens_of(chosen)
                ragged = experience.layout_of(chosen, experience.ragged.mask[places].to(device))
                q, truth = logprobs - reference[places].to(device), acc[list(chosen)].to(device)
                losses = row_cross_entropy(ragged, q, truth, beta=self._config.beta_train)
                loss = losses.sum() / len(mini.rows)
                (loss * self._world.gradient_ranks).backward()  # type: ignore[no-untyped-call]
                right = ((ragged.row_sum(q.detach()) > 0) == (truth > 0.5)).float().mean()
                tally.add_sums(
                    {"prime/loss": float(loss.detach()) / len(own.schedule.mini_batches)}
                )
                tally.add_means({"prime/accuracy": float(right)}, len(chosen))
            norms.append(self.optimizers.step(rate))
        return {**tally.over_ranks(self._world), **norms_of("prime", norms)}

    def _logprobs(self, pack: Pack) -> torch.Tensor:
        logprobs: torch.Tensor = self.model(pack, self._temperature)[0]
        return logprobs


def outcomes(experience: Experience) -> torch.Tensor:
    """Accuracy float32[B] in [0, 1]: the component `acc`, or the reward."""
    rows = experience.components
    if rows and all(ACCURACY in row for row in rows):
        accuracies = torch.tensor([row[ACCURACY] for row in rows], dtype=torch.float32)
    else:
        accuracies = experience.rewards
    return accuracies.clamp(0, 1)


def _reference(experience: Experience) -> torch.Tensor:
    assert experience.ref_logprobs is not None, "needs.py asks for the column"
    return experience.ref_logprobs
