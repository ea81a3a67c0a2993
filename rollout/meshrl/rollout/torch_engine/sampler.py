"""Draws tokens for many rows at once; a row's draw depends on its key and position alone."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

OFF = 2.0
"""A top_p that keeps everything, also where rounding brings the cumulated probability above 1."""


def row_key(seed: int, request_id: str) -> int:
    """64 bits that name a request's random stream."""
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One uniform in [0, 1) per row, a pure function of its key and position.

    splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") of the key's
    `position`-th counter value. 52 bits, so that `uniform * total < total` in float64.
    """
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    fractions: npt.NDArray[np.float64] = (state >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return fractions


class SamplingRows:
    """Sampling parameters of the running rows as arrays, so that a step has no loop over rows."""

    def __init__(self, capacity: int) -> None:
        self.temperature = np.zeros(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.top_p = np.zeros(capacity, dtype=np.float32)
        self.key = np.zeros(capacity, dtype=np.uint64)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for column in (self.temperature, self.top_k, self.top_p, self.key):
            column[target] = column[source]

    def sample(
        self, logits: torch.Tensor, rows: slice, positions: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row.

        Args:
            logits: float32[n, V]
            rows: Which n rows they belong to.
            positions: int64[n], response tokens sampled before this one.

        Returns:
            int64[n] tokens and float32[n] log-probs under the distribution that was sampled; for greedy rows
            (temperature 0) under the untempered one.
        """
        temperature, top_k, top_p = self.temperature[rows], self.top_k[rows], self.top_p[rows]
        draws = uniforms(self.key[rows], positions)
        cut = (top_k < logits.shape[-1]) | (top_p < OFF)
        # A kind per row, never per batch: other rows must not change how a row is drawn.
        kind = np.where(temperature == 0, 0, np.where(cut, 2, 1))
        if (kind == kind[0]).all():
            return _sample(int(kind[0]), logits, temperature, top_k, top_p, draws)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for each in np.unique(kind):
            of = np.flatnonzero(kind == each)
            where = torch.from_numpy(of).to(logits.device)
            tokens[where], logprobs[where] = _sample(
                int(each), logits[where], temperature[of], top_k[of], top_p[of], draws[of]
            )
        return tokens, logprobs


def _sample(
    kind: int,
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    draws: npt.NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == 0:
        best, tokens = logits.max(-1)
        return tokens, best - logits.logsumexp(-1)
    device = logits.device
    uniform = torch.from_numpy(draws).to(device)[:, None]
    scaled = logits / torch.from_numpy(temperature).to(device)[:, None]
    if kind == 1:
        return _inverse_cdf(scaled, uniform)
    width = int(top_k.max())
    ordered, order = (
        scaled.topk(width) if width < scaled.shape[-1] else scaled.sort(-1, descending=True)
    )
    keep = torch.from_numpy(top_k).to(device)[:, None]
    rank = torch.arange(width, device=device)
    ordered = ordered.masked_fill(rank >= keep, -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    nucleus = torch.from_numpy(top_p).to(device)[:, None]
    # The first token always stays: nothing is before it.
    ordered = ordered.masked_fill((before >= nucleus) & (rank > 0), -torch.inf)
    picked, logprobs = _inverse_cdf(ordered, uniform)
    return order.gather(-1, picked[:, None]).squeeze(-1), logprobs


def _inverse_cdf(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token whose share of the cumulated probability holds `uniform`; float64, for large vocabularies."""
    probabilities = logits.softmax(-1)
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    picked = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)
    # Logits that are not finite find no place; the caller sees a log-prob that is not finite either.
    picked.clamp_(max=logits.shape[-1] - 1)
    return picked.squeeze(-1), probabilities.gather(-1, picked).squeeze(-1).log()
