"""The sparse codec: exact on every pair of buckets, small on likely ones, and a clear error for everything else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Uint8
from meshrl.weights.delta import (
    Head,
    PatchKind,
    add_codes,
    apply,
    codes_of,
    compress,
    encode,
    encode_sparse,
    gaps_of,
    head,
    indices_of,
    join,
    ordered,
    planes,
    unordered,
    whole,
)

ALL = np.arange(1 << 16, dtype="<u2")


def bucket(values: object) -> Uint8:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def weights(count: int, seed: int = 0) -> Uint8:
    """bfloat16 words of a normal distribution."""
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")
    return bucket((values.view("<u4") >> 16).astype("<u2"))


def stepped(base: Uint8, density: float, seed: int = 1) -> Uint8:
    """Some words moved by one ULP up or down."""
    random = np.random.default_rng(seed)
    new = base.copy()
    words = new.view("<u2")
    moved = random.random(len(words)) < density
    words[moved] += random.choice(np.array([1, 0xFFFF], dtype="<u2"), int(moved.sum()))
    return new


def check(base: Uint8, new: Uint8, word_bytes: int = 2) -> bytes:
    """Both ways of applying give the very bytes; the base is left alone by the first."""
    before = base.copy()
    patch = encode(base, new, word_bytes=word_bytes)
    assert np.array_equal(apply(base, patch), new)
    assert np.array_equal(base, before)
    in_place = base.copy()
    assert apply(in_place, patch, in_place) is in_place
    assert np.array_equal(in_place, new)
    return patch


def test_ranks_are_in_the_order_of_the_floats_and_a_bijection_of_all_words() -> None:
    ranks = ordered(ALL)
    assert len(np.unique(ranks)) == 1 << 16
    assert np.array_equal(unordered(ranks), ALL)
    halves = ALL.view("<f2").astype(np.float64)
    order = np.argsort(ranks)
    values = halves[order][~np.isnan(halves[order])]
    assert np.all(np.diff(values) >= 0)
    assert ordered(np.array([0x8000, 0], dtype="<u2")).tolist() == [-1, 0]


@pytest.mark.parametrize("shift", [1, 2, 127, 128, 129, 0x7FFF, 0x8000, 0xFFFF])
def test_every_word_survives_every_kind_of_step(shift: int) -> None:
    new = np.roll(ALL, shift)
    codes, escapes = codes_of(ALL, new)
    assert np.array_equal(add_codes(ALL, codes, escapes), new)
    check(bucket(ALL), bucket(new))


def test_every_word_becomes_every_other_one_through_negative_zero_and_nan() -> None:
    for special in (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x0001):
        others = ALL[special != ALL]
        same = np.full_like(others, special)
        check(bucket(others), bucket(same))
        check(bucket(same), bucket(others))


def test_a_step_of_one_ulp_is_the_code_one_or_two_across_zero_and_exponents() -> None:
    old = np.array([0x3F80, 0x3F7F, 0xBF80, 0x0000, 0x8000], dtype="<u2")
    new = np.array([0x3F81, 0x3F80, 0xBF81, 0x8000, 0x0000], dtype="<u2")
    codes, escapes = codes_of(old, new)
    assert codes.tolist() == [2, 2, 1, 1, 2]
    assert not escapes.size


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_two_buckets_of_a_size_are_bridged(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 300))
    base = data.draw(hnp.arrays(np.uint8, size))
    new = data.draw(st.one_of(hnp.arrays(np.uint8, size), st.just(base)))
    check(base, new, data.draw(st.sampled_from([2, 4])))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 40_000),
    density=st.floats(0, 1),
    seed=st.integers(0, 1000),
    word_bytes=st.sampled_from([2, 4]),
)
def test_sparse_and_dense_changes_are_bridged(
    size: int, density: float, seed: int, word_bytes: int
) -> None:
    base = weights(size, seed)
    check(base, stepped(base, density, seed), word_bytes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=200), st.integers(0, 5))
def test_gaps_give_the_indices_back(gaps: list[int], split: int) -> None:
    at = np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1
    split = min(split, len(at))
    first = gaps_of(at[:split], -1)
    second = gaps_of(at[split:], int(at[split - 1]) if split else -1)
    words = int(at[-1]) + 1 if len(at) else 0
    found = list(indices_of(np.concatenate([first, second]), words))
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *found]), at)
    if len(at):
        with pytest.raises(CorruptError, match=f"word {at[-1]} of a bucket of {words - 1} words"):
            list(indices_of(np.concatenate([first, second]), words - 1))


def test_pieces_join_seamlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.weights.delta._PIECE", 64)
    monkeypatch.setattr("meshrl.weights.delta._GAPS_PIECE", 7)
    for count in (1, 31, 32, 33, 500, 2003):
        base = weights(count)
        for density in (0.01, 0.3, 1.0):
            for word_bytes in (2, 4):
                check(base, stepped(base, density), word_bytes)


def test_each_form_is_chosen_where_it_is_smallest() -> None:
    base = weights(1 << 18)
    noise = np.random.default_rng(0).integers(0, 256, base.nbytes, dtype=np.uint8)
    kinds = [head(check(base, stepped(base, density))).kind for density in (0.01, 0.3)]
    assert kinds == [PatchKind.GAPS, PatchKind.GAPS]
    assert head(check(base, noise)).kind is PatchKind.WHOLE
    assert len(check(base, base)) < 100


def test_one_percent_of_the_words_costs_less_than_three_quarters_of_a_percent() -> None:
    base = weights(1 << 20)
    patch = check(base, stepped(base, 0.01))
    assert len(patch) < 0.0075 * base.nbytes
    assert head(patch).changed == pytest.approx(0.01 * (1 << 20), rel=0.05)


def test_a_bucket_that_changed_too_much_is_given_up() -> None:
    base = weights(1 << 20)
    new = stepped(base, 0.2)
    assert encode_sparse(base, new, max_density=0.15) is None
    assert encode_sparse(base, new, max_density=0.25) is not None


def test_a_whole_bucket_needs_no_base() -> None:
    new = weights(1001)
    assert np.array_equal(apply(None, whole(new)), new)
    assert np.array_equal(apply(weights(1001, 5), whole(new)), new)
    zeros = np.zeros(1 << 20, dtype=np.uint8)
    assert len(whole(zeros)) < 200


def test_read_only_memory_is_read() -> None:
    base = weights(1000)
    new = stepped(base, 0.1)
    base.flags.writeable = new.flags.writeable = False
    check(base, new)


PATCHES = {
    PatchKind.GAPS: encode(weights(4000), stepped(weights(4000), 0.02)),
    PatchKind.WHOLE: whole(weights(4000)),
}


@pytest.mark.parametrize("kind", PATCHES)
def test_a_spoiled_patch_is_corrupt_or_harmless_and_writes_nowhere_else(kind: PatchKind) -> None:
    patch, random = PATCHES[kind], np.random.default_rng(kind)
    assert head(patch).kind is kind
    base = weights(4000)
    memory = np.full(8000 + 2 * 4096, 7, dtype=np.uint8)
    into = memory[4096:-4096]
    refused = 0
    for trial in range(600):
        spoiled = bytearray(patch)
        if trial % 3 == 0:
            del spoiled[int(random.integers(len(spoiled))) :]
        elif trial % 3 == 1:
            spoiled[int(random.integers(min(len(spoiled), 64)))] = int(random.integers(256))
        else:
            for paths in random.integers(len(spoiled), size=3):
                spoiled[paths] ^= int(random.integers(1, 256))
        try:
            apply(base, bytes(spoiled), into)
        except CorruptError as error:
            refused += 1
            assert "\n" not in str(error)
        assert np.all(memory[:4096] == 7)
        assert np.all(memory[-4096:] == 7)
    assert refused > 200


def made(kind: PatchKind, nbytes: int, changed: int, *parts: object) -> bytes:
    """A patch with a sound container and whatever planes."""
    planes = [compress(np.array(part, dtype=np.uint8)) for part in parts]
    return join(Head(kind, 2, nbytes, changed), planes)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (b"", "not even a head"),
        (b"x" * 100, "not with a head"),
        (made(PatchKind.GAPS, 20, 11), "11 changed words in 20 bytes"),
        (made(PatchKind.GAPS, 20, 1, [9], [1], []), "cut short"),
        (made(PatchKind.GAPS, 20, 1, [9], [1], [], []) + b"x", "1 bytes too long"),
        (made(PatchKind.GAPS, 20, 1, [10], [1], [], []), "word 10 of a bucket of 10 words"),
        (made(PatchKind.GAPS, 20, 2, [1], [1, 1], [], []), "1 indices for 2 changed words"),
        (made(PatchKind.GAPS, 20, 2, [1, 1], [1], [], []), "1 codes for 2 changed words"),
        (made(PatchKind.GAPS, 20, 1, [1, 1], [1], [], []), "a plane of 2 bytes"),
        (made(PatchKind.GAPS, 20, 1, [1], [0], [], []), "more escapes than values"),
        (made(PatchKind.GAPS, 20, 1, [1], [1], [5, 5], []), "1 indices for 1 changed words"),
        (made(PatchKind.GAPS, 21, 0, [], [], [], []), "0 codes for 0 changed words"),
        (made(PatchKind.GAPS, 600, 1, [1, 1], [1], [], []), "more indices than codes"),
        (made(PatchKind.WHOLE, 20, 0, [1] * 19), "19 bytes for a bucket of 20"),
        (made(PatchKind.WHOLE, 1 << 60, 0, [1]), "for a bucket of 1152921504606846976 bytes"),
    ],
)
def test_a_patch_that_is_inconsistent_gives_an_error_of_one_line(
    patch: bytes, message: str
) -> None:
    size = int.from_bytes(patch[8:16], "little")
    size = size if size in (21, 600) else 20
    with pytest.raises(CorruptError, match=message):
        apply(np.zeros(size, dtype=np.uint8), patch)


def test_a_patch_for_another_base_size_or_without_a_base_is_refused() -> None:
    patch = made(PatchKind.GAPS, 20, 1, [9], [1], [], [])
    with pytest.raises(CorruptError, match="for a bucket of 20 bytes; base has 22"):
        apply(np.zeros(22, dtype=np.uint8), patch)
    with pytest.raises(CorruptError, match="into has 18"):
        apply(np.zeros(20, dtype=np.uint8), patch, np.zeros(18, dtype=np.uint8))
    with pytest.raises(CorruptError, match="needs a base"):
        apply(None, patch)
    with pytest.raises(ValueError, match="a base of 4 bytes for a bucket of 6"):
        encode(np.zeros(4, dtype=np.uint8), np.zeros(6, dtype=np.uint8))


def test_a_frame_that_claims_more_than_its_plane_takes_no_memory() -> None:
    large = compress(np.zeros(1 << 20, dtype=np.uint8))
    lying = (1 << 10).to_bytes(8, "little") + large[8:]
    about = join(Head(PatchKind.WHOLE, 2, 1 << 10, 0), [lying])
    with pytest.raises(CorruptError, match="another size than the stated 1024 bytes"):
        planes(about, [1 << 10])
