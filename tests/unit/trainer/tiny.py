"""A model of 20 thousand parameters and rows for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import Qwen3Config

from meshrl.contract.types import Int32

VOCABULARY = 37


def config(**changes: Any) -> Qwen3Config:
    shape: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return Qwen3Config(**(shape | changes))


def rows(count: int, *, seed: int = 0, shortest: int = 6, longest: int = 40) -> list[Int32]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(shortest, longest + 1, count)
    return [draw.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]
