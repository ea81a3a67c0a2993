"""Supervised fine-tuning on prompt / response rows and on conversations: packed, loss on what the assistant says.

read ──▶ tokens ──shuffled──▶ batch ──plan──▶ packs ──▶ -mean log p(response) ──▶ step ──▶ export
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from meshrl.contract.errors import UserError
from meshrl.images import ImageProcessor, reads_images
from meshrl.images.messages import with_parts
from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.config import ParallelConfig
from meshrl.trainer.data.files import FileRow, file_rows
from meshrl.trainer.data.messages import (
    UNUSABLE,
    as_dicts,
    is_blank,
    read_prompt,
    read_text,
    refuse_unusable,
)
from meshrl.trainer.data.pictures import pictures_of
from meshrl.trainer.data.prompts import check_open, templated, text_ids
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.offline.config import SftConfig
from meshrl.trainer.offline.conversation_rows import conversation, with_pictures
from meshrl.trainer.offline.example import Example, packs
from meshrl.trainer.offline.loop import Lesson, Progress, fit
from meshrl.trainer.offline.turn_ends import ended, turn_end_id, without_end
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)
EXACT_MATCH = "val/exact_match"


@dataclass(frozen=True, slots=True, kw_only=True)
class SftProgress:
    """Where the fine-tuning stands."""

    step: int
    steps: int
    loss: float
    """Mean negative log-probability of a response token."""
    tokens_per_s: float
    exact_match: float | None
    """Share of held-out rows whose whole response greedy decoding would give; None when not measured."""
    seconds: float

    @classmethod
    def of(cls, progress: Progress) -> SftProgress:
        """From the progress of the offline loop."""
        return cls(
            step=progress.step,
            steps=progress.steps,
            loss=progress.numbers.get("loss", math.nan),
            tokens_per_s=progress.tokens_per_s,
            exact_match=progress.numbers.get(EXACT_MATCH),
            seconds=progress.seconds,
        )


def run(config: SftConfig, report: Callable[[SftProgress], None] | None = None) -> SftProgress:
    """Fine-tune and write a Hugging Face checkpoint to `config.output_dir`.

    Args:
        config: What to train on, how long, and where to put it.
        report: Called every ten steps and with each measurement; None logs a line.

    Returns:
        The last progress, with the exact match of the weights that were written.

    Raises:
        UserError: a row is malformed (names file and row) or the model cannot be loaded.
    """
    sharers = config.model.ulysses_sequence_parallel_size
    world = World.start(config.device, ParallelConfig(sequence=sharers))
    try:
        tokenizer_path = config.model.tokenizer_path or config.model.path
        train = read_examples(config, config.train_files, tokenizer_path)
        held_out = read_examples(config, config.val_files, tokenizer_path)
        torch.manual_seed(config.seed)
        policy = build_policy(
            open_hf(config.model.path, trust_remote_code=config.model.trust_remote_code),
            world,
            config.model,
        )
        optimizers = Optimizers(policy, config.optim)
        reader = VisionReader(config.model.path, policy.hf) if policy.tower is not None else None
        held_out = held_out[: config.val_max_samples]
        log_progress, target = report or _log, config.target_exact_match
        done = fit(
            SftLesson(policy, optimizers, config, world, train, held_out, reader),
            policy, optimizers, config, world,
            kind="sft", count=len(train), rows=[e.fingerprint for e in train],
            report=lambda progress: log_progress(SftProgress.of(progress)),
            enough=lambda numbers: target is not None and numbers[EXACT_MATCH] >= target,
        )  # fmt: skip
        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
        end = (
            turn_end_id(tokenizer, config.apply_chat_template_kwargs) if config.append_eos else None
        )
        export_policy(policy, world, config.output_dir, tokenizer=tokenizer_path, end=end)
        return SftProgress.of(done)
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


def read_examples(config: SftConfig, files: Sequence[Path], tokenizer_path: Path) -> list[Example]:
    """Tokenised rows of `files`.

    Raises:
        UserError: a row lacks a key, is too long, or has an empty prompt or response.
    """
    if not files:
        return []
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
    images = ImageProcessor(config.model.path) if reads_images(config.model.path) else None
    examples = [_example(row, tokenizer, config, images) for row in file_rows(files, config.reader)]
    if not examples:
        raise UserError(f"no rows in {', '.join(map(str, files))}")
    return examples


def _example(
    source: FileRow, tokenizer: Any, config: SftConfig, images: ImageProcessor | None
) -> Example:
    row, where = source.values, source.where
    if row.get(config.messages_key) is not None and row.get(config.response_key) is None:
        return conversation(source, tokenizer, config, images)
    for key in (config.prompt_key, config.response_key):
        if key not in row:
            raise UserError(f"{where}: no {key!r} (the row has {', '.join(map(str, row))})")
    sees, key = images is not None, config.image_key
    refuse_unusable(row, where, [name for name in UNUSABLE if not (sees and name == key)])
    prompt = read_prompt(row[config.prompt_key], where, config.prompt_key, pictures=sees)
    texts = prompt if isinstance(prompt, str) else [message.content for message in prompt]
    media = pictures_of(row, texts, where, key) if sees else ()
    response = read_text(row[config.response_key], where, config.response_key)
    messages = prompt if isinstance(prompt, str) else (with_parts if media else as_dicts)(prompt)
    example = tokenised(
        messages, response, tokenizer, where,
        append_eos=config.append_eos, max_length=config.max_length,
        variables=config.apply_chat_template_kwargs,
    )  # fmt: skip
    return example if images is None else with_pictures(example, media, images, where, config)


def tokenised(
    prompt: str | Sequence[Mapping[str, Any]],
    response: str,
    tokenizer: Any,
    where: str,
    *,
    append_eos: bool,
    max_length: int,
    variables: Mapping[str, Any] | None = None,
) -> Example:
    """A prompt (text, or messages that go through the chat template, with `variables`) and its response as tokens.

    With `append_eos` the response has the end of an assistant's turn behind it, once.

    Raises:
        UserError: it is too long, has an empty prompt or response, is a chat without a chat template, or nothing ends
            a response.
    """
    if is_blank(prompt) or is_blank(without_end(response, tokenizer, variables)):
        raise UserError(f"{where}: empty prompt or response")
    if isinstance(prompt, str):
        prompt_ids = text_ids(prompt, tokenizer)
    else:
        check_open(prompt, where)
        text = templated(prompt, where, tokenizer, **(variables or {}))
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    if append_eos:
        response = ended(response, tokenizer, where, variables)
    response_ids = tokenizer.encode(response, add_special_tokens=False)
    total = len(prompt_ids) + len(response_ids)
    if total > max_length:
        raise UserError(f"{where}: {total} tokens > max_length {max_length}")
    return Example(np.array([*prompt_ids, *response_ids], dtype=np.int32), len(prompt_ids))


def _log(progress: SftProgress) -> None:
    match = "" if progress.exact_match is None else f"  exact match {progress.exact_match:.3f}"
    log.info(
        "sft %d/%d  loss %.4f  %.0f tok/s%s",
        progress.step,
        progress.steps,
        progress.loss,
        progress.tokens_per_s,
        match,
    )
