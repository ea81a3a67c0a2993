"""The batch that both sides train on, and the models: numpy only, since the peer's environment has no meshrl."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 8
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
DUAL_CLIP = 3.0
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One model and one batch for it; a response is a quarter of the longest one in the mean."""

    name: str
    vocab: int
    hidden: int
    layers: int
    groups: int
    prompt: int
    """Longest prompt, in tokens; the shortest is half as long."""
    response: int
    """Longest response."""
    seed: int = 0

    def model(self) -> dict[str, Any]:
        """Arguments of a Qwen3Config."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.hidden // 4,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }

    def batch(self) -> list[Row]:
        """Groups of GROUP rows, prompts equal within a group."""
        draw = np.random.default_rng(self.seed)
        rows = []
        for length in self._lengths(draw):
            if len(rows) % GROUP == 0:
                size = int(draw.integers(self.prompt // 2, self.prompt + 1))
                prompt = draw.integers(2, self.vocab, size).astype(np.int32)
            # A model with random weights is near uniform; noise makes some ratios leave the clip range.
            old = draw.normal(-np.log(self.vocab), 0.1, length).astype(np.float32)
            response = draw.integers(2, self.vocab, length).astype(np.int32)
            rows.append(Row(prompt=prompt, response=response, old_logprobs=old))
        for row, reward in zip(rows, self._rewards(draw), strict=True):
            row.reward = reward
        return rows

    def advantages(self) -> npt.NDArray[np.float64]:
        """float64[B] of GRPO: (r - mean) / (std + 1e-6) in each group, std unbiased."""
        rewards = np.array([row.reward for row in self.batch()]).reshape(-1, GROUP)
        mean, std = rewards.mean(1, keepdims=True), rewards.std(1, ddof=1, keepdims=True)
        return ((rewards - mean) / (std + 1e-6)).reshape(-1)

    def _lengths(self, draw: np.random.Generator) -> list[int]:
        """Exponential, cut at the longest; scaled until the mean is a quarter of it; one row is as long."""
        units = draw.exponential(size=self.groups * GROUP)
        low, high = 0.0, float(self.response)
        for _ in range(50):
            scale = (low + high) / 2
            lengths = np.clip(scale * units, 4, self.response).astype(int)
            lengths[0] = self.response
            low, high = (scale, high) if lengths.mean() < self.response / 4 else (low, scale)
        return [int(length) for length in lengths]

    def _rewards(self, draw: np.random.Generator) -> list[float]:
        return [float(reward) for reward in draw.integers(0, 2, self.groups * GROUP)]

    def json(self) -> dict[str, Any]:
        """For the command line of a side."""
        return asdict(self)


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One sampled answer."""

    prompt: npt.NDArray[np.int32]
    response: npt.NDArray[np.int32]
    old_logprobs: npt.NDArray[np.float32]
    """float32[response]"""
    reward: float = 0.0


WIDE = Work(name="wide", vocab=100_000, hidden=128, layers=2, groups=2, prompt=8, response=64)
DEMO = Work(name="demo", vocab=99, hidden=96, layers=3, groups=8, prompt=48, response=256)
"""The demo's shape: `meshrl.cli.demo.tiny_model`."""
SMALL = Work(name="small", vocab=16_000, hidden=256, layers=6, groups=8, prompt=64, response=256)
"""Nine million parameters: little for a language model, twenty-six times the demo's."""
