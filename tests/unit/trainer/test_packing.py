from __future__ import annotations

import numpy as np
import pytest
import torch

from meshrl.contract.types import Batch, BatchRow, Int32, Outcome, Uid, Version
from meshrl.trainer.learner.experience import schedule
from meshrl.trainer.model.packing import cut_alike, layout_of, pack, plan

LENGTHS = np.random.default_rng(0).integers(2, 300, 101).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_row_is_in_exactly_one_micro_batch(ranks: int) -> None:
    made = plan(LENGTHS, ranks=ranks, max_tokens=512)
    dealt = sorted(row for rank in range(ranks) for row in made.rows_of(rank))
    assert dealt == list(range(len(LENGTHS)))


def test_a_micro_batch_keeps_the_token_budget_unless_one_row_alone_exceeds_it() -> None:
    made = plan([*LENGTHS, 900], ranks=2, max_tokens=512)
    sizes = [*LENGTHS, 900]
    packs = [micro for rank in made.ranks for micro in rank]
    over = [micro for micro in packs if sum(sizes[row] for row in micro) > 512]
    assert over == [(len(LENGTHS),)]


def test_every_rank_runs_as_many_micro_batches() -> None:
    made = plan([500, 10, 10], ranks=3, max_tokens=64)
    assert {len(rank) for rank in made.ranks} == {1}
    assert plan([9], ranks=2, max_tokens=64).ranks == (((0,),), ((),))


def test_ranks_get_nearly_equal_tokens() -> None:
    made = plan(LENGTHS, ranks=4, max_tokens=512)
    loads = [sum(LENGTHS[row] for row in made.rows_of(rank)) for rank in range(4)]
    assert max(loads) - min(loads) <= max(LENGTHS)


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


def test_a_folded_layout_unfolds_to_the_rows_and_back() -> None:
    rows, prompts = siblings()
    made = pack(rows, prompts)
    layout, tokens = made.layout, made.input_ids[0]
    assert layout.unfolded is not None and layout.folded is not None
    assert tokens[layout.unfolded].tolist() == np.concatenate(rows).tolist()
    assert layout.cu_seqlens.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    assert torch.equal(tokens[layout.unfolded][layout.folded], tokens)
    cells = torch.cat([b.gather.reshape(-1)[b.cells] for b in layout.buckets])
    assert cells[layout.order].tolist() == list(range(len(tokens)))


def test_siblings_stay_together_while_they_are_a_small_part_of_a_micro_batch() -> None:
    def micros(tokens: int, ranks: int) -> list[set[int]]:
        sizes = [tokens] * 12
        rows = [
            BatchRow(
                uid=Uid("r", f"t{index % 3}", index // 3), group=f"t{index % 3}", group_size=4,
                num_tokens=size, oldest=Version(1, 0), newest=Version(1, 0), outcome=Outcome.OK,
            )
            for index, size in enumerate(sizes)
        ]  # fmt: skip
        made = schedule(
            Batch.of_rows(rows, batch_id="b", run="r", step=0),
            ranks=ranks, max_tokens=160, mini_batch_groups=None,
        )  # fmt: skip
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
    assert cut_alike(rows, 21) == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]
    assert sorted(cut_alike(rows, 0)) == [(n,) for n in range(9)]
    assert cut_alike([np.zeros(40, np.int32), *rows], 21)[0] == (0,)
    assert cut_alike([], 21) == []
