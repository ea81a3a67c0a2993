"""Supervised fine-tuning on prompt / response rows: packed, loss on the response only.

read ──▶ tokens ──shuffled──▶ batch ──plan──▶ packs ──▶ -mean log p(response) ──▶ step ──▶ export
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from meshrl.contract.errors import UserError
from meshrl.contract.nouns import Int32
from meshrl.trainer.config import SftConfig
from meshrl.trainer.data.reading import Located, located_rows
from meshrl.trainer.distributed import World
from meshrl.trainer.export import export_policy
from meshrl.trainer.model import Policy, build_policy, load_hf
from meshrl.trainer.optim import Optimizers, learning_rate
from meshrl.trainer.packing import Pack, pack, plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One tokenised row."""

    tokens: Int32
    """int32[T]: prompt, then response."""
    prompt_length: int


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
    world = World.start(config.device)
    try:
        tokenizer_path = config.model.tokenizer_path or config.model.path
        train = read_examples(config, config.train_files, tokenizer_path)
        held_out = read_examples(config, config.val_files, tokenizer_path)
        torch.manual_seed(config.seed)
        policy = build_policy(load_hf(config.model.path), world, config.model)
        done = _train(
            policy, train, held_out[: config.val_max_samples], config, world, report or _log
        )
        export_policy(policy, world, config.output_dir, tokenizer=tokenizer_path)
        return done
    finally:
        world.close()


def _train(
    policy: Policy,
    train: Sequence[Example],
    held_out: Sequence[Example],
    config: SftConfig,
    world: World,
    report: Callable[[SftProgress], None],
) -> SftProgress:
    optimizers = Optimizers(policy, config.optim)
    batches = shuffled(len(train), config.batch_rows, config.seed)
    begin = time.monotonic()
    tokens = 0
    for step in range(1, config.steps + 1):
        batch = [train[index] for index in next(batches)]
        loss = sft_step(policy, optimizers, batch, config, world, step - 1)
        tokens += sum(len(example.tokens) for example in batch)
        last = step == config.steps
        measured = None
        if held_out and (last or step % config.test_freq == 0):
            measured = exact_match(policy, held_out, config.max_tokens_per_pack, world)
        reached = (
            measured is not None
            and config.target_exact_match is not None
            and measured >= config.target_exact_match
        )
        seconds = time.monotonic() - begin
        progress = SftProgress(
            step=step,
            steps=config.steps,
            loss=loss,
            tokens_per_s=tokens / seconds,
            exact_match=measured,
            seconds=seconds,
        )
        if world.is_main and (measured is not None or step % 10 == 0 or last):
            report(progress)
        if reached:
            break
    return progress


def sft_step(
    policy: Policy,
    optimizers: Optimizers,
    batch: Sequence[Example],
    config: SftConfig,
    world: World,
    step: int,
) -> float:
    """One optimizer step on `batch`; returns the loss, the same on every rank."""
    response_tokens = sum(len(e.tokens) - e.prompt_length for e in batch)
    total = 0.0
    for made in _packs(batch, config.max_tokens_per_pack, world):
        logprobs, _ = policy(made, 1.0)
        loss = -logprobs.sum() / response_tokens
        # FSDP averages gradients over ranks; the loss is a sum over all of them.
        (loss * world.size).backward()
        total += float(loss.detach())
    optimizers.step(learning_rate(config.optim, step, config.steps))
    return float(sum(part[0] for part in world.all_gather(np.array([total]))))


@torch.no_grad()
def exact_match(
    policy: Policy, examples: Sequence[Example], max_tokens: int, world: World
) -> float:
    """Share of rows of which every response token is the most likely one, given the true tokens before it."""
    made = plan([len(e.tokens) for e in examples], ranks=world.size, max_tokens=max_tokens)
    right = 0
    for rows in made.ranks[world.rank]:
        chosen = [examples[row] for row in rows]
        matches = policy.is_greedy(_pack(chosen).to(world.device)).cpu()
        sizes = [len(e.tokens) - e.prompt_length for e in chosen]
        right += sum(bool(part.all()) for part in torch.split(matches, sizes or [0]) if rows)
    gathered = world.all_gather(np.array([right], dtype=np.int64))
    return float(sum(int(part[0]) for part in gathered)) / len(examples)


def _packs(batch: Sequence[Example], max_tokens: int, world: World) -> Iterator[Pack]:
    made = plan([len(e.tokens) for e in batch], ranks=world.size, max_tokens=max_tokens)
    for rows in made.ranks[world.rank]:
        yield _pack([batch[row] for row in rows]).to(world.device)


def _pack(examples: Sequence[Example]) -> Pack:
    return pack([e.tokens for e in examples], [e.prompt_length for e in examples])


def shuffled(count: int, batch_rows: int, seed: int) -> Iterator[list[int]]:
    """Batches of row indices, for ever: each epoch in an order of its own, batches running on across epochs."""
    draw = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch_rows:
            waiting.extend(draw.permutation(count).tolist())
        yield waiting[:batch_rows]
        del waiting[:batch_rows]


def read_examples(config: SftConfig, files: Sequence[Path], tokenizer_path: Path) -> list[Example]:
    """Tokenised rows of `files`.

    Raises:
        UserError: a row lacks a key, is too long, or has an empty prompt or response.
    """
    if not files:
        return []
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
    examples = [_example(located, tokenizer, config) for located in located_rows(files)]
    if not examples:
        raise UserError(f"no rows in {', '.join(map(str, files))}")
    return examples


def _example(located: Located, tokenizer: Any, config: SftConfig) -> Example:
    row, where = located.row, located.where
    for key in (config.prompt_key, config.response_key):
        if key not in row:
            raise UserError(f"{where}: no {key!r} (the row has {', '.join(map(str, row))})")
    prompt, response = row[config.prompt_key], row[config.response_key]
    if not isinstance(prompt, str):
        if not tokenizer.chat_template:
            raise UserError(f"{where}: the prompt is a chat and the tokenizer has no chat template")
        prompt = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=False
        )
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    response_ids = tokenizer.encode(str(response), add_special_tokens=False)
    if config.append_eos:
        response_ids = [*response_ids, tokenizer.eos_token_id]
    if not prompt_ids or not response_ids:
        raise UserError(f"{where}: empty prompt or response")
    total = len(prompt_ids) + len(response_ids)
    if total > config.max_length:
        raise UserError(f"{where}: {total} tokens > max_length {config.max_length}")
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
