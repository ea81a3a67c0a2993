"""What scores of several answers to each task say: means, pass@k, majority@k, each with a 95 % interval.

Intervals are bootstrapped over tasks (percentiles of 2,000 seeded draws), because answers to one task are not
independent of each other. Tasks with fewer than k scored answers count in no figure at k.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshrl.rewardd.rewards._latex import last_boxed

DRAWS = 2000
SUBSETS = 50
"""Sets of k answers that stand for all of a task's, where there are more."""
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
    """What it comes down to: see `final_answer`."""


def final_answer(text: str) -> str:
    r"""What majority voting compares: the last `\boxed{}`, else what follows the last `####`, else the last number.

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
    """Over all scored answers; None where there is none."""
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
    """How often the commonest final answer of k is right; of several equally common ones the mean counts."""
    values = [_vote(task, k) for task in tasks if len(task) >= k]
    return _estimate(values, [1] * len(values))


def ks_of(answers: int) -> list[int]:
    """1, 2, 4, … below the number of answers to a task, and that number."""
    powers = itertools.takewhile(lambda k: k < answers, (1 << n for n in itertools.count()))
    return [*powers, answers] if answers else []


def _vote(task: Sequence[ScoredAnswer], k: int) -> float:
    if math.comb(len(task), k) <= SUBSETS:
        subsets = [list(subset) for subset in itertools.combinations(task, k)]
    else:
        draw = np.random.default_rng(0)
        places = (draw.choice(len(task), k, replace=False) for _ in range(SUBSETS))
        subsets = [[task[at] for at in chosen] for chosen in places]
    return sum(map(_winner, subsets)) / len(subsets)


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
