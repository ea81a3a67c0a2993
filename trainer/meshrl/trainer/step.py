"""One training step: what happens to a batch between `take` and `settle`.

    rows ──assemble──▶ Experience ──(old log-probs)──▶ Objective.targets: advantages, weights, mask
                                                          │
         for each epoch, mini-batch:  micro-batches: forward, Objective.loss, backward ──▶ clip, optimizer step

Targets are computed for the whole batch on every rank alike; a rank forwards its own rows only.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshrl.contract.nouns import Batch, Json, Trajectory
from meshrl.trainer.batch import (
    Experience,
    MiniBatch,
    Schedule,
    assemble,
    gather_tokens,
    schedule,
)
from meshrl.trainer.config import ActorConfig
from meshrl.trainer.distributed import World
from meshrl.trainer.facts import experience_facts, mismatch_facts
from meshrl.trainer.losses._types import LossInputs
from meshrl.trainer.model import Policy
from meshrl.trainer.optim import Optimizers, learning_rate
from meshrl.trainer.packing import Pack, pack
from meshrl.trainer.policy_gradient import Micro, Objective, OldPolicy, Targets
from meshrl.trainer.ragged import Ragged
from meshrl.trainer.tally import Tally

log = logging.getLogger(__name__)


COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "spans", "reward", "reward_components")


class Learner:
    """Policy, optimizer and objective of one rank."""

    def __init__(
        self,
        policy: Policy,
        optimizers: Optimizers,
        objective: Objective,
        world: World,
        actor: ActorConfig,
        *,
        temperature: float,
        seed: int,
        total_steps: int | None,
    ) -> None:
        """Keep the parts.

        Args:
            policy: The model to train.
            optimizers: Its optimizer.
            objective: The algorithm.
            world: The ranks.
            actor: Mini-batches, epochs, token budget, learning rate.
            temperature: What the rollout's logits were divided by, and so the policy's are.
            seed: Of whatever an algorithm draws.
            total_steps: Where a falling learning rate ends; None keeps it from falling.
        """
        self.policy = policy
        self.optimizers = optimizers
        self.world = world
        self.columns = (*COLUMNS, *objective.columns)
        self._objective = objective
        self._actor = actor
        self._temperature = temperature
        self._seed = seed
        self._total_steps = total_steps

    @property
    def kl_coef(self) -> float:
        """The KL controller's coefficient: part of a checkpoint."""
        return self._objective.kl_coef

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        self._objective.kl_coef = value

    def schedule(self, batch: Batch) -> Schedule:
        """Who forwards which rows, and in which update."""
        return schedule(
            batch,
            ranks=self.world.size,
            max_tokens=self._actor.ppo_max_token_len_per_gpu,
            mini_batch_groups=self._actor.ppo_mini_batch_size,
            whole_groups=self._objective.whole_groups,
        )

    def learn(self, made: Schedule, own: Sequence[Trajectory], step: int) -> dict[str, Json]:
        """Train on a batch.

        Args:
            made: Its schedule.
            own: The rows of `made.uids(rank)`, in order.
            step: Optimizer steps done before it.

        Returns:
            The step's metrics, the same on every rank.
        """
        # A step's draws are a function of (seed, step, rank): a resumed run draws what the killed one drew.
        torch.manual_seed(_seed(self._seed, step, self.world.rank))
        rows = dict(zip(made.own(self.world.rank), own, strict=True))
        experience = assemble(made, own, self.world)
        old = self._old_policy(made, rows, experience)
        targets = self._objective.targets(experience, old)
        updates = [mini for _ in range(self._actor.ppo_epochs) for mini in made.mini_batches]
        work = _Work(rows=rows, experience=experience, targets=targets, updates=len(updates))
        rate = learning_rate(self._actor.optim, step, self._total_steps or step + 1)
        norms = [self._update(mini, work, rate) for mini in updates]
        finite = [norm for norm in norms if math.isfinite(norm)]
        if len(finite) < len(norms):
            log.warning(
                "step %d: gradient not finite, %d updates left out", step, len(norms) - len(finite)
            )
        before = old.logprobs
        if before is None or self._objective.rollout_is_old:
            own_first = [work.first_logprobs[row] for row in made.own(self.world.rank)]
            before = gather_tokens(made, own_first, self.world)
        return {
            **experience_facts(experience),
            **mismatch_facts(experience.ragged, before, experience.rollout_logprobs),
            **targets.metrics,
            **work.tally.over_ranks(self.world),
            "actor/grad_norm": sum(finite) / len(finite) if finite else math.nan,
            "actor/lr": rate,
            "actor/updates": len(norms),
            "actor/skipped_updates": len(norms) - len(finite),
            "batch/rows": len(made.rows),
            "batch/tokens": sum(row.num_tokens for row in made.rows),
            "batch/micro_batches": sum(len(m.ranks[0]) for m in made.mini_batches),
        }

    @torch.no_grad()
    def _old_policy(
        self, made: Schedule, rows: Mapping[int, Trajectory], experience: Experience
    ) -> OldPolicy:
        """What the weights before the step say, by as few passes of their own as the objective allows."""
        objective = self._objective
        squares = None
        if objective.reads_sum_pi_squared:
            squares = self._forward(made, rows, self.policy.sum_pi_squared)
        if objective.rollout_is_old:
            return OldPolicy(logprobs=experience.rollout_logprobs, sum_pi_squared=squares)
        once = len(made.mini_batches) == 1 and self._actor.ppo_epochs == 1
        if once and not objective.reads_old_logprobs:
            return OldPolicy(sum_pi_squared=squares)
        logprobs = self._forward(made, rows, lambda *given: self.policy(*given)[0])
        return OldPolicy(logprobs=logprobs, sum_pi_squared=squares)

    def _forward(
        self,
        made: Schedule,
        rows: Mapping[int, Trajectory],
        function: Callable[[Pack, float], torch.Tensor],
    ) -> torch.Tensor:
        """float32[N] of the whole batch, from a function of packs."""
        found: list[torch.Tensor] = []
        for mini in made.mini_batches:
            for chosen in mini.ranks[self.world.rank]:
                values = function(self._pack(chosen, rows), self._temperature)
                found.extend(_per_row(values, chosen, rows))
        return gather_tokens(made, found, self.world)

    def _update(self, mini: MiniBatch, work: _Work, rate: float) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        counts = work.counts(mini)
        # Loss terms sum up over micro-batches; over ranks and updates they are averaged.
        share = 1.0 / (self.world.size * work.updates)
        for chosen in mini.ranks[self.world.rank]:
            logprobs, entropies = self.policy(self._pack(chosen, work.rows), self._temperature)
            if not chosen:
                # This rank has nothing left to do, and its peers' collectives still need its backward pass.
                logprobs.sum().backward()
                continue
            for row, part in zip(chosen, _per_row(logprobs, chosen, work.rows), strict=True):
                work.first_logprobs.setdefault(row, part)
            micro = self._micro(chosen, work, logprobs, entropies, counts)
            loss = self._objective.loss(micro)
            loss.total.backward()  # type: ignore[no-untyped-call]
            tokens = int(micro.inputs.ragged.mask.sum())
            shares = {**loss.shares, "actor/loss": float(loss.total.detach())}
            work.tally.add_sums({name: value * share for name, value in shares.items()})
            work.tally.add_means(loss.means, tokens)
        return self.optimizers.step(rate)

    def _micro(
        self,
        chosen: Sequence[int],
        work: _Work,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        counts: _Counts,
    ) -> Micro:
        experience, targets = work.experience, work.targets
        places = experience.tokens_of(chosen)
        device = self.world.device

        def part(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else column[places].to(device)

        old = part(targets.old_logprobs)
        ragged = Ragged.from_lengths(
            experience.ragged.lengths[list(chosen)],
            targets.mask[places].to(device),
            experience.ragged.groups[list(chosen)],
        )
        return Micro(
            inputs=LossInputs(
                ragged=ragged,
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old,
                advantages=targets.advantages[places].to(device),
                rollout_is_weights=part(targets.weights),
                ref_logprobs=part(experience.ref_logprobs),
            ),
            entropies=entropies,
            correct=(experience.rewards[list(chosen)] > 0).to(device),
            mini_batch_tokens=counts.tokens,
            mini_batch_correct_tokens=counts.correct_tokens,
            mini_batch_rows=counts.rows,
            ranks=self.world.size,
        )

    def _pack(self, chosen: Sequence[int], rows: Mapping[int, Trajectory]) -> Pack:
        picked = [rows[row] for row in chosen]
        packed = pack([row.tokens for row in picked], [row.prompt_length for row in picked])
        return packed.to(self.world.device)


@dataclass(slots=True, eq=False, kw_only=True)
class _Work:
    """What the updates of one batch share."""

    rows: Mapping[int, Trajectory]
    """This rank's."""
    experience: Experience
    targets: Targets
    updates: int
    tally: Tally = field(default_factory=Tally)
    first_logprobs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of this rank's rows, as they were forwarded first."""

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
    """What losses of a mini-batch are divided by."""

    tokens: int
    correct_tokens: int
    rows: int


def _per_row(
    logprobs: torch.Tensor, chosen: Sequence[int], rows: Mapping[int, Trajectory]
) -> Sequence[torch.Tensor]:
    """A pack's log-probs, cut into its rows, on the CPU."""
    sizes = [len(rows[row].tokens) - rows[row].prompt_length for row in chosen]
    return torch.split(logprobs.detach().cpu(), sizes) if chosen else ()


def _seed(*parts: int) -> int:
    """63 bits of a hash: neighbouring steps draw nothing alike."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
