"""Offline preference optimisation: DPO, IPO or another loss over pairs, on stored comparisons.

pairs ──▶ tokens ──▶ reference log-probs, once ──shuffled──▶ packs of whole pairs ──▶ losses/dpo, losses/ipo ──▶ step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer

from meshrl.common.plugins import constant, load
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import LossInputs
from meshrl.trainer.algorithms.losses.dpo import Options as DpoOptions
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.config import ActorConfig, ModelConfig
from meshrl.trainer.learner.metrics import MetricSums
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model.packing import PackSize, pair_sizes, plan
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.offline.config import DpoConfig
from meshrl.trainer.offline.examples import Example, packed, tokenised
from meshrl.trainer.offline.loop import Lesson, OfflineProgress, Report, fit
from meshrl.trainer.offline.pairs import Pair, PairLearner, read_pairs
from meshrl.trainer.offline.turn_ends import turn_end_id
from meshrl.trainer.ranks.world import World

LOSSES = "meshrl.trainer.algorithms.losses"


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """One tokenised pair."""

    chosen: Example
    rejected: Example

    @property
    def rows(self) -> tuple[Example, Example]:
        """Chosen, rejected."""
        return self.chosen, self.rejected


def sizes_of(pairs: Sequence[Comparison]) -> list[PackSize]:
    """The size of each pair in a pack."""
    return pair_sizes((pair.chosen.tokens, pair.rejected.tokens) for pair in pairs)


def run(config: DpoConfig, report: Report | None = None) -> OfflineProgress:
    """Train on preferences and write a Hugging Face checkpoint to `config.output_dir`.

    Args:
        config: Data, steps, loss and output directory.
        report: Called every ten steps and with each measurement; None logs a line.

    Raises:
        UserError: a row is malformed (names file and row), the model cannot be loaded, or the checkpoint there
            is another training's.
        ConfigError: the loss is none over pairs.
    """
    world = World.start(config.device)
    try:
        train = comparisons(config, read_pairs(config, config.train_files))
        held_out = read_pairs(config, config.val_files)[: config.val_max_samples]
        measured = comparisons(config, held_out)
        torch.manual_seed(config.seed)
        both = [*train, *measured]
        known = None
        if not options(config.policy_loss, DpoOptions).dpo_reference_free:
            known = reference_logprobs(config, both, world)
        policy = build_policy(
            open_hf(config.model.path, trust_remote_code=config.model.trust_remote_code),
            world,
            config.model,
        )
        optimizers = Optimizers(policy, config.optim)
        lesson = PreferenceLesson(policy, optimizers, config, world, both, known, len(train))
        rows = [row.tokens for pair in train for row in pair.rows]
        done = fit(
            lesson, policy, optimizers, config, world,
            kind=config.policy_loss.loss_mode, count=len(train), rows=rows, report=report,
        )  # fmt: skip
        tokenizer: Any = AutoTokenizer.from_pretrained(config.tokenizer_dir)
        end = turn_end_id(tokenizer, {}) if config.append_eos else None
        export_policy(policy, world, config.output_dir, tokenizer=config.tokenizer_dir, end=end)
        return done
    finally:
        world.close()


class PreferenceLesson(PairLearner, Lesson):
    """A step on pairs."""

    def __init__(
        self,
        policy: Policy,
        optimizers: Optimizers,
        config: DpoConfig,
        world: World,
        pairs: Sequence[Comparison],
        reference: Sequence[npt.NDArray[np.float32]] | None,
        train: int,
    ) -> None:
        """Keep the parts.

        Args:
            policy: The model to train.
            optimizers: Its optimizer.
            config: Loss and budget.
            world: The ranks.
            pairs: The training pairs, then the held-out ones.
            reference: Per pair log π_ref float32[N] of its response tokens, chosen then rejected; None where the
                loss is reference-free.
            train: How many pairs are to train on.

        Raises:
            ConfigError: the loss is none over pairs.
        """
        super().__init__(
            optimizers,
            world,
            sizes=sizes_of(pairs),
            train=train,
            max_tokens=config.max_tokens_per_pack,
        )
        self._policy = policy
        self._actor = ActorConfig(policy_loss=config.policy_loss)
        self._pairs = pairs
        self._reference = reference
        name = config.policy_loss.loss_mode
        self._loss = load(LOSSES, name, "compute")
        if not constant(LOSSES, name, "WHOLE_GROUPS", False):
            raise ConfigError(
                f"policy_loss.loss_mode: {name} is not a loss over pairs; want dpo or ipo"
            )

    def _forward(self, chosen: Sequence[int], total: int, tally: MetricSums) -> torch.Tensor:
        device = self._world.device
        rows = [row for index in chosen for row in self._pairs[index].rows]
        logprobs, _ = self._policy(packed(rows).to(device), 1.0)
        if not rows:
            empty: torch.Tensor = logprobs.sum()
            return empty
        count = len(chosen)
        ragged = Ragged.from_lengths(
            torch.tensor([len(row.tokens) - row.prompt_length for row in rows]),
            torch.ones(len(logprobs), dtype=torch.bool, device=device),
            torch.arange(count).repeat_interleave(2),
        )
        signs = torch.tensor([1.0, -1.0], device=device).repeat(count)
        known = None
        if self._reference is not None:
            known = torch.from_numpy(np.concatenate([self._reference[i] for i in chosen])).to(
                device
            )
        inputs = LossInputs(
            ragged=ragged,
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            # One over the row's tokens: the sign of the sum says which row is chosen.
            advantages=ragged.to_tokens(signs / ragged.lengths),
            ref_logprobs=known,
        )
        size = self._world.size
        aggregate = Aggregator(mode="seq-mean-token-sum", global_batch_size=2 * total, dp_size=size)
        output = self._loss(inputs, self._actor, aggregate)
        tally.add_sums({"loss": float(output.loss.detach()) / size})
        with torch.no_grad():
            ratios = ragged.row_sum(logprobs - known if known is not None else logprobs)
        means = {name.removeprefix("actor/dpo_"): float(v) for name, v in output.metrics.items()}
        means |= {"chosen": float(ratios[0::2].mean()), "rejected": float(ratios[1::2].mean())}
        tally.add_means(means, count)
        loss: torch.Tensor = output.loss
        return loss


def comparisons(config: DpoConfig, pairs: Sequence[Pair]) -> list[Comparison]:
    """Tokenised pairs. Raises UserError as `tokenised` does."""
    tokenizer: Any = AutoTokenizer.from_pretrained(config.tokenizer_dir)

    def example(pair: Pair, response: str) -> Example:
        return tokenised(
            pair.prompt, response, tokenizer, pair.where,
            append_eos=config.append_eos, max_length=config.max_length,
        )  # fmt: skip

    return [Comparison(example(pair, pair.chosen), example(pair, pair.rejected)) for pair in pairs]


@torch.no_grad()
def reference_logprobs(
    config: DpoConfig, pairs: Sequence[Comparison], world: World
) -> list[npt.NDArray[np.float32]]:
    """Per pair log π_ref float32[N] of its response tokens, chosen then rejected; on every rank all of them."""
    frozen = ModelConfig(
        path=config.reference_path or config.model.path, param_dtype=config.model.param_dtype
    )
    model = build_policy(
        open_hf(frozen.path, trust_remote_code=config.model.trust_remote_code), world, frozen
    ).eval()
    packing = plan(sizes_of(pairs), ranks=world.size, max_tokens=config.max_tokens_per_pack)
    flat = []
    for chosen in packing.ranks[world.rank]:
        rows = [row for index in chosen for row in pairs[index].rows]
        logprobs, _ = model(packed(rows).to(world.device), 1.0)
        flat.append(logprobs.float().cpu().numpy())
    known: dict[int, npt.NDArray[np.float32]] = {}
    for rank, part in enumerate(world.all_gather(np.concatenate(flat))):
        owned = packing.rows_of(rank)
        sizes = [sum(len(r.tokens) - r.prompt_length for r in pairs[i].rows) for i in owned]
        known |= dict(zip(owned, np.split(part, np.cumsum(sizes)[:-1]), strict=False))
    return [known[index] for index in range(len(pairs))]
