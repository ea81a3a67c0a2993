from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from meshrl.contract.types import Batch, Int32, Uid
from meshrl.trainer.learner.experience import MiniBatch, Schedule, schedule
from meshrl.trainer.learner.micro_batcher import MicroBatcher
from meshrl.trainer.model.packing import (
    Pack,
    PackSize,
    alone,
    cut,
    cut_alike,
    layout_of,
    pack,
    pair_sizes,
    plan,
)
from meshrl.trainer.ranks.world import World

from . import tiny
from .rank_work import batch_of, manifest_row

LENGTHS = np.random.default_rng(0).integers(2, 300, 101).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_row_is_in_exactly_one_micro_batch(ranks: int) -> None:
    made = plan(alone(LENGTHS), ranks=ranks, max_tokens=512)
    dealt = sorted(row for rank in range(ranks) for row in made.rows_of(rank))
    assert dealt == list(range(len(LENGTHS)))


def test_a_micro_batch_keeps_the_token_budget_unless_one_row_alone_exceeds_it() -> None:
    made = plan(alone([*LENGTHS, 900]), ranks=2, max_tokens=512)
    sizes = [*LENGTHS, 900]
    packs = [micro for rank in made.ranks for micro in rank]
    over = [micro for micro in packs if sum(sizes[row] for row in micro) > 512]
    assert over == [(len(LENGTHS),)]


def test_every_rank_runs_as_many_micro_batches() -> None:
    made = plan(alone([500, 10, 10]), ranks=3, max_tokens=64)
    assert {len(rank) for rank in made.ranks} == {1}
    assert plan(alone([9]), ranks=2, max_tokens=64).ranks == (((0,),), ((),))


def test_a_pack_points_at_the_hidden_state_before_each_response_token() -> None:
    rows = [np.array([5, 6, 7, 8], np.int32), np.array([9, 10, 11], np.int32)]
    made = pack(rows, [2, 1])
    assert made.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11]]
    assert made.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert made.targets.tolist() == [7, 8, 10, 11]
    assert made.positions.tolist() == [1, 2, 4, 5]


def test_a_row_without_response_has_no_targets() -> None:
    made = pack([np.array([5, 6], np.int32), np.array([1, 2, 3], np.int32)], [2, 2])
    assert made.targets.tolist() == [3]


def test_an_empty_pack_is_one_token_and_no_target() -> None:
    made = pack([], [])
    assert made.input_ids.shape == (1, 1)
    assert len(made.targets) == 0


def test_the_buckets_of_a_layout_cover_every_token_once() -> None:
    layout = layout_of(LENGTHS)
    cells = torch.cat([b.gather.reshape(-1)[b.cells] for b in layout.buckets])
    assert cells[layout.order].tolist() == list(range(sum(LENGTHS)))


def test_rectangles_waste_at_most_an_eighth_beyond_the_shortest_bucket() -> None:
    for bucket in layout_of(LENGTHS).buckets:
        shortest = len(bucket.cells) / bucket.gather.shape[0]
        assert bucket.gather.shape[1] <= max(16, 1.125 * shortest + 1)


def siblings() -> tuple[list[Int32], list[int]]:
    """Two groups with prompts that begin alike, a row twice, one that is another's beginning, a stranger."""
    texts = ["aaab1", "aaab23", "aaab23", "aaac44", "aaac4", "zz", "aaab1777"]
    return [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts], [4] * 5 + [1, 4]


def test_what_rows_begin_with_alike_is_laid_once() -> None:
    rows, prompts = siblings()
    made, apart = pack(rows, prompts), pack(rows, prompts, share_prefixes=False)
    trie = {row[:n].tobytes() for row in rows for n in range(1, len(row) + 1)}
    assert made.input_ids.shape == (1, len(trie))
    assert made.targets.tolist() == apart.targets.tolist()
    # A target is predicted at a place that has the token before it, at its position.
    assert torch.equal(made.input_ids[0, made.positions], apart.input_ids[0, apart.positions])
    assert torch.equal(made.position_ids[0, made.positions], apart.position_ids[0, apart.positions])


def test_each_token_of_a_pack_is_a_query_once_and_a_key_of_each_row_that_has_it() -> None:
    rows, prompts = siblings()
    made = pack(rows, prompts)
    layout, tokens = made.layout, made.input_ids[0]
    assert layout.keys is not None
    queries, keys = layout.rows.cu_queries.tolist(), layout.rows.cu_keys.tolist()
    assert (queries[-1], keys[-1]) == (len(tokens), len(layout.keys))
    assert tokens[layout.places].tolist() == np.concatenate(rows).tolist()
    found = []
    for number, (begin, end) in enumerate(itertools.pairwise(keys)):
        own = slice(queries[number], queries[number + 1])
        of_row = tokens[layout.keys[begin:end]]
        assert torch.equal(of_row[own.start - own.stop :], tokens[own])
        found.append(of_row.tolist())
    assert sorted(found) == sorted({tuple(row.tolist()): row.tolist() for row in rows}.values())
    cells = torch.cat([b.gather[:, b.start :].reshape(-1)[b.cells] for b in layout.buckets])
    assert cells[layout.order].tolist() == list(range(len(tokens)))


def test_siblings_stay_together_while_they_are_a_small_part_of_a_micro_batch() -> None:
    def micros(tokens: int, ranks: int) -> list[set[int]]:
        rows = [manifest_row(Uid("r", f"t{n % 3}", n // 3), 4, tokens) for n in range(12)]
        made = schedule(batch_of(rows), ranks=ranks, max_tokens=160, mini_batch_groups=None)
        (mini,) = made.mini_batches
        dealt = [row for rank in mini.ranks for micro in rank for row in micro]
        assert sorted(dealt) == list(range(12))
        return [{row // 4 for row in micro} for rank in mini.ranks for micro in rank]

    assert sorted(map(sorted, micros(10, 1))) == [[0, 1, 2]]
    assert all(len(groups) <= 2 for groups in micros(20, 1))  # two rows stay together
    assert len(micros(100, 1)) == 12  # too large to share a pack at all


def test_packs_cut_alike_keep_rows_that_begin_alike_together() -> None:
    prompts = [np.full(6, token, dtype=np.int32) for token in (1, 2, 3)]
    rows = [np.append(prompts[n % 3], np.int32(n)).astype(np.int32) for n in range(9)]
    assert cut_alike(rows, 11) == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]  # 9 tokens laid, of 21
    assert sorted(cut_alike(rows, 0)) == [(n,) for n in range(9)]
    assert cut_alike([np.zeros(40, np.int32), *rows], 11)[0] == (0,)
    assert cut_alike([], 21) == []


GROUPS, SIZE = 32, 8


def batch(seed: int) -> Batch:
    """Prompts of 256 tokens, responses lognormal with a mean of 512 and at most 4,096."""
    draws = np.random.default_rng(seed)
    lengths = np.minimum(4096, draws.lognormal(np.log(512) - 0.32, 0.8, (GROUPS, SIZE))).astype(int)
    return batch_of(
        [
            manifest_row(Uid("r", f"t{group:02}", index), SIZE, 256 + int(lengths[group, index]))
            for group in range(GROUPS)
            for index in range(SIZE)
        ]
    )


def planned(seed: int, ranks: int, mini: int | None, *, whole: bool = False) -> Schedule:
    return schedule(
        batch(seed), ranks=ranks, max_tokens=8192, mini_batch_groups=mini, whole_groups=whole
    )


def tokens(made: Schedule, rank: int) -> int:
    return sum(made.rows[row].num_tokens for row in made.own(rank))


@pytest.mark.parametrize("mini", [None, 16, 8])
@pytest.mark.parametrize(("ranks", "whole"), [(2, False), (4, False), (8, False), (4, True)])
def test_no_rank_moves_more_than_a_tenth_above_the_mean(
    ranks: int, whole: bool, mini: int | None
) -> None:
    for seed in range(20):
        made = planned(seed, ranks, mini, whole=whole)
        shares = [tokens(made, rank) for rank in range(ranks)]
        assert max(shares) <= 1.1 * sum(shares) / ranks


def test_what_one_mini_batch_leaves_uneven_the_next_makes_up_for() -> None:
    """Eight groups on eight ranks: within a mini-batch each rank has one, whatever its size."""
    made = planned(0, 8, 8, whole=True)
    for mini in made.mini_batches:
        assert {len([row for micro in rank for row in micro]) for rank in mini.ranks} == {SIZE}
    together = max(tokens(made, rank) for rank in range(8)) - min(
        tokens(made, rank) for rank in range(8)
    )
    apart = sum(_spread(made, number) for number in range(len(made.mini_batches)))
    assert together < apart / 2


def _spread(made: Schedule, number: int) -> int:
    sizes = [
        sum(made.rows[row].num_tokens for micro in rank for row in micro)
        for rank in made.mini_batches[number].ranks
    ]
    return max(sizes) - min(sizes)


def test_the_next_pack_is_laid_out_while_the_device_computes_this_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        index: SimpleNamespace(tokens=tokens, prompt_length=2, ref_top_ids=None)
        for index, tokens in enumerate(tiny.rows(3))
    }
    mini = MiniBatch(rows=(0, 1, 2), ranks=(((0,), (1,), (2,)),))
    schedule = SimpleNamespace(mini_batches=(mini,))
    batcher = MicroBatcher(*cast(Any, (schedule, rows, world)))
    events: list[str] = []
    lay = MicroBatcher.pack

    def laid(self: MicroBatcher, chosen: Sequence[int]) -> Pack:
        events.append(f"pack {chosen[0]}")
        return lay(self, chosen)

    def forward(pack: Pack) -> tuple[torch.Tensor, ...]:
        events.append("forward")
        return (torch.zeros(len(pack.targets)),)

    monkeypatch.setattr(MicroBatcher, "pack", laid)
    for chosen, _ in batcher.micro_batches(mini, torch.nn.Identity(), forward):
        events.append(f"backward {chosen[0]}")
    ahead = ["pack 0", "forward", "pack 1", "backward 0", "forward", "pack 2", "backward 1"]
    assert events == [*ahead, "forward", "backward 2"]


@pytest.mark.parametrize("most", [2, 5])
def test_packs_lay_as_many_tokens_as_the_budget_says_and_bound_those_of_their_rows(
    most: int,
) -> None:
    draws = np.random.default_rng(1)
    rows, groups, prompts = [], [], []
    for number, length in enumerate((5, 40, 90, 200)):
        prompt = draws.integers(0, 1000, length).astype(np.int32)
        for answer in draws.integers(1, 60, 8):
            end = draws.integers(1000, 2000, answer).astype(np.int32)
            rows.append(np.concatenate([prompt, end]))
            groups.append(str(number))
            prompts.append(length)
    sizes = [
        PackSize(len(row), len(row) - prompt, group, prompt)
        for row, group, prompt in zip(rows, groups, prompts, strict=True)
    ]
    for budget in (256, 512, 1024):
        packs = cut(sizes, budget, most)
        for chosen in packs:
            made = pack([rows[row] for row in chosen], [prompts[row] for row in chosen])
            tokens = sum(len(rows[row]) for row in chosen)
            assert made.input_ids.shape[1] <= budget or len(chosen) == 1
            assert tokens <= most * budget or len(chosen) == 1
        assert sorted(row for chosen in packs for row in chosen) == list(range(len(rows)))
        assert len(packs) < len(cut(alone([len(row) for row in rows]), budget))


def test_a_batch_whose_prompts_are_shared_needs_fewer_micro_batches_on_any_number_of_ranks() -> (
    None
):
    rows = [manifest_row(Uid("r", f"t{n % 8}", n // 8), 8, 200, prompt=100) for n in range(64)]
    for ranks in (1, 2, 4):
        micros, laid = {}, {}
        for share in (True, False):
            made = schedule(
                batch_of(rows),
                ranks=ranks,
                max_tokens=1000,
                mini_batch_groups=None,
                share_prompts=share,
            )
            (mini,) = made.mini_batches
            dealt = [[{row // 8 for row in micro} for micro in rank] for rank in mini.ranks]
            micros[share] = sum(map(len, dealt))
            laid[share] = [
                sum(
                    100 * len(micro) + 100 * len(groups)
                    for micro, groups in zip(*both, strict=True)
                )
                for both in zip(mini.ranks, dealt, strict=True)
            ]
            assert sorted(row for rank in mini.ranks for micro in rank for row in micro) == [
                *range(64)
            ]
        assert micros[True] < micros[False]
        assert max(laid[True]) <= 1.25 * sum(laid[True]) / ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_answers_to_a_long_prompt_stay_on_a_rank(ranks: int) -> None:
    lengths = np.random.default_rng(0).exponential(100, 128).astype(int) + 801
    rows = [
        manifest_row(Uid("r", f"t{n // 8}", n % 8), 8, length, prompt=800)
        for n, length in enumerate(lengths.tolist())
    ]
    made = schedule(batch_of(rows), ranks=ranks, max_tokens=1600, mini_batch_groups=None)
    (mini,) = made.mini_batches
    laid = [
        sum(made.rows[row].num_tokens - 800 for micro in rank for row in micro)
        + sum(800 * len({made.rows[row].group for row in micro}) for micro in rank)
        for rank in mini.ranks
    ]
    assert sum(laid) <= 1.5 * (int(lengths.sum()) - 800 * (128 - 16))
    assert max(laid) <= 1.1 * sum(laid) / ranks


def test_a_pair_lays_what_both_begin_with_once() -> None:
    one, other = np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 5], np.int32)
    assert pair_sizes([(one, other)]) == [PackSize(7, 3, "0", 2)]
    assert pair_sizes([(one, other)])[0].laid == pack([one, other], [2, 2]).input_ids.shape[1]
