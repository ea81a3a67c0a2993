"""Scores per second of the gsm8k reward: through the pool of scoring processes, against a plain call in this process.

    python benchmarks/reward.py [--samples 20000] [--repeats 5] [--workers 1 2]

The pool carries every sample as JSON over a pipe to another process and its score back; the plain call is
the floor that no isolation can beat. Samples are GSM8K-like, about 300 characters each, half of them right.
The first round of each measurement warms up and is not counted. The last line is one JSON object: medians of
scores per second, and what isolation costs a sample in microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence

from meshrl.contract.nouns import Outcome, Sample, Uid
from meshrl.rewardd.config import RewardConfig, RewardFunctionConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.rewards import gsm8k

CALL = 256
"""Samples of one call of the judge, as a stage that holds a batch would send."""


def samples(count: int) -> list[Sample]:
    """Half of the answers are right."""
    thought = "She has 16 eggs, eats 3 and bakes with 4, so 9 are left at $2 each. "
    return [
        Sample(
            uid=Uid("bench", str(index), 0),
            data_source="openai/gsm8k",
            solution=f"{thought * 4}\n#### {index if index % 2 else index + 1}",
            ground_truth=str(index),
            extra_info={"index": index, "split": "train"},
        )
        for index in range(count)
    ]


def plain(batch: Sequence[Sample]) -> float:
    """Scores per second of calling the function."""
    config = gsm8k.Config()
    began = time.perf_counter()
    total = sum(
        gsm8k.compute_score(s.data_source, s.solution, s.ground_truth, s.extra_info, config)
        for s in batch
    )
    seconds = time.perf_counter() - began
    assert total == len(batch) // 2
    return len(batch) / seconds


async def pooled(batch: Sequence[Sample], workers: int, repeats: int) -> list[float]:
    """Scores per second through `workers` processes, one figure per round."""
    config = RewardConfig(functions=[RewardFunctionConfig(name="gsm8k")], workers=workers)
    judge = build_judge(config)
    calls = [batch[start : start + CALL] for start in range(0, len(batch), CALL)]
    rates: list[float] = []
    try:
        await judge.start()
        for _ in range(repeats + 1):
            began = time.perf_counter()
            answers = await asyncio.gather(*(judge.score(call) for call in calls))
            seconds = time.perf_counter() - began
            scores = [score for answer in answers for score in answer]
            assert all(score.outcome is Outcome.OK for score in scores)
            assert sum(score.score for score in scores) == len(batch) // 2
            rates.append(len(batch) / seconds)
    finally:
        await judge.close()
    return rates[1:]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    batch = samples(options.samples)
    floor = [plain(batch) for _ in range(options.repeats + 1)][1:]
    figures: dict[str, float] = {"plain": round(statistics.median(floor))}
    print(f"plain call      {figures['plain']:>10,.0f} scores/s")
    for workers in options.workers:
        rates = await pooled(batch, workers, options.repeats)
        figures[f"pool_{workers}"] = round(statistics.median(rates))
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"pool, {workers} process {statistics.median(rates):>10,.0f} scores/s ({spread})")
    cost = 1e6 / figures[f"pool_{options.workers[0]}"] - 1e6 / figures["plain"]
    report = {
        "benchmark": "reward",
        "samples": options.samples,
        "cores": os.cpu_count(),
        "scores_per_s": figures,
        "isolation_us": round(cost, 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
