"""Several data sets in one stream: shares, passes, refusals, and figures of each."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from meshrl.contract.errors import UserError
from meshrl.trainer.data.prompt_streams import MixedStream
from meshrl.trainer.data.prompts import Prompt
from meshrl.trainer.learner.metrics import MOST_SOURCES, source_means


def prompts(**sizes: int) -> list[Prompt]:
    """Of each source so many, in files named like them."""
    named = [(name, row) for name, size in sizes.items() for row in range(size)]
    return [
        Prompt(
            index=index, where=f"{name}.jsonl:{row}", data_source=name,
            prompt_ids=np.array([index], np.int32),
        )
        for index, (name, row) in enumerate(named)
    ]  # fmt: skip


def mixture(made: list[Prompt], weights: dict[str, float], *, seed: int = 0) -> MixedStream:
    return MixedStream(made, weights, shuffle=True, seed=seed)


def test_any_stretch_of_the_stream_has_the_shares_whatever_the_sizes_are() -> None:
    made = prompts(small=5, large=95)
    mixed = mixture(made, {"small": 1, "large": 3})
    stream = list(chain.from_iterable(mixed.epoch(epoch) for epoch in range(4)))
    assert len(stream) == 400
    for start in range(0, 400, 20):
        counts = Counter(made[place].data_source for _, place in stream[start : start + 20])
        assert abs(counts["small"] - 5) <= 1


def test_no_prompt_of_a_source_comes_again_before_all_the_others() -> None:
    made = prompts(a=7, b=13)
    mixed = mixture(made, {"a": 2, "b": 1})
    stream = list(chain.from_iterable(mixed.epoch(epoch) for epoch in range(9)))
    assert len(set(stream)) == len(stream)
    of_a = [place for _, place in stream if place < 7]
    passes = [of_a[start : start + 7] for start in range(0, len(of_a) - 6, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    again = mixture(made, {"b": 1, "a": 2})
    assert list(chain.from_iterable(again.epoch(epoch) for epoch in range(9))) == stream
    assert mixture(made, {"a": 2, "b": 1}, seed=1).epoch(0) != mixed.epoch(0)


def test_weights_name_files_or_sources() -> None:
    made = prompts(a=6, b=6)
    mixed = mixture(made, {"./a.jsonl": 1, "b": 2})
    counts = Counter(made[place].data_source for _, place in mixed.epoch(0))
    assert counts == {"a": 4, "b": 8}
    whole = mixture(made, {"a.jsonl": 1, "b.jsonl": 1})
    assert sorted(whole.epoch(0)) == [(0, place) for place in range(12)]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": 1.0}, "b.jsonl:0: data.weights has neither this file nor data_source 'b' .it has a"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "no prompt is of 'c'; want files as in data.train_files"),
        ({"a": 1.0, "b": 0.001}, "'b' weighs so little that an epoch of 20 prompts has none"),
    ],
)
def test_weights_that_do_not_fit_the_rows_are_refused(weights: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        mixture(prompts(a=10, b=10), weights)


def test_figures_are_means_of_each_source() -> None:
    found = source_means(["a", "b", "a", ""], {"reward": [1, 0.5, 0, 9]})
    assert found == {"a/rows": 2, "a/reward": 0.5, "b/rows": 1, "b/reward": 0.5}
    assert source_means(["", ""], {"reward": [1, 2]}) == {}


def test_sources_beyond_the_bound_and_unprintable_ones_share_a_name() -> None:
    names = [f"{number:03d}" for number in range(MOST_SOURCES + 2)] + ["a\nb"]
    found = source_means(names, {})
    assert len(found) == MOST_SOURCES + 1 and found["others/rows"] == 3
