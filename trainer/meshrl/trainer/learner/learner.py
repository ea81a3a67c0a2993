"""One training step: what happens to a batch between `take` and `settle`.

    rows ──assemble──▶ Experience ──(old log-probs, values, process rewards)──▶ Objective.targets: advantages, mask, …
                                                          │
         for each epoch, mini-batch:  micro-batches: forward, Objective.loss, backward ──▶ clip, optimizer step

Targets are computed for the whole batch on every rank alike; a rank forwards its own rows only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from meshrl.contract.types import (
    DATA_SOURCE,
    MEDIA,
    PARTS,
    ROUTED_EXPERTS,
    ROW_MEDIA,
    TOKEN_REWARDS,
    Batch,
    Int32,
    Json,
    Trajectory,
)
from meshrl.trainer.algorithms.losses._types import LossInputs
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import ActorConfig
from meshrl.trainer.learner.beside import RewardLearner, ValueLearner
from meshrl.trainer.learner.experience import (
    Experience,
    MiniBatch,
    Schedule,
    assemble,
    gather_tokens,
    redrawn,
    schedule,
)
from meshrl.trainer.learner.metrics import MetricSums, batch_mismatch, experience_metrics
from meshrl.trainer.learner.micro_batcher import MicroBatcher
from meshrl.trainer.learner.optimizer import Optimizers, Trained, learning_rate, norms_of
from meshrl.trainer.learner.policy_gradient import ForwardOutputs, MicroBatch, Objective, Targets
from meshrl.trainer.learner.unfolding import Unfolded, branches, mapped, unfolded, with_answer
from meshrl.trainer.metrics.utilisation import ModelWork
from meshrl.trainer.model.attention import rows_per_laid
from meshrl.trainer.model.packing import Pack
from meshrl.trainer.model.policy import Policy
from meshrl.trainer.model.routing import ExpertBalance
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)


COLUMNS = (
    "tokens",
    "loss_mask",
    "rollout_logprobs",
    "spans",
    "replica",
    "reward",
    "reward_components",
    DATA_SOURCE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How a batch becomes updates."""

    actor: ActorConfig
    """Mini-batches, epochs, token budget, learning rate."""
    temperature: float = 1.0
    """Divisor of the logits, in the rollout and so in the policy."""
    seed: int = 0
    """Seed of all draws."""
    total_steps: int | None = None
    """Step at which a falling learning rate ends; None keeps it from falling."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowContents:
    """Contents of a run's rows beyond tokens and a score."""

    token_rewards: bool = False
    """A reward for each token, which counts instead of the score."""
    answers: Mapping[int, Int32] | None = None
    """The data's own answers in tokens, by the number of their prompt; None: the objective needs none."""
    parts: bool = False
    """All branches of a conversation, each trained by itself."""
    by_seat: bool = False
    """A part that is a seat of an episode has a reward and a group of its own."""
    routed_experts: bool = False
    """The experts that tokens went to, which the policy then uses too."""
    reader: VisionReader | None = None
    """Reads the pictures of rows; None: rows have none."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Their columns in the queue."""
        return (
            *((TOKEN_REWARDS,) if self.token_rewards else ()),
            *((PARTS,) if self.parts else ()),
            *((ROUTED_EXPERTS,) if self.routed_experts else ()),
            *((MEDIA, ROW_MEDIA) if self.reader is not None else ()),
        )


class Learner:
    """Policy, optimizer and objective of one rank, and the models that the objective asks for."""

    def __init__(
        self,
        policy: Policy,
        optimizers: Optimizers,
        objective: Objective,
        world: World,
        settings: StepSettings,
        rows: RowContents | None = None,
        *,
        critic: ValueLearner | None = None,
        rewarder: RewardLearner | None = None,
    ) -> None:
        """Keep the parts.

        Args:
            policy: The model to train.
            optimizers: Its optimizer.
            objective: The algorithm.
            world: The ranks.
            settings: How a batch becomes updates.
            rows: Contents of rows beyond tokens and a score; None: nothing.
            critic: Needed if the objective reads values.
            rewarder: Needed if it reads process rewards.

        Raises:
            UserError: the policy has no experts that it could be told.
        """
        rows = rows or RowContents()
        self.policy = policy
        self.optimizers = optimizers
        self.world = world
        self.needs = objective.needs
        self.trains_parts = rows.parts
        self._by_seat = rows.by_seat
        self.vocabulary: int = policy.hf.config.get_text_config().vocab_size
        self._routing = policy.replay_routing() if rows.routed_experts else None
        self.columns = (*COLUMNS, *rows.columns, *objective.needs.columns)
        self._objective = objective
        self._actor = settings.actor
        self._temperature = settings.temperature
        self._seed = settings.seed
        self._total_steps = settings.total_steps
        self._critic = critic
        self._rewarder = rewarder
        self._answers = rows.answers
        self._balance = ExpertBalance.of(policy.hf, settings.actor, world)
        self._reader = rows.reader
        self._work = ModelWork.of(
            policy.hf.config.get_text_config(), frozen=policy.adapter is not None
        )

    def check(self, rows: Sequence[Trajectory]) -> None:
        """Raises CorruptError for rows whose pictures or experts are not those of their tokens and of the policy."""
        for row in rows:
            if self._reader is not None:
                self._reader.check(row)
            if self._routing is not None:
                self._routing.of(row)

    @property
    def beside(self) -> dict[str, Trained]:
        """The models that are trained beside the policy, by name."""
        parts = {"critic": self._critic, "reward_model": self._rewarder}
        return {name: Trained(p.model, p.optimizers) for name, p in parts.items() if p is not None}

    @property
    def kl_coef(self) -> float:
        """The KL controller's coefficient: part of a checkpoint."""
        return self._objective.kl_coef

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        self._objective.kl_coef = value

    def schedule(self, batch: Batch) -> Schedule:
        """The rank that forwards each row, and the update that the row is in."""
        return schedule(
            batch,
            ranks=self.world.data_size,
            max_tokens=self._actor.ppo_max_token_len_per_gpu,
            mini_batch_groups=self._actor.ppo_mini_batch_size,
            whole_groups=self.needs.whole_groups,
            extra_rows=self.needs.extra_rows,
            # Experts that are replayed may differ between siblings: then each has its own prompt.
            share_prompts=self.world.sequence is None and self._routing is None,
            rows_per_laid=rows_per_laid(self.policy.hf),
        )

    def learn(
        self,
        schedule: Schedule,
        own: Sequence[Trajectory],
        step: int,
        baselines: Mapping[str, float] | None = None,
        observe: Callable[[Learned], None] | None = None,
    ) -> dict[str, Json]:
        """Train on a batch.

        Args:
            schedule: Its schedule.
            own: The rows of `schedule.uids(data_rank)`, in order.
            step: Optimizer steps done before it.
            baselines: Group to the reward of its greedy row, where the objective needs greedy rows.
            observe: Called at the end with what the step knew of its rows.

        Returns:
            The step's metrics, the same on every rank.
        """
        # Draws are a function of (seed, step, share of the rows): a resumed run draws what the killed one drew.
        torch.manual_seed(_seed(self._seed, step, self.world.data_rank))
        experience = assemble(
            schedule, own, self.world, baselines=baselines, with_steps=self.needs.steps
        )
        process_rewards, metrics = None, experience_metrics(experience)
        whole, parts = experience, self._parts(schedule, own)
        if parts is not None:
            schedule, own = parts.schedule, parts.own
            experience = assemble(schedule, own, self.world, with_steps=self.needs.steps)
            if self._by_seat:
                experience = parts.by_seat(experience)
        if parts is not None and self._answers is not None:
            experience = dataclasses.replace(experience, data_answers=parts.number == 1)
        rows = MicroBatcher.of(schedule, own, self.world, self._routing, self._reader)
        if self._rewarder is not None:
            process_rewards, learned = self._rewarder.learn(rows, experience, step)
            metrics |= learned
        values = None if self._critic is None else self._critic.values(rows)
        alone = self._critic is not None and self._critic.learns_alone(step)
        before = self._before(rows, experience, values, process_rewards, passes=alone)
        targets = self._targets(experience, before, whole, parts, step)
        minis = self._mini_batches(schedule, experience, step)
        if self._critic is not None and values is not None:
            metrics |= self._critic.learn(rows, minis, experience, values, targets, step)
        work = _StepState(rows=rows, experience=experience, targets=targets, step=step)
        if not alone:
            metrics |= self._improve(minis, work, step)
            metrics["batch/tflops"] = self._tflops(schedule, experience)
        logprobs, ragged = self._logprobs_before(before, work)
        known = Learned(experience, targets, logprobs, before.values)
        if parts is not None:
            logprobs = parts.folded(logprobs, experience, whole, torch.nan)
            ragged = whole.ragged.with_mask(whole.ragged.mask & ~logprobs.isnan())
            of_rows = mapped(targets, lambda each: parts.folded(each, experience, whole, 0))
            if values is not None:
                values = parts.folded(values, experience, whole, 0)
            known = Learned(whole, of_rows, logprobs, values)
        if observe is not None:
            observe(known)
        return {
            **metrics,
            **batch_mismatch(
                ragged, logprobs, whole.rollout_logprobs, whole.versions, whole.replicas
            ),
            **targets.metrics,
            "batch/rows": len(schedule.rows),
            "batch/tokens": sum(row.num_tokens for row in schedule.rows),
            "batch/micro_batches": sum(len(m.ranks[0]) for m in schedule.mini_batches),
        }

    def _parts(self, schedule: Schedule, own: Sequence[Trajectory]) -> Unfolded | None:
        """The rows that are trained instead of the queue's; None: the queue's."""
        if self._answers is None and not self.trains_parts:
            return None
        return unfolded(
            schedule,
            [branches(r) if self._answers is None else with_answer(r, self._answers) for r in own],
            self.world,
            max_tokens=self._actor.ppo_max_token_len_per_gpu,
            together=self._answers is not None,
        )

    def _targets(
        self,
        experience: Experience,
        before: ForwardOutputs,
        whole: Experience,
        parts: Unfolded | None,
        step: int,
    ) -> Targets:
        """Advantages of what is forwarded; branches of a row, unlike seats, are judged as one episode."""

        def targets_of(rows: Experience, outputs: ForwardOutputs) -> Targets:
            targets = self._objective.targets(rows, outputs)
            if self._critic is None:
                return targets
            return self._critic.with_returns(targets, rows.ragged, step)

        if parts is None or self._answers is not None or (self._by_seat and any(parts.seats)):
            return targets_of(experience, before)

        def column(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else parts.folded(values, experience, whole, 0)

        of_rows = dataclasses.replace(
            before,
            logprobs=column(before.logprobs),
            sum_pi_squared=column(before.sum_pi_squared),
            values=column(before.values),
        )
        of_episodes = targets_of(whole, of_rows)
        return mapped(of_episodes, lambda values: parts.spread(values, experience, whole))

    def _tflops(self, schedule: Schedule, experience: Experience) -> float:
        """Work of the policy's update, in 10^12 operations of all ranks; 0 for a model that is not known."""
        if self._work is None:
            return 0.0
        lengths = [row.num_tokens for row in schedule.rows]
        once = self._work.flops(lengths, int(experience.ragged.lengths.sum()))
        return self._actor.ppo_epochs * once / 1e12

    def _before(
        self,
        rows: MicroBatcher,
        experience: Experience,
        values: torch.Tensor | None,
        process_rewards: torch.Tensor | None,
        *,
        passes: bool,
    ) -> ForwardOutputs:
        """Outputs of the models before the update, in as few forward passes as the objective allows.

        `passes`: compute old log-probs here, because no update of the policy follows that would give them.
        """
        objective, schedule, tau = self._objective, rows.schedule, self._temperature
        squares, logprobs = None, None
        if self.needs.sum_pi_squared:
            squares = rows.forward(self.policy, lambda pack: self.policy.sum_pi_squared(pack, tau))
        once = len(schedule.mini_batches) == 1 and self._actor.ppo_epochs == 1
        if objective.rollout_is_old:
            logprobs = experience.rollout_logprobs
        elif passes or not once or self.needs.old_logprobs:
            logprobs = rows.forward(self.policy, lambda pack: self.policy(pack, tau)[0])
        return ForwardOutputs(
            logprobs=logprobs,
            sum_pi_squared=squares,
            values=values,
            implicit_rewards=process_rewards,
        )

    def _mini_batches(
        self, schedule: Schedule, experience: Experience, step: int
    ) -> Sequence[MiniBatch]:
        """The mini-batches of the batch, or of the rows that the objective draws: the same on every rank."""
        generator = torch.Generator().manual_seed(_seed(self._seed, step))
        sample = self._objective.resampled(experience, generator)
        if sample is None:
            return schedule.mini_batches
        return redrawn(
            schedule,
            sample,
            max_tokens=self._actor.ppo_max_token_len_per_gpu,
            rows_per_laid=rows_per_laid(self.policy.hf),
        )

    def _improve(self, minis: Sequence[MiniBatch], work: _StepState, step: int) -> dict[str, Json]:
        """The policy's updates."""
        updates = [mini for _ in range(self._actor.ppo_epochs) for mini in minis]
        rate = learning_rate(self._actor.optim, step, self._total_steps or step + 1)
        norms = [self._update(mini, work, rate, len(updates)) for mini in updates]
        reported = norms_of("actor", norms)
        if skipped := reported["actor/skipped_updates"]:
            log.warning("step %d: gradient not finite, %d updates left out", step + 1, skipped)
        return {
            **work.tally.over_ranks(self.world),
            **reported,
            "actor/lr": rate,
            "actor/updates": len(norms),
        }

    def _logprobs_before(
        self, before: ForwardOutputs, work: _StepState
    ) -> tuple[torch.Tensor, Ragged]:
        """float32[N] of the policy before the step, NaN where it forwarded no token, and the layout without those."""
        ragged = work.experience.ragged
        if before.logprobs is not None and not self._objective.rollout_is_old:
            return before.logprobs, ragged
        first, rows = work.first_logprobs, work.rows.rows
        sizes = {row: len(t.tokens) - t.prompt_length for row, t in rows.items()}
        unknown = {row: torch.full((size,), torch.nan) for row, size in sizes.items()}
        parts = [first.get(row, unknown[row]) for row in rows]
        logprobs = gather_tokens(work.rows.schedule, parts, self.world)
        return logprobs, ragged.with_mask(ragged.mask & ~logprobs.isnan())

    def _update(self, mini: MiniBatch, work: _StepState, rate: float, updates: int) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        counts = work.counts(mini)
        # Loss terms sum up over micro-batches; over ranks and updates they are averaged.
        share = 1.0 / (self.world.gradient_ranks * updates)
        for chosen, outputs in work.rows.micro_batches(mini, self.policy, self._forward):
            logprobs, entropies, *candidates = outputs
            for row, part in zip(chosen, work.rows.split(logprobs, chosen), strict=True):
                work.first_logprobs.setdefault(row, part)
            micro = self._micro(chosen, work, logprobs, entropies, counts)
            if candidates:
                micro = dataclasses.replace(
                    micro,
                    candidates=candidates[0],
                    teacher=work.rows.teacher(chosen),
                )
            loss = self._objective.loss(micro)
            total, shares = loss.total, {**loss.shares, "actor/loss": float(loss.total.detach())}
            if self._balance is not None:
                of_rows = work.rows.schedule.rows
                part, whole = self._balance.loss()
                weight = sum(of_rows[row].num_tokens for row in chosen) / sum(
                    of_rows[row].num_tokens for row in mini.rows
                )
                weight *= self.world.gradient_ranks
                total = total + self._balance.coefficient * weight * part
                shares["actor/router_aux_loss"] = weight * whole
            total.backward()  # type: ignore[no-untyped-call]
            tokens = int(micro.inputs.ragged.mask.sum())
            work.tally.add_sums({name: value * share for name, value in shares.items()})
            work.tally.add_means(loss.means, tokens)
        norm = self.optimizers.step(rate)
        if self._balance is not None:
            most = self._balance.settle(stepped=math.isfinite(norm))
            work.tally.add_means({"actor/router_max_violation": most}, 1)
        return norm

    def _forward(self, pack: Pack) -> tuple[torch.Tensor, ...]:
        """The policy's outputs, from which its gradients follow."""
        with nullcontext() if self._balance is None else self._balance.recorded(pack):
            outputs: tuple[torch.Tensor, ...] = self.policy(pack, self._temperature)
        return outputs

    def _micro(
        self,
        chosen: Sequence[int],
        work: _StepState,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        counts: _Counts,
    ) -> MicroBatch:
        experience, targets = work.experience, work.targets
        places = experience.tokens_of(chosen)
        device = self.world.device

        def part(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else column[places].to(device)

        old = part(targets.old_logprobs)
        ragged = experience.layout_of(chosen, targets.mask[places].to(device))
        staleness = (work.step - experience.versions[places]).clamp(min=0)
        return MicroBatch(
            inputs=LossInputs(
                ragged=ragged,
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old,
                advantages=targets.advantages[places].to(device),
                rollout_is_weights=part(targets.weights),
                ref_logprobs=part(experience.ref_logprobs),
            ),
            entropies=entropies,
            staleness=staleness.to(device),
            correct=(experience.rewards[list(chosen)] > 0).to(device),
            mini_batch_tokens=counts.tokens,
            mini_batch_correct_tokens=counts.correct_tokens,
            mini_batch_rows=counts.rows,
            ranks=self.world.gradient_ranks,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Data of a step's rows, on the CPU of every rank."""

    experience: Experience
    targets: Targets
    logprobs: torch.Tensor
    """float32[N]: the policy's before the step; NaN where it forwarded no token."""
    values: torch.Tensor | None
    """float32[N]: the critic's before the step."""


@dataclass(slots=True, eq=False, kw_only=True)
class _StepState:
    """State that the updates of one batch share."""

    rows: MicroBatcher
    experience: Experience
    targets: Targets
    step: int
    tally: MetricSums = field(default_factory=MetricSums)
    first_logprobs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Log-probs of this rank's rows, from their first forward pass."""

    def counts(self, mini: MiniBatch) -> _Counts:
        """Denominators of a mini-batch: over all its rows, whichever rank has them."""
        ragged = self.experience.ragged.with_mask(self.targets.mask)
        chosen = list(mini.rows)
        lengths, correct = ragged.valid_lengths[chosen], self.experience.rewards[chosen] > 0
        return _Counts(
            tokens=int(lengths.sum()),
            correct_tokens=int(lengths[correct].sum()),
            rows=len(chosen),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Denominators of a mini-batch's losses."""

    tokens: int
    correct_tokens: int
    rows: int


def _seed(*parts: int) -> int:
    """63 bits of a hash: neighbouring steps draw nothing alike."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
