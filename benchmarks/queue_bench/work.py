"""The rows that both systems carry, and the proof that they arrived: numpy and the standard library only.

A group is GROUP answers to one prompt of about 256 tokens; answers have a lognormal length of mean TOKENS and at most
twice that, or 4,096. Any process makes any group from the seed and the group's number, so nothing but the numbers is
agreed upon; the environment says how long answers are, and whether each token has its experts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

GROUP = 8
TOKENS = int(os.environ.get("QUEUE_BENCH_TOKENS", "512"))
"""Mean tokens of an answer."""
EXPERTS = bool(os.environ.get("QUEUE_BENCH_EXPERTS"))
"""Rows have the experts of their tokens."""
ROUTED = (48, 8)
"""Layers, and experts of a token: Qwen3-30B."""
SAMPLED = ("tokens", "loss_mask", "rollout_logprobs", *(("experts",) if EXPERTS else ()))
"""Columns that a producer writes; fields of Group."""
VOCABULARY = 32_000
SIGMA = 0.8
"""Deviation of the log of a response's length."""
SAMPLED_BYTES = 4 + 1 + 4 + EXPERTS * ROUTED[0] * ROUTED[1]
"""Bytes of a token that a producer writes."""
BYTES_PER_TOKEN = SAMPLED_BYTES + 4
"""The same with ref_logprobs."""
_ROWS = (64 << 20) // (TOKENS * BYTES_PER_TOKEN)
BATCH = max(GROUP, min(256, 1 << (_ROWS.bit_length() - 1))) if _ROWS else GROUP
"""Samples of one batch of the consumer: 256, or fewer that are 64 MiB."""
SAMPLES = max(4, min(16, (256 << 20) // (BATCH * TOKENS * BYTES_PER_TOKEN))) * BATCH
"""Samples of one pass, unless said."""


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and its answers; T differs from row to row."""

    number: int
    prompt: Array
    """int32[P]"""
    tokens: tuple[Array, ...]
    """int32[T] each: prompt, then response."""
    loss_mask: tuple[Array, ...]
    """uint8[T] each."""
    rollout_logprobs: tuple[Array, ...]
    """float32[T] each."""
    experts: tuple[Array, ...] = ()
    """uint8[T, *ROUTED] each; none without EXPERTS."""


def group(seed: int, number: int) -> Group:
    rng = np.random.default_rng((seed, number))
    prompt = rng.integers(0, VOCABULARY, rng.integers(192, 321), dtype=np.int32)
    mean = np.log(TOKENS) - SIGMA**2 / 2
    lengths = np.clip(rng.lognormal(mean, SIGMA, GROUP), 1, max(4096, 2 * TOKENS)).astype(int)
    tokens, masks, logprobs = [], [], []
    for length in lengths:
        response = rng.integers(0, VOCABULARY, length, dtype=np.int32)
        tokens.append(np.concatenate((prompt, response)))
        masks.append(np.repeat(np.array([0, 1], np.uint8), (len(prompt), length)))
        sampled = -rng.standard_exponential(length, dtype=np.float32)
        logprobs.append(np.concatenate((np.zeros(len(prompt), np.float32), sampled)))
    experts = [rng.integers(0, 128, (len(row), *ROUTED), np.uint8) for row in tokens * EXPERTS]
    return Group(number, prompt, tuple(tokens), tuple(masks), tuple(logprobs), tuple(experts))


def annotate(tokens: Array, starts: Array) -> tuple[Array, Array]:
    """The annotator's columns from every token of its rows: reward float32[rows], ref_logprobs float32[all tokens].

    `tokens` is the rows one after the other, `starts` where each begins.
    """
    sums = np.add.reduceat(tokens, starts, dtype=np.int64)
    return (sums % 1000).astype(np.float32) / 1000, tokens.astype(np.float32) * np.float32(-1e-3)


def starts_of(rows: Sequence[Array]) -> Array:
    """The beginning of each row once they stand one after the other."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.cumsum(lengths) - lengths


def digest(reward: float, *columns: Array) -> int:
    """A digest of one row: its reward, SAMPLED, the reference's log-probs."""
    check = crc32(np.float32(reward).tobytes())
    for array in columns:
        check = crc32(np.ascontiguousarray(array), check)
    return check


def digests(given: Group) -> list[int]:
    """The digests that must arrive of a group."""
    rewards, reference = annotate(np.concatenate(given.tokens), starts_of(given.tokens))
    parts = np.split(reference, starts_of(given.tokens)[1:])
    columns = zip(rewards, *(getattr(given, name) for name in SAMPLED), parts, strict=True)
    return [digest(*row) for row in columns]


def payload_bytes(groups: Iterable[Group]) -> int:
    """Bytes of the columns, rewards included, whatever a system makes of them."""
    return sum(BYTES_PER_TOKEN * len(row) + 4 for group in groups for row in group.tokens)


def verify(seed: int, count: int, arrived: Sequence[int]) -> dict[str, int]:
    """Compare what arrived, in order, with groups `0 .. count - 1`: rows lost, repeated, unknown; groups mixed."""
    group_of = {check: number for number in range(count) for check in digests(group(seed, number))}
    seen = Counter(arrived)
    mixed = 0
    for start in range(0, len(arrived), GROUP):
        mixed += len({group_of.get(check) for check in arrived[start : start + GROUP]}) > 1
    return {
        "lost": len(group_of.keys() - seen.keys()),
        "repeated": sum(times - 1 for times in seen.values()),
        "unknown": len(seen.keys() - group_of.keys()),
        "mixed_groups": mixed,
    }
