"""Estimates from scores of several answers to each task: means, pass@k, majority@k, with 95 % intervals.

Intervals are bootstrapped over tasks (percentiles of 2,000 seeded draws), because answers to one task are not
independent of each other. Tasks with fewer than k scored answers count in no figure at k.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshrl.rewardd.rewards._answers import last_boxed

DRAWS = 2000
MOST_VOTES = 256
"""Answers to a task of which every set of k votes; the first ones stand for more."""
_NUMBER = re.compile(r"(?<!\d)[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One answer to a task."""

    score: float
    right: bool
    final: str
    """The final answer in it; see `final_answer`."""


def final_answer(text: str) -> str:
    r"""Answer for majority voting: the last `\boxed{}`, else the text after the last `####`, else the last number.

    Else the whole text without the space around it.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    _, mark, rest = text.rpartition("####")
    if mark:
        return rest.strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else text.strip()


def mean_score(tasks: Sequence[Sequence[ScoredAnswer]]) -> Estimate | None:
    """The mean over all scored answers; None without any."""
    scored = [task for task in tasks if task]
    return _estimate([sum(a.score for a in task) for task in scored], [len(t) for t in scored])


def pass_at(tasks: Sequence[Sequence[ScoredAnswer]], k: int) -> Estimate | None:
    """How likely one of k answers is right: 1 - C(n-c, k) / C(n, k) of n answers, c of them right.

    Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1.
    """
    enough = [task for task in tasks if len(task) >= k]
    values = [
        1.0 - math.comb(len(task) - sum(a.right for a in task), k) / math.comb(len(task), k)
        for task in enough
    ]
    return _estimate(values, [1] * len(values))


def majority_at(tasks: Sequence[Sequence[ScoredAnswer]], k: int) -> Estimate | None:
    """How often the commonest final answer of k is right, over all sets of k; ties count by their share."""
    values = [_vote(task, k) for task in tasks if len(task) >= k]
    return _estimate(values, [1] * len(values))


def ks_of(answers: int) -> list[int]:
    """1, 2, 4, … below the number of answers to a task, and that number."""
    powers = itertools.takewhile(lambda k: k < answers, (1 << n for n in itertools.count()))
    return [*powers, answers] if answers else []


def _vote(task: Sequence[ScoredAnswer], k: int) -> float:
    if k == len(task) or k > MOST_VOTES:
        return _winner(task[:k])
    finals: dict[str, list[bool]] = {}
    for answer in task[:MOST_VOTES]:
        finals.setdefault(answer.final, []).append(answer.right)
    return _votes(tuple(sorted((len(right), sum(right)) for right in finals.values())))[k]


@functools.lru_cache(maxsize=4096)
def _votes(finals: tuple[tuple[int, int], ...]) -> tuple[float, ...]:
    """Rightness of the commonest final answer of k, for each k: the mean over all sets of k.

    `finals` says of each final answer how many answers have it, and how many of these are right. The sets in which
    the commonest has m votes are counted final by final: in `ways[t, x]` of the sets of x answers t finals have m
    votes and no other has more; `right[t, x]` is the sum over these of the right shares of those t.
    """
    total = sum(size for size, _ in finals)
    found = np.zeros(total + 1)
    for m in range(1, finals[-1][0] + 1):
        ways = np.zeros((total // m + 2, total + 1))
        ways[0, 0] = 1.0
        right = np.zeros_like(ways)
        for size, good in finals:
            more, more_right = np.zeros_like(ways), np.zeros_like(ways)
            for votes in range(min(size, m) + 1):
                times, tie = float(math.comb(size, votes)), int(votes == m)
                before = (slice(None, len(ways) - tie), slice(None, total + 1 - votes))
                after = (slice(tie, None), slice(votes, None))
                more[after] += times * ways[before]
                more_right[after] += times * (right[before] + tie * good / size * ways[before])
            ways, right = more, more_right
        found += (right[1:] / np.arange(1, len(right))[:, None]).sum(axis=0)
    return tuple(found[k] / math.comb(total, k) for k in range(total + 1))


def _winner(answers: Sequence[ScoredAnswer]) -> float:
    """How right the commonest final answer is."""
    votes: dict[str, list[bool]] = {}
    for answer in answers:
        votes.setdefault(answer.final, []).append(answer.right)
    most = max(map(len, votes.values()))
    shares = [sum(right) / most for right in votes.values() if len(right) == most]
    return sum(shares) / len(shares)


def _estimate(sums: Sequence[float], counts: Sequence[int]) -> Estimate | None:
    """The ratio of the totals, and how it varies over draws of as many tasks."""
    if not sums:
        return None
    total, number, draw = np.array(sums), np.array(counts), np.random.default_rng(0)
    ratios = []
    for _ in range(DRAWS):
        chosen = draw.integers(0, len(total), len(total))
        ratios.append(total[chosen].sum() / number[chosen].sum())
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Estimate(mean=float(total.sum() / number.sum()), low=float(low), high=float(high))
