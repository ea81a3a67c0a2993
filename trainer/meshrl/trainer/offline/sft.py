"""Supervised fine-tuning on prompt / response rows and on conversations: packed, loss on what the assistant says.

read ──▶ tokens ──shuffled──▶ batch ──plan──▶ packs ──▶ -mean log p(response) ──▶ step ──▶ export
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.config import ParallelConfig
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.offline.config import SftConfig
from meshrl.trainer.offline.examples import Example, packs, read_examples
from meshrl.trainer.offline.loop import EXACT_MATCH, Lesson, OfflineProgress, Report, fit
from meshrl.trainer.offline.turn_ends import turn_end_id
from meshrl.trainer.ranks.world import World


def run(config: SftConfig, report: Report | None = None) -> OfflineProgress:
    """Fine-tune and write a Hugging Face checkpoint to `config.output_dir`.

    Args:
        config: Data, steps and output directory.
        report: Called every ten steps and with each measurement; None logs a line.

    Returns:
        The last progress, with the exact match of the weights that were written.

    Raises:
        UserError: a row is malformed (names file and row) or the model cannot be loaded.
    """
    sharers = config.model.ulysses_sequence_parallel_size
    world = World.start(config.device, ParallelConfig(sequence=sharers))
    try:
        train = read_examples(config, config.train_files, config.tokenizer_dir)
        held_out = read_examples(config, config.val_files, config.tokenizer_dir)
        torch.manual_seed(config.seed)
        policy = build_policy(
            open_hf(config.model.path, trust_remote_code=config.model.trust_remote_code),
            world,
            config.model,
        )
        optimizers = Optimizers(policy, config.optim)
        reader = VisionReader(config.model.path, policy.hf) if policy.tower is not None else None
        held_out = held_out[: config.val_max_samples]
        target = config.target_exact_match
        done = fit(
            SftLesson(policy, optimizers, config, world, train, held_out, reader),
            policy, optimizers, config, world,
            kind="sft", count=len(train), rows=[e.fingerprint for e in train],
            report=report,
            enough=lambda numbers: target is not None and numbers[EXACT_MATCH] >= target,
        )  # fmt: skip
        tokenizer: Any = AutoTokenizer.from_pretrained(config.tokenizer_dir)
        end = (
            turn_end_id(tokenizer, config.apply_chat_template_kwargs) if config.append_eos else None
        )
        export_policy(policy, world, config.output_dir, tokenizer=config.tokenizer_dir, end=end)
        return done
    finally:
        world.close()


class SftLesson(Lesson):
    """Mean -log p of the response tokens of a batch."""

    def __init__(
        self,
        policy: Policy,
        optimizers: Optimizers,
        config: SftConfig,
        world: World,
        train: Sequence[Example],
        held_out: Sequence[Example],
        reader: VisionReader | None = None,
    ) -> None:
        """Keep the parts."""
        self._policy = policy
        self._optimizers = optimizers
        self._budget = config.max_tokens_per_pack
        self._world = world
        self._train = train
        self._held_out = held_out
        self._reader = reader

    def step(self, rows: Sequence[int], rate: float) -> dict[str, float]:
        """One optimizer step."""
        batch = [self._train[row] for row in rows]
        learned = sum(example.num_learned for example in batch)
        total = 0.0
        for _, pack in packs(batch, self._budget, self._world, self._reader):
            logprobs, _ = self._policy(pack, 1.0)
            loss = -logprobs.sum() / learned
            # FSDP averages gradients over ranks; the loss is a sum over all of them.
            (loss * self._world.size).backward()
            total += float(loss.detach())
        self._optimizers.step(rate)
        parts = self._world.gather_shares(np.array([total]))
        tokens = float(sum(len(e.tokens) for e in batch))
        return {"loss": float(sum(part[0] for part in parts)), "tokens": tokens}

    def evaluate(self) -> dict[str, float]:
        """Share of held-out rows that greedy decoding would give."""
        if not self._held_out:
            return {}
        score = exact_match(self._policy, self._held_out, self._budget, self._world, self._reader)
        return {EXACT_MATCH: score}


@torch.no_grad()
def exact_match(
    policy: Policy,
    examples: Sequence[Example],
    max_tokens: int,
    world: World,
    reader: VisionReader | None = None,
) -> float:
    """Share of rows of which every response token is the most likely one, given the true tokens before it."""
    right = 0
    for chosen, pack in packs(examples, max_tokens, world, reader):
        matches = policy.is_greedy(pack).cpu()
        sizes = [example.num_learned for example in chosen] or [0]
        right += sum(bool(part.all()) for part in torch.split(matches, sizes) if chosen)
    gathered = world.gather_shares(np.array([right], dtype=np.int64))
    return float(sum(int(part[0]) for part in gathered)) / len(examples)
