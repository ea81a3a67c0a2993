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
from collections.abc import Mapping, Sequence
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
from meshrl.trainer.objective import Micro, Objective, Targets
from meshrl.trainer.optim import Optimizers, learning_rate
from meshrl.trainer.packing import Pack, pack
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
        old = self._old_logprobs(made, rows)
        targets = self._objective.targets(
            experience, experience.rollout_logprobs if self._objective.rollout_is_old else old
        )
        updates = [mini for _ in range(self._actor.ppo_epochs) for mini in made.mini_batches]
        work = _Work(rows=rows, experience=experience, targets=targets, updates=len(updates))
        rate = learning_rate(self._actor.optim, step, self._total_steps or step + 1)
        norms = [self._update(mini, work, rate) for mini in updates]
        finite = [norm for norm in norms if math.isfinite(norm)]
        if len(finite) < len(norms):
            log.warning(
                "step %d: gradient not finite, %d updates left out", step, len(norms) - len(finite)
            )
        if old is None:
            own_first = [work.first_logprobs[row] for row in made.own(self.world.rank)]
            old = gather_tokens(made, own_first, self.world)
        return {
            **experience_facts(experience),
            **mismatch_facts(experience.ragged, old, experience.rollout_logprobs),
            **targets.metrics,
            **work.tally.over_ranks(self.world),
            "actor/grad_norm": sum(finite) / len(finite) if finite else math.nan,
            "actor/lr": rate,
            "actor/updates": len(norms),
            "actor/skipped_updates": len(norms) - len(finite),
            "batch/rows": len(made.rows),
            "batch/tokens": sum(row.num_tokens for row in made.rows),
            "batch/micro_batches": sum(m.plan.micro_batches for m in made.mini_batches),
        }

    @torch.no_grad()
    def _old_logprobs(self, made: Schedule, rows: Mapping[int, Trajectory]) -> torch.Tensor | None:
        """float32[N] under the weights before the step.

        None when no pass of its own is needed: the rollout's stand for them, or there is one update, which gives
        them on its way, and nobody asks earlier.
        """
        once = len(made.mini_batches) == 1 and self._actor.ppo_epochs == 1
        if self._objective.rollout_is_old or (once and not self._objective.reads_old_logprobs):
            return None
        found: list[torch.Tensor] = []
        for mini in made.mini_batches:
            for chosen in mini.micro_batches(self.world.rank):
                logprobs, _ = self.policy(self._pack(chosen, rows), self._temperature)
                found.extend(_per_row(logprobs, chosen, rows))
        return gather_tokens(made, found, self.world)

    def _update(self, mini: MiniBatch, work: _Work, rate: float) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        counted = int(work.targets.mask[work.experience.tokens_of(mini.rows)].sum())
        # Loss terms sum up over micro-batches; over ranks and updates they are averaged.
        share = 1.0 / (self.world.size * work.updates)
        for chosen in mini.micro_batches(self.world.rank):
            logprobs, entropies = self.policy(self._pack(chosen, work.rows), self._temperature)
            if not chosen:
                # This rank has nothing left to do, and its peers' collectives still need its backward pass.
                logprobs.sum().backward()
                continue
            for row, part in zip(chosen, _per_row(logprobs, chosen, work.rows), strict=True):
                work.first_logprobs.setdefault(row, part)
            micro = self._micro(chosen, work, logprobs, entropies, counted, len(mini.rows))
            loss = self._objective.loss(micro)
            loss.total.backward()  # type: ignore[no-untyped-call]
            tokens = int(micro.inputs.ragged.mask.sum())
            entropy = float(entropies.detach()[micro.inputs.ragged.mask].mean()) if tokens else 0.0
            terms = {**loss.terms, "actor/loss": float(loss.total.detach())}
            work.tally.add_sums({name: value * share for name, value in terms.items()})
            work.tally.add_means({**loss.means, "actor/entropy": entropy}, tokens)
        return self.optimizers.step(rate)

    def _micro(
        self,
        chosen: Sequence[int],
        work: _Work,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        counted: int,
        mini_batch_rows: int,
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
            mini_batch_tokens=counted,
            mini_batch_rows=mini_batch_rows,
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
