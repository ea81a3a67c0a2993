"""Draws follow the distribution that the log-probs are of, whatever runs beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshrl.rollout.engines.torch.sampler import (
    OFF,
    SamplingRows,
    find,
    find_by_blocks,
    row_key,
    uniforms,
)

VOCABULARY = 12
ROWS = 40_000


def filled(temperature: float, top_k: int = VOCABULARY, top_p: float = OFF) -> SamplingRows:
    rows = SamplingRows(ROWS)
    rows.temperature[:] = temperature
    rows.top_k[:] = top_k
    rows.top_p[:] = top_p
    rows.key[:] = [row_key(0, str(index)) for index in range(ROWS)]
    return rows


LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, VOCABULARY, OFF), (0.7, 5, OFF), (1.5, VOCABULARY, 0.8)],
)
def test_frequencies_are_the_probabilities_that_the_logprobs_claim(
    temperature: float, top_k: int, top_p: float
) -> None:
    rows = filled(temperature, top_k, top_p)
    tokens, logprobs = rows.sample(
        LOGITS.expand(ROWS, -1), slice(None), np.zeros(ROWS, dtype=np.int64)
    )
    claimed = torch.zeros(VOCABULARY).index_put((tokens,), logprobs.exp())
    assert float(claimed.sum()) == pytest.approx(1.0, abs=2e-3)  # every kept token was drawn
    frequencies = torch.bincount(tokens, minlength=VOCABULARY) / ROWS
    # Five standard deviations of a frequency.
    bound = 5 * (claimed * (1 - claimed) / ROWS).sqrt() + 1e-6
    assert ((frequencies - claimed).abs() <= bound).all()


def test_a_row_is_drawn_alike_alone_and_beside_rows_of_every_kind() -> None:
    rows = SamplingRows(6)
    rows.temperature[:] = [1.0, 0.0, 0.8, 1.0, 1.2, 0.0]
    rows.top_k[:] = [VOCABULARY, VOCABULARY, 3, VOCABULARY, 7, 2]
    rows.top_p[:] = [OFF, OFF, OFF, 0.6, 0.9, 0.5]
    rows.key[:] = [row_key(1, str(index)) for index in range(6)]
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1)).round()  # ties
    positions = np.arange(6)
    tokens, logprobs = rows.sample(logits, slice(None), positions)
    for index in range(6):
        one = slice(index, index + 1)
        token, logprob = rows.sample(logits[one], one, positions[one])
        assert token.item() == tokens[index]
        assert logprob.item() == logprobs[index]


def test_uniforms_are_uniform_over_keys_and_over_positions() -> None:
    keys = np.array([row_key(0, str(i)) for i in range(10_000)], dtype=np.uint64)
    over_keys = uniforms(keys, np.zeros(10_000, dtype=np.int64))
    over_positions = uniforms(np.full(10_000, keys[0]), np.arange(10_000))
    for draws in (over_keys, over_positions):
        assert (draws >= 0).all()
        assert (draws < 1).all()
        counts = np.histogram(draws, bins=20, range=(0, 1))[0]
        assert abs(counts - 500).max() < 5 * np.sqrt(500)


def test_a_tiny_nucleus_still_keeps_the_likeliest_token() -> None:
    rows = filled(1.0, VOCABULARY, 1e-6)
    tokens, logprobs = rows.sample(
        LOGITS.expand(ROWS, -1), slice(None), np.zeros(ROWS, dtype=np.int64)
    )
    assert (tokens == LOGITS.argmax()).all()
    assert (logprobs == 0).all()


@pytest.mark.parametrize("size", [1, 100, 128, 1000])
def test_a_token_found_by_blocks_is_the_one_found_at_once(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    probabilities = (torch.randn(500, size, generator=draw) * 4).softmax(-1)
    probabilities[:, 1::3] = 0  # also at the ends of blocks
    probabilities[:250, -200 if size > 200 else -1 :] = 0
    probabilities[:, 0] += 1e-3
    edges = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64).repeat(50)
    uniform = torch.cat([torch.rand(400, generator=draw, dtype=torch.float64), edges])[:, None]
    found = find_by_blocks(probabilities, uniform)
    assert found.equal(find(probabilities, uniform))
    assert (probabilities.gather(1, found) > 0).all()


def test_logits_that_are_not_finite_are_found_within_the_vocabulary() -> None:
    probabilities = torch.full((2, 200), torch.nan)
    found = find_by_blocks(probabilities, torch.full((2, 1), 0.5, dtype=torch.float64))
    assert ((found >= 0) & (found < 256)).all()
