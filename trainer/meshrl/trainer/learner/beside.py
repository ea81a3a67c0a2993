"""The models that are trained beside the policy, and their share of a step: the critic, and PRIME's reward model.

The critic is the policy's architecture with one output:

    pack ──▶ decoder (and what reads its pictures) ──▶ hidden[response positions] ──▶ linear [H, 1] ──▶ V float32[N]

V_t is read where token t is predicted, before the policy has chosen it. The head starts at 0: before its first
update the critic says 0 everywhere, so a run does not begin with noise as its baseline.

steps 0 … pretrain_steps      the critic alone, on Monte Carlo returns (VAPO's value pre-training)
… + warmup_steps              the critic alone, on the estimator's returns
afterwards                    critic and policy, on the same mini-batches

PRIME's implicit reward model is trained on the outcomes of the batch, and scores each of its tokens:

q_t = log π_φ(y_t) - log π_ref(y_t)          π_ref: the reference service, from which φ starts
update   BCE(σ(β Σ_t q_t), acc)              before (or after) the batch is scored
r        `process_rewards`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from meshrl.trainer.algorithms.advantages.gae import gae, value_loss
from meshrl.trainer.algorithms.advantages.prime import (
    ACCURACY,
    PrimeConfig,
    process_rewards,
    row_cross_entropy,
)
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import CriticConfig, ModelConfig
from meshrl.trainer.learner.experience import Experience, MiniBatch
from meshrl.trainer.learner.metrics import MetricSums
from meshrl.trainer.learner.micro_batcher import MicroBatcher
from meshrl.trainer.learner.optimizer import Optimizers, learning_rate, norms_of
from meshrl.trainer.learner.policy_gradient import Targets
from meshrl.trainer.model.packing import Pack
from meshrl.trainer.model.packing_check import HfModel
from meshrl.trainer.model.policy import Policy, response_hidden
from meshrl.trainer.model.sharding import shard
from meshrl.trainer.model.vision import tower_of
from meshrl.trainer.ranks.world import World


class ValueLearner:
    """Critic and optimizer of one rank."""

    def __init__(
        self,
        critic: Critic,
        optimizers: Optimizers,
        config: CriticConfig,
        world: World,
        *,
        epochs: int,
        gamma: float,
        max_response_length: int,
        total_steps: int | None,
    ) -> None:
        """Prepare.

        Args:
            critic: The model to train.
            optimizers: Its optimizer.
            config: Loss, schedule, pre-training.
            world: The ranks.
            epochs: Passes over a batch.
            gamma: Discount of Monte Carlo returns.
            max_response_length: The divisor of `seq-mean-token-sum-norm`.
            total_steps: Step at which a falling learning rate ends; None keeps it from falling.
        """
        self.model = critic
        self.optimizers = optimizers
        self._config = config
        self._world = world
        self._epochs = epochs
        self._gamma = gamma
        self._max_response_length = max_response_length
        self._total_steps = total_steps

    def learns_alone(self, step: int) -> bool:
        """True while only the critic is trained."""
        return step < self._config.pretrain_steps + self._config.warmup_steps

    def with_returns(self, targets: Targets, ragged: Ragged, step: int) -> Targets:
        """The targets with the returns that the critic learns at this step: Monte Carlo's while it is pre-trained."""
        if step >= self._config.pretrain_steps:
            return targets
        ragged = ragged.with_mask(targets.mask)
        returns = monte_carlo(ragged, targets.token_rewards, self._gamma)
        return dataclasses.replace(targets, returns=returns)

    def values(self, own: MicroBatcher) -> torch.Tensor:
        """V float32[N] of the whole batch, on the CPU."""
        return own.forward(self.model, self.model)

    def learn(
        self,
        own: MicroBatcher,
        minis: Sequence[MiniBatch],
        experience: Experience,
        values: torch.Tensor,
        targets: Targets,
        step: int,
    ) -> dict[str, float]:
        """Train on a batch.

        Args:
            own: This rank's rows.
            minis: The mini-batches, in order.
            experience: The whole batch.
            values: V float32[N] before this step.
            targets: Mask and returns of the batch.
            step: Optimizer steps done before it.

        Returns:
            Metrics, the same on every rank.
        """
        ragged, returns = experience.ragged.with_mask(targets.mask), targets.returns
        tally = MetricSums()
        updates = [mini for _ in range(self._epochs) for mini in minis]
        rate = learning_rate(self._config.optim, step, self._total_steps or step + 1)
        norms = []
        for mini in updates:
            aggregate = Aggregator(
                mode=self._config.loss_agg_mode,
                batch_num_tokens=max(1, int(ragged.valid_lengths[list(mini.rows)].sum())),
                global_batch_size=len(mini.rows),
                loss_scale_factor=float(self._max_response_length),
                dp_size=self._world.gradient_ranks,
            )
            for chosen, (found,) in own.micro_batches(
                mini, self.model, lambda pack: (self.model(pack),)
            ):
                places, device = experience.tokens_of(chosen), self._world.device
                part = experience.layout_of(chosen, targets.mask[places].to(device))
                loss = value_loss(
                    part,
                    found,
                    values[places].to(device),
                    returns[places].to(device),
                    cliprange_value=self._config.cliprange_value,
                    aggregate=aggregate,
                )
                loss.loss.backward()  # type: ignore[no-untyped-call]
                share = float(loss.loss.detach()) / (self._world.gradient_ranks * len(updates))
                tally.add_sums({"critic/loss": share})
                means = {name: float(value) for name, value in loss.metrics.items()}
                tally.add_means(means, int(part.mask.sum()))
            norms.append(self.optimizers.step(rate))
        return {
            **tally.over_ranks(self._world),
            **norms_of("critic", norms),
            "critic/lr": rate,
            "critic/values_mean": float(ragged.token_mean(values)),
            "critic/returns_mean": float(ragged.token_mean(returns)),
            "critic/explained_variance": explained_variance(ragged, values, returns),
        }


def monte_carlo(ragged: Ragged, token_rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """Σ_{t' ≥ t} γ^(t'-t) r_t' float32[N]: GAE's returns at λ = 1, whatever the values are."""
    ones = torch.ones(ragged.num_rows)
    return gae(ragged, token_rewards, torch.zeros_like(token_rewards), gamma=gamma, lam=ones)


def explained_variance(ragged: Ragged, values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(R - V)/Var(R) over the trained tokens: 1 is perfect, 0 as good as a constant; 0 if R is constant."""
    R, V = returns[ragged.mask].double(), values[ragged.mask].double()
    variance = float(R.var(unbiased=False)) if len(R) else 0.0
    return 1.0 - float((R - V).var(unbiased=False)) / variance if variance > 0 else 0.0


class Critic(nn.Module):
    """Values of the response tokens of a pack."""

    def __init__(self, hf: HfModel) -> None:
        super().__init__()
        self.decoder = hf.get_decoder() if tower_of(hf) is None else hf.base_model
        self._hidden = partial(response_hidden, hf)  # of `hf`, nothing but the decoder is read
        self.value_head = nn.Linear(hf.get_output_embeddings().weight.shape[1], 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, pack: Pack) -> torch.Tensor:
        """Returns V float32[N] for the N response tokens."""
        values: torch.Tensor = self.value_head(self._hidden(pack))
        # A sum over one entry, because FSDP wants no view of what the module made.
        return pack.joined(values.sum(-1, dtype=torch.float32))


def build_critic(hf: HfModel, world: World, config: ModelConfig) -> Critic:
    """Shard the critic over the ranks as the policy is; `hf` is used up."""
    return shard(Critic(hf).train(), hf, world, config)


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
            temperature: Divisor of the logits in the reference's log-probs.
            total_steps: Step at which a falling learning rate ends; None keeps it from falling.
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
