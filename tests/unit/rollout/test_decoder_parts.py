"""The decoder's operations say what torch's own say; the cache keeps what rows hold and takes what they need."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshrl.rollout.engines.torch.forward import KvCache
from meshrl.rollout.engines.torch.operations import RmsNorm, attend

HEADS, SIZE = 2, 4
BYTES_PER_TOKEN = 2 * HEADS * SIZE * 4


def cache_of(
    max_rows: int = 8, tokens: int = 8 * 256, heads: int = HEADS, *, steady: bool = False
) -> KvCache:
    return KvCache(
        shape=(1, heads, SIZE),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=max_rows,
        max_bytes=tokens * BYTES_PER_TOKEN,
        steady=steady,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(5, 3, 8, dtype=dtype)[:, :2] * 1e-3  # so small that eps matters
    weight = torch.rand(2, 8, dtype=dtype)
    want = F.rms_norm(values, (8,), None, 1e-6)
    torch.testing.assert_close(RmsNorm(weight, 1e-6)(values), want * weight)
    torch.testing.assert_close(RmsNorm(weight[0], 1e-6)(values), want * weight[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_is_that_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    queries = torch.randn(3, 6, SIZE, dtype=dtype)
    keys, values = torch.randn(2, 3, HEADS, 10, SIZE, dtype=dtype)
    mask = torch.zeros(3, 10, dtype=dtype)
    mask[1, 4:] = -torch.inf
    want = F.scaled_dot_product_attention(
        queries[:, :, None], keys, values, attn_mask=mask[:, None, None], enable_gqa=True
    )
    per_head = mask.repeat_interleave(HEADS, 0)[:, None]
    got = attend(queries, keys, values, per_head)
    torch.testing.assert_close(got, want.reshape(3, -1))


def test_rows_keep_what_they_hold_while_the_cache_grows_and_shrinks() -> None:
    cache = cache_of()
    cache.reserve(2, 30, kept=0)
    assert (cache.rows, cache.length) == (2, 32)
    held = torch.rand(2, 2, HEADS, 32, SIZE)
    cache.layers[0][:] = held
    cache.reserve(3, 200, kept=2)
    assert (cache.rows, cache.length) == (4, 224)
    assert cache.layers[0][:, :2, :, :32].equal(held)
    assert not cache.layers[0][:, :, :, 32:].any()
    cache.reserve(3, 170, kept=3)  # not a quarter less
    assert cache.length == 224
    cache.reserve(2, 32, kept=2)
    assert cache.length == 32
    assert cache.layers[0][:, :2].equal(held)


def test_an_idle_cache_starts_with_the_same_length_whatever_ran_before() -> None:
    fresh, used = cache_of(), cache_of()
    used.reserve(8, 60, kept=0)
    for cache in (fresh, used):
        cache.reserve(4, 40, kept=0)
        assert cache.length == 64
        cache.reserve(4, 32, kept=0)
        assert cache.length == 32


def test_the_cache_takes_no_more_rows_than_its_bytes_allow() -> None:
    cache = cache_of(max_rows=8, tokens=6 * 32)
    cache.reserve(5, 32, kept=0)
    assert cache.rows == 5  # eight would be too many
    cache.reserve(3, 64, kept=3)
    assert (cache.rows, cache.length) == (3, 64)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_places_are_where_a_row_stores_its_next_keys_and_values(heads: int) -> None:
    cache = cache_of(heads=heads)
    cache.reserve(4, 32, kept=0)
    positions = torch.tensor([5, 0, 31])
    stored = torch.rand(3, 2 * heads, SIZE)
    cache.layers[0].view(-1, SIZE)[cache.places(positions)] = stored.view(-1, SIZE)
    for row, position in enumerate(positions.tolist()):
        keys, values = cache.layers[0][:, row, :, position]
        assert keys.equal(stored[row, :heads])
        assert values.equal(stored[row, heads:])


def test_a_steady_cache_moves_seldom_and_fits() -> None:
    cache = cache_of(max_rows=8, tokens=8 * 512, steady=True)
    moved = []
    for length in range(1, 513):
        cache.reserve(3, length, kept=0 if length == 1 else 3)
        if cache.reshaped > len(moved):
            moved.append((cache.rows, cache.length))
    assert moved == [(4, 256), (4, 512)]
    cache.reserve(2, 32, kept=0)  # idle: what ran before is held
    assert (cache.rows, cache.length, cache.reshaped) == (4, 512, 2)
    cache.reserve(5, 400, kept=2)
    assert (cache.rows, cache.length) == (8, 512)
    cache.reserve(3, 1300, kept=3)  # neither as many rows nor a power of two
    assert (cache.rows, cache.length) == (3, 1312)
    cache.reserve(8, 300, kept=1)
    assert (cache.rows, cache.length) == (8, 320)


def test_a_steady_cache_keeps_what_rows_hold() -> None:
    cache = cache_of(steady=True)
    cache.reserve(2, 30, kept=0)
    held = torch.rand(2, 2, HEADS, 30, SIZE)
    cache.layers[0][:, :2, :, :30] = held
    for rows, length in ((3, 200), (3, 300), (8, 40)):
        cache.reserve(rows, length, kept=2)
        assert cache.layers[0][:, :2, :, :30].equal(held)
