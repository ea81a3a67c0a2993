"""Held-out accuracy of a model, decoded greedily by transformers: the one measure for both sides."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Score = Callable[[str, str], float]


def rows_of(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def score_of(path: str) -> Score:
    """The recipe's reward function, of an answer and what is right."""
    spec = importlib.util.spec_from_file_location("reward_of_recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda solution, answer: float(module.compute_score("", solution, answer)["score"])


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, held_out: str, score: Score, max_tokens: int) -> float:
    """Share of the score over all rows of `held_out`."""
    rows = rows_of(held_out)
    batch = tokenizer(
        [row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left"
    )
    out = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        max_new_tokens=max_tokens,
        use_cache=True,
    )
    answers = out[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(score(t, row["answer"]) for t, row in zip(texts, rows, strict=True)) / len(rows)
