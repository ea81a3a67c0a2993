"""Preferences: rows of a prompt with a chosen and a rejected response, and a learner of a loss over such pairs.

    {"prompt": text or messages, "chosen": text or messages, "rejected": text or messages}

Rows are in TRL's and verl's forms. Of messages the last is the response, and those before it are the prompt; a
`prompt` beside them must say the same. Without a `prompt`, what both texts begin with is the prompt, up to the white
space before their first difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshrl.contract.errors import UserError
from meshrl.trainer.data.files import FileRow, file_rows, row_lacks
from meshrl.trainer.data.messages import (
    as_dicts,
    is_blank,
    read_messages,
    read_prompt,
    read_text,
    refuse_unusable,
)
from meshrl.trainer.learner.metrics import MetricSums
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model.packing import PackSize, plan
from meshrl.trainer.offline.config import PreferenceConfig
from meshrl.trainer.ranks.world import World

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One preference."""

    where: str
    """`file:row`."""
    prompt: str | Messages
    chosen: str
    rejected: str


def read_pairs(config: PreferenceConfig, files: Sequence[Path]) -> list[Pair]:
    """Every row of `files`.

    Raises:
        UserError: a row lacks a key, or holds no prompt or response; names file and row.
    """
    pairs = [_pair(row, config) for row in file_rows(files, config.reader)]
    if files and not pairs:
        raise UserError(f"no rows in {', '.join(map(str, files))}")
    return pairs


def _pair(source: FileRow, config: PreferenceConfig) -> Pair:
    row, where = source.values, source.where
    refuse_unusable(row, where, what="preferences")
    for key, option in ((config.chosen_key, "chosen_key"), (config.rejected_key, "rejected_key")):
        if row.get(key) is None:
            raise UserError(f"{where}: no {key!r} ({row_lacks(key, option, row)})")
    sides = [(key, row[key]) for key in (config.chosen_key, config.rejected_key)]
    (before, chosen), (other, rejected) = (_split(value, where, key) for key, value in sides)
    for key, response in ((config.chosen_key, chosen), (config.rejected_key, rejected)):
        if is_blank(response):
            raise UserError(f"{where}: {key!r} is empty, want a response")
    given = row.get(config.prompt_key)
    prompt = None if given is None else read_prompt(given, where, config.prompt_key)
    if before or other:
        _check_beginnings(before, other, prompt, where, config)
        return Pair(where=where, prompt=before, chosen=chosen, rejected=rejected)
    texts = [isinstance(value, str) for _, value in sides]
    if prompt is None:
        cut = _common(chosen, rejected) if all(texts) else 0
        if not cut:
            raise UserError(
                f"{where}: no {config.prompt_key!r}, and {config.chosen_key!r} and {config.rejected_key!r} do not"
                " begin with the same messages or words"
            )
        return Pair(where=where, prompt=chosen[:cut], chosen=chosen[cut:], rejected=rejected[cut:])
    if isinstance(prompt, str) and not all(texts):
        raise UserError(
            f"{where}: {config.prompt_key!r} is text and a response is messages; want both as text, or as messages"
        )
    known = prompt if isinstance(prompt, str) else as_dicts(prompt)
    return Pair(where=where, prompt=known, chosen=chosen, rejected=rejected)


def _check_beginnings(
    before: Messages, other: Messages, prompt: object, where: str, config: PreferenceConfig
) -> None:
    """Raises UserError where the messages before both responses, and the prompt, do not say the same."""
    if before != other:
        raise UserError(
            f"{where}: {config.chosen_key!r} and {config.rejected_key!r} do not begin with the same messages: only"
            " the last one may differ"
        )
    said = [message["content"] for message in before]
    if isinstance(prompt, str):
        same = prompt in said
    else:
        same = prompt is None or (isinstance(prompt, tuple) and as_dicts(prompt) == before)
    if not same:
        raise UserError(
            f"{where}: {config.prompt_key!r} is another conversation than {config.chosen_key!r} begins with"
        )


def _common(one: str, other: str) -> int:
    """Characters with which both begin, up to the white space before the first difference."""
    ends = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    head = one[:ends]
    if head != head.rstrip():
        return len(head.rstrip())
    *words, _ = head.rsplit(maxsplit=1) or [""]
    return len(words[0]) if words else 0


def _split(value: Any, where: str, key: str) -> tuple[Messages, str]:
    """The messages before the response, and the response."""
    if isinstance(value, str):
        return [], read_text(value, where, key)
    messages = as_dicts(read_messages(value, where, key))
    if messages[-1]["role"] != "assistant":
        raise UserError(
            f"{where}: the last message of {key!r} is of {messages[-1]['role']!r}, want one of the assistant"
        )
    return messages[:-1], messages[-1]["content"]


class PairLearner(ABC):
    """Updates and evaluation by a loss over pairs. Every rank forwards its share of a batch."""

    def __init__(
        self,
        optimizers: Optimizers,
        world: World,
        *,
        sizes: Sequence[PackSize],
        train: int,
        max_tokens: int,
    ) -> None:
        """Keep the parts.

        Args:
            optimizers: Optimizers of the trained model.
            world: The ranks.
            sizes: Size of each pair.
            train: Number of training pairs, the first ones; the others are held out.
            max_tokens: Most tokens of a pack.
        """
        self._optimizers = optimizers
        self._world = world
        self._sizes = sizes
        self._held_out = range(train, len(sizes))
        self._max_tokens = max_tokens

    def step(self, rows: Sequence[int], rate: float) -> dict[str, float]:
        """One optimizer step on the pairs `rows`."""
        tally = MetricSums()
        for chosen in self._shares(rows):
            loss = self._forward(chosen, len(rows), tally)
            loss.backward()  # type: ignore[no-untyped-call]
        norm = self._optimizers.step(rate)
        tokens = float(sum(self._sizes[row].tokens for row in rows))
        return {**tally.over_ranks(self._world), "grad_norm": norm, "tokens": tokens}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The same numbers on held-out pairs."""
        if not self._held_out:
            return {}
        tally = MetricSums()
        for chosen in self._shares(self._held_out):
            self._forward(chosen, len(self._held_out), tally)
        return {f"val/{name}": value for name, value in tally.over_ranks(self._world).items()}

    def _shares(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """The packs of this rank, pairs whole; empty ones keep ranks in step."""
        sizes = [self._sizes[row] for row in rows]
        packing = plan(sizes, ranks=self._world.size, max_tokens=self._max_tokens)
        for chosen in packing.ranks[self._world.rank]:
            yield [rows[index] for index in chosen]

    @abstractmethod
    def _forward(self, chosen: Sequence[int], total: int, tally: MetricSums) -> torch.Tensor:
        """The share of these pairs in the loss of a batch of `total` pairs, times the ranks."""
