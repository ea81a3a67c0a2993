from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter

import pytest

from meshrl.rewardd.estimates import (
    ScoredAnswer,
    final_answer,
    ks_of,
    majority_at,
    mean_score,
    pass_at,
)


def answers(finals: str, right: str = "a") -> list[ScoredAnswer]:
    return [ScoredAnswer(score=float(f in right), right=f in right, final=f) for f in finals]


def test_pass_at_k_is_the_share_of_all_sets_of_k_answers_with_a_right_one() -> None:
    tasks = [answers("abcb"), answers("aabc"), answers("bcbc")]
    for k in (1, 2, 3, 4):
        shares = [
            statistics.mean(
                any(a.right for a in chosen) for chosen in itertools.combinations(task, k)
            )
            for task in tasks
        ]
        found = pass_at(tasks, k)
        assert found and found.mean == pytest.approx(statistics.mean(shares))
        assert found.low <= found.mean <= found.high


def test_the_commonest_answer_counts_and_ties_count_by_their_share() -> None:
    for finals, share in (("aab", 1.0), ("abb", 0.0), ("ab", 0.5), ("abc", 1 / 3), ("a", 1.0)):
        found = majority_at([answers(finals)], len(finals))
        assert found and found.mean == pytest.approx(share)
    # All sets of three of aabb: aab twice, abb twice.
    found = majority_at([answers("aabb")], 3)
    assert found and found.mean == pytest.approx(0.5)


@pytest.mark.parametrize("finals", ["aabbc", "aaabbcd", "abcdef", "aaaabbbb", "abbcccdddd", "ba"])
def test_the_vote_of_k_is_the_mean_over_all_sets_of_k(finals: str) -> None:
    task = [
        *answers(finals),
        ScoredAnswer(score=0.0, right=False, final="a"),
    ]  # right once, and once not
    for k in range(1, len(task) + 1):
        shares = []
        for chosen in itertools.combinations(task, k):
            votes = Counter(a.final for a in chosen)
            most = max(votes.values())
            best = [a.right for a in chosen if votes[a.final] == most]
            shares.append(sum(best) / len(best))
        found = majority_at([task], k)
        assert found and found.mean == pytest.approx(statistics.mean(shares))


def test_of_64_answers_pass_and_vote_are_their_formulas() -> None:
    """Probability that the commonest of k among two finals is right, by the hypergeometric distribution."""
    task = answers("a" * 27 + "b" * 37)
    for k in ks_of(64):
        chance = [math.comb(27, n) * math.comb(37, k - n) / math.comb(64, k) for n in range(k + 1)]
        vote = sum(c * (0.5 if 2 * n == k else 2 * n > k) for n, c in enumerate(chance))
        passed, voted = pass_at([task], k), majority_at([task], k)
        assert passed and passed.mean == pytest.approx(1 - chance[0])
        assert voted and voted.mean == pytest.approx(vote)
    assert ks_of(64) == [1, 2, 4, 8, 16, 32, 64]


def test_of_very_many_answers_the_first_ones_vote() -> None:
    task = answers("ab" * 150 + "b")
    for k in (2, 255, 280, 301):
        found = majority_at([task], k)
        assert found and 0.0 <= found.mean <= 0.5


def test_tasks_with_too_few_scored_answers_count_in_no_figure_at_k() -> None:
    tasks = [answers("aa"), answers("b"), []]
    one, two = pass_at(tasks, 1), pass_at(tasks, 2)
    assert one and two and (one.mean, two.mean) == (0.5, 1.0)
    assert pass_at(tasks, 3) is None and mean_score([[]]) is None
    score = mean_score(tasks)
    assert score and score.mean == pytest.approx(2 / 3)


def test_an_interval_narrows_with_tasks_and_holds_the_mean_about_as_often_as_it_says() -> None:
    few = mean_score([answers("ab"), answers("aa"), answers("bb")] * 3)
    many = mean_score([answers("ab"), answers("aa"), answers("bb")] * 100)
    assert few and many and many.high - many.low < (few.high - few.low) / 4
    # 300 tasks of standard deviation sqrt(1/6): ± 1.96 · sqrt(1/6) / sqrt(300) = ± 0.046
    assert (many.low, many.high) == pytest.approx((0.454, 0.546), abs=0.006)
    same = mean_score([answers("a")] * 5)
    assert same and (same.low, same.mean, same.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "final"),
    [
        (r"so \boxed{x = \frac{1}{2}} or 7", r"x = \frac{1}{2}"),
        ("12 + 30\n#### 42 ", "42"),
        ("it is 1,234.5, I think", "1234.5"),
        ("first -3 then -4.", "-4"),
        ("10 - 7 = 5-2", "2"),
        (" yes\n", "yes"),
        ("", ""),
    ],
)
def test_what_an_answer_comes_down_to(text: str, final: str) -> None:
    assert final_answer(text) == final


def test_k_doubles_up_to_the_number_of_answers() -> None:
    assert [ks_of(n) for n in (0, 1, 2, 3, 8)] == [[], [1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]
