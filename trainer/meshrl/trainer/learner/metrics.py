"""Metrics of a step: of its batch (rewards, lengths, staleness), and sums over micro-batches and ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from meshrl.contract.types import Json, name_fault
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.algorithms.rollout_correction import mismatch_by, mismatch_metrics
from meshrl.trainer.learner.experience import Experience
from meshrl.trainer.ranks.world import World

MOST_SOURCES = 64
"""Data sources with metrics of their own; all others share one name."""
OTHERS = "others"
BY_LABEL = ("kl", "k3_kl", "chi2_token")
"""The mismatch metrics that are reported per policy version and per engine replica."""


def experience_metrics(experience: Experience) -> dict[str, Json]:
    """Rewards and their components, response lengths, staleness as histogram, mean, 95th percentile and maximum."""
    rewards, lengths = experience.rewards, experience.ragged.lengths.float()
    staleness = experience.staleness
    steps, rows = torch.unique(staleness, return_counts=True)
    metrics: dict[str, Json] = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/sampled_share": float(experience.ragged.mask.float().mean())
        if experience.ragged.num_tokens
        else 0.0,
        "staleness/mean": float(staleness.float().mean()),
        "staleness/p95": float(staleness.float().quantile(0.95)),
        "staleness/max": int(staleness.max()),
        "staleness/histogram": dict(zip(map(str, steps.tolist()), rows.tolist(), strict=True)),
    }
    means = component_means(experience.components)
    metrics |= {f"reward_component/{name}": mean for name, mean in means.items()}
    columns = {"reward": rewards.tolist(), "response_length": lengths.tolist()}
    by_source = source_means(experience.data_sources, columns)
    return metrics | {f"source/{name}": mean for name, mean in by_source.items()}


def source_means(
    sources: Sequence[str], columns: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """`<source>/<column>`, the mean of each column over the rows of a source, and `<source>/rows`, their number.

    Rows of no source ("") are left out. `sources` and every column have one value a row.
    """
    known = sorted({name for name in sources if name and not name_fault(name)})[:MOST_SOURCES]
    places: dict[str, list[int]] = {name: [] for name in known}
    for place, name in enumerate(sources):
        if name:
            places.setdefault(name if name in places else OTHERS, []).append(place)
    found: dict[str, float] = {}
    for name, rows in places.items():
        found[f"{name}/rows"] = len(rows)
        for column, values in columns.items():
            found[f"{name}/{column}"] = sum(values[row] for row in rows) / len(rows)
    return found


def component_means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each reward component over the rows that have it, by name."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values)}


def batch_mismatch(
    ragged: Ragged,
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    versions: torch.Tensor,
    replicas: Sequence[str],
) -> dict[str, float]:
    """How far the trainer's log-probs float32[N] are from the rollout's on the same tokens.

    `mismatch_metrics`, and the mean and largest absolute difference; `mismatch/version_<step>/…` the main ones of the
    tokens that each policy step sampled (`versions` int64[N]), where there are several; `mismatch/replica_<name>/…`
    of the rows of each engine (`replicas`, B names; "" is nobody's). Empty when no token was sampled.
    """
    if not bool(ragged.mask.any()):
        return {}
    gap = (trainer - rollout)[ragged.mask].abs()
    metrics = {
        **mismatch_metrics(ragged, trainer, rollout),
        "logprob_abs_mean": float(gap.mean()),
        "logprob_abs_max": float(gap.max()),
    }
    names = sorted(set(replicas))
    places = torch.tensor([names.index(name) for name in replicas])[ragged.rows]
    by_version = mismatch_by(ragged, trainer, rollout, versions)
    by_replica = mismatch_by(ragged, trainer, rollout, places)
    parts = {f"version_{at}": by_version[at] for at in by_version if len(by_version) > 1}
    parts |= {f"replica_{names[at]}": by_replica[at] for at in by_replica if names[at]}
    for label, values in parts.items():
        metrics |= {f"{label}/{name}": values[name] for name in BY_LABEL}
    return {f"mismatch/{name}": value for name, value in metrics.items()}


class MetricSums:
    """Collects metrics of this rank's micro-batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._means: dict[str, list[float]] = {}

    def add_sums(self, values: Mapping[str, float]) -> None:
        """Add values that add up over micro-batches."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def add_means(self, values: Mapping[str, float], tokens: int) -> None:
        """Add means over `tokens` tokens; means over 0 tokens are ignored."""
        for name, value in values.items() if tokens else ():
            total = self._means.setdefault(name, [0.0, 0.0])
            total[0] += value * tokens
            total[1] += tokens

    def over_ranks(self, world: World) -> dict[str, float]:
        """Sums over all ranks, and means over all their tokens. Every rank calls this and gets the same."""
        own = json.dumps([self._sums, self._means]).encode()
        totals: dict[str, list[float]] = {}
        for part in world.gather_shares(np.frombuffer(own, dtype=np.uint8)):
            sums, means = json.loads(part.tobytes())
            for name, value in sums.items():
                total = totals.setdefault(name, [0.0, 1.0])
                total[0] += value
            for name, (value, weight) in means.items():
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += weight
        return {name: value / weight for name, (value, weight) in totals.items()}
