"""Draws tokens for many rows at once; a row's draw depends on its key and position alone."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from meshrl.contract.types import GenerateRequest

OFF = 2.0
"""A top_p that keeps everything, also where rounding brings the cumulated probability above 1."""
GREEDY, PLAIN, CUT = range(3)
"""Kinds of rows: temperature 0, temperature only, top_k, top_p or min_p besides."""
BLOCK = 128
"""Tokens of which a GPU knows only the sum at first."""


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
        self.min_p = np.zeros(capacity, dtype=np.float32)
        self.key = np.zeros(capacity, dtype=np.uint64)
        self.penalty = np.ones(capacity, dtype=np.float32)
        self._changed = np.zeros(capacity, dtype=np.bool_)
        """Rows whose logits are not the model's."""
        self._seen: torch.Tensor | None = None
        """bool[capacity, V]: tokens of prompt and response. This and the bias exist from the first row that needs
        one of them."""
        self._bias: torch.Tensor | None = None
        """float32[capacity, V]"""

    def enter(
        self, row: int, request: GenerateRequest, vocabulary: int, device: torch.device
    ) -> None:
        """Sample row `row` as `request` asks from now on."""
        sampling = request.sampling
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, vocabulary) if sampling.top_k > 0 else vocabulary
        self.top_p[row] = sampling.top_p if sampling.top_p < 1 else OFF
        self.min_p[row] = sampling.min_p
        self.key[row] = row_key(sampling.seed, request.request_id)
        self.penalty[row] = sampling.repetition_penalty
        self._changed[row] = sampling.changes_logits
        if not sampling.changes_logits:
            return
        if self._seen is None or self._bias is None:
            size = len(self.key), vocabulary
            self._seen = torch.zeros(size, dtype=torch.bool, device=device)
            self._bias = torch.zeros(size, device=device)
        self._seen[row] = False
        self._seen[row, torch.from_numpy(request.prompt_ids.astype(np.int64)).to(device)] = True
        self._bias[row] = 0
        for token, bias in sampling.logit_bias.items():
            self._bias[row, token] = bias

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.key, self.penalty)
        for column in (*columns, self._changed):
            column[target] = column[source]
        for changes in (self._seen, self._bias):
            if changes is not None and self._changed[source]:
                changes[target] = changes[source]

    def changes_logits(self, rows: slice) -> bool:
        """Whether a row's logits are not the model's."""
        return bool(self._changed[rows].any())

    def kinds(self, rows: slice, vocabulary: int) -> npt.NDArray[np.int64]:
        """GREEDY, PLAIN or CUT; of a row, never of a batch: other rows must not change how a row is drawn."""
        cut = (self.top_k[rows] < vocabulary) | (self.top_p[rows] < OFF) | (self.min_p[rows] > 0)
        return np.where(self.temperature[rows] == 0, GREEDY, np.where(cut, CUT, PLAIN))

    def sample(
        self, logits: torch.Tensor, rows: slice, positions: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row.

        Args:
            logits: [n, V]
            rows: Which n rows they belong to.
            positions: int64[n], response tokens sampled before this one.

        Returns:
            int64[n] tokens and float32[n] log-probs under the distribution that was sampled; for greedy rows
            (temperature 0) under the untempered one.
        """
        if not self.changes_logits(rows):
            return self._drawn(logits, rows, positions)
        assert self._seen is not None
        assert self._bias is not None
        changed = np.flatnonzero(self._changed[rows])
        where = torch.from_numpy(changed).to(logits.device)
        slots = where + (rows.start or 0)
        raw = logits[where].float() + self._bias[slots]
        penalty = torch.from_numpy(self.penalty[rows][changed]).to(logits.device)[:, None]
        again = torch.where(raw > 0, raw / penalty, raw * penalty)
        logits = logits.float().index_copy(0, where, torch.where(self._seen[slots], again, raw))
        tokens, logprobs = self._drawn(logits, rows, positions)
        self._seen[slots, tokens[where]] = True
        return tokens, logprobs

    def _drawn(
        self, logits: torch.Tensor, rows: slice, positions: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        draws = uniforms(self.key[rows], positions)
        every: tuple[npt.NDArray[Any], ...] = self.temperature, self.top_k, self.top_p, self.min_p
        columns = [column[rows] for column in every]
        kind = self.kinds(rows, logits.shape[-1])
        # Only rows of one top_k are cut together: which of equal logits come first depends on how many are sorted.
        alike = kind + (kind == CUT) * columns[1]
        if (alike == alike[0]).all():
            return _sample(int(kind[0]), logits, draws, *columns)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for each in np.unique(alike):
            of = np.flatnonzero(alike == each)
            where = torch.from_numpy(of).to(logits.device)
            tokens[where], logprobs[where] = _sample(
                int(kind[of[0]]), logits[where], draws[of], *(column[of] for column in columns)
            )
        return tokens, logprobs


def _sample(
    kind: int,
    logits: torch.Tensor,
    draws: npt.NDArray[np.float64],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw for rows of one `kind`, and of one `top_k` where they are cut."""
    if kind == GREEDY:
        return greedy(logits)
    device = logits.device
    uniform, warmth = (torch.from_numpy(column).to(device) for column in (draws, temperature))
    if kind == PLAIN:
        return plain(logits, warmth, uniform)
    scaled = logits / warmth[:, None]
    width = int(top_k[0])
    ordered, order = (
        scaled.topk(width) if width < scaled.shape[-1] else scaled.sort(-1, descending=True)
    )
    probabilities = ordered.softmax(-1)
    if min_p.any():
        share = torch.from_numpy(min_p).to(device)[:, None]
        ordered = ordered.masked_fill(probabilities < share * probabilities[:, :1], -torch.inf)
        probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    nucleus = torch.from_numpy(top_p).to(device)[:, None]
    before[:, 0] = -1  # the likeliest token always stays
    ordered = ordered.masked_fill(before >= nucleus, -torch.inf)
    picked, logprobs = _inverse_cdf(ordered, uniform[:, None])
    return order.gather(-1, picked[:, None]).squeeze(-1), logprobs


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row, and its float32 log-prob."""
    logits = logits.float()
    best, tokens = logits.max(-1)
    return tokens, best - logits.logsumexp(-1)


def plain(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row by its float32 `temperature` [n] and float64 `uniform` [n], and its float32 log-prob."""
    return _inverse_cdf(logits / temperature[:, None], uniform[:, None])


def _inverse_cdf(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token whose share of the cumulated probability holds `uniform`; float64, for large vocabularies."""
    probabilities = logits.softmax(-1)
    picked = (find_by_blocks if logits.is_cuda else find)(probabilities, uniform)
    # Logits that are not finite find no place; the caller sees a log-prob that is not finite either.
    picked.clamp_(max=logits.shape[-1] - 1)
    return picked.squeeze(-1), probabilities.gather(-1, picked).squeeze(-1).log()


def find(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64[n, 1]: the first column up to which [n, V] sums to more than the share `uniform` [n, 1] of all."""
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)


def find_by_blocks(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`find`, first the block and then the column in it: a GPU cumulates a long row by one of its many processors."""
    if extra := -probabilities.shape[-1] % BLOCK:
        probabilities = F.pad(probabilities, (0, extra))
    blocks = probabilities.view(len(probabilities), -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    wanted = uniform * ends[:, -1:]
    block = torch.searchsorted(ends, wanted, right=True).clamp_(max=sums.shape[-1] - 1)
    ends, sums = ends.gather(1, block), sums.gather(1, block)
    # Below 1 also where sums in another order round otherwise, so that a token of probability 0 is never found.
    share = ((wanted - ends + sums) / sums).clamp_(0, 1 - 2.0**-52)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK)).squeeze(1)
    return find(inside, share).clamp_(max=BLOCK - 1) + block * BLOCK
