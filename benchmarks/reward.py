"""The cost of a score: gsm8k plainly, in our processes, in sandboxes, and verl's own function in a process pool.

    python benchmarks/reward.py [--samples 8000] [--repeats 5] [--seconds 5] [--rows 16000] [--verl DIR]

The first part runs on ONE core: the service and its scoring process are pinned to it together. Systems take
turns; the first round warms up and is not counted; figures are medians. Samples are GSM8K-like, about 300 characters
each, half of them right.

    plain           our function, called
    verl            verl's function, called: the unchanged file verl/utils/reward_score/gsm8k.py of its package
    verl_pool       the same in a ProcessPoolExecutor of one process, one task per sample
    verl_pool_64    the same, 64 samples per task: the most that such a pool can do
    off             our pool, no sandbox      strict   in a sandbox      strict_batch   a batch function in a sandbox

`overhead_us_at_64`: of one score in calls of 64 that follow one another, above the plain call. `hostile`: p99 of an
honest function's calls (8 samples, one after the other) while another, in a sandbox on the same cores, spins in as
many processes as it may have; beside the same without it.

`services` has a queue on disk and a reward service as processes of their own, gRPC and HTTP between them
(`reward_bench/services.py`): seconds from a submission over HTTP to its first score, and rows a minute that are
scored again, of a file and in the queue.

verl's file comes from `pip install --no-deps verl` in .venv-peer-reward (`make bench-reward` sets it up); without it
its part is left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from neighbours import Neighbours
from reward_bench.services import measure

from meshrl.contract.types import Outcome, Sample, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.pool.rule import FunctionSpec, RewardRule
from meshrl.rewardd.pool.signatures import FunctionKind
from meshrl.rewardd.rewards import gsm8k
from meshrl.sandbox.sandbox import Isolation, open_sandbox

PEER = Path(__file__).parents[1] / ".venv-peer-reward"
BATCH = 64
BATCHED = """
from meshrl.rewardd.rewards import gsm8k
CONFIG = gsm8k.Config()
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    triples = zip(data_sources, solution_strs, ground_truths)
    return [gsm8k.compute_score(source, text, truth, None, CONFIG) for source, text, truth in triples]
"""
SINGLE = """
from meshrl.rewardd.rewards import gsm8k
CONFIG = gsm8k.Config()
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return gsm8k.compute_score(data_source, solution_str, ground_truth, None, CONFIG)
"""
HOSTILE = """
import os
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        while True:
            if os.fork() == 0:
                break
    except BlockingIOError:
        pass
    while True:
        pass
"""


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


def judge_of(
    source: str, level: Isolation, kind: FunctionKind = FunctionKind.COMPUTE_SCORE, **limits: Any
) -> PoolJudge:
    """One process of a submitted function."""
    config = RewardConfig.model_validate({"limits": {"deadline_s": 60} | limits})
    spec = FunctionSpec(
        component="compute_score", weight=1, kwargs={}, name="compute_score", digest="0" * 32,
        path="/reward/source.py", source=source, kind=kind,
    )  # fmt: skip
    return PoolJudge(
        RewardRule(functions=(spec,)), config, sandbox=open_sandbox(level, config.limits)
    )


def verl_function(root: Path) -> Any:
    """verl's gsm8k `compute_score`, from the unchanged file of its package; None where it is not installed."""
    module = verl_module(
        next(root.glob("lib/*/site-packages/verl/utils/reward_score/gsm8k.py"), None)
    )
    return None if module is None else module.compute_score


def verl_module(file: Path | None) -> ModuleType | None:
    """The file as a module: importing the package `verl` would want ray and torch."""
    if file is None:
        return None
    spec = importlib.util.spec_from_file_location("verl_gsm8k", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_verl: Any = None


def _load_verl(root: Path) -> None:
    global _verl
    _verl = verl_function(root)


def _call_verl(pairs: Sequence[tuple[str, str]]) -> list[float]:
    return [float(_verl(text, truth)) for text, truth in pairs]


Round = Callable[[Sequence[Sample]], Awaitable[float]]
"""Score all samples; returns the sum of scores."""


async def plain(batch: Sequence[Sample]) -> float:
    config = gsm8k.Config()
    return sum(
        gsm8k.compute_score(s.data_source, s.solution, s.ground_truth, s.extra_info, config)
        for s in batch
    )


async def verl_plain(batch: Sequence[Sample]) -> float:
    return sum(_call_verl([(s.solution, str(s.ground_truth)) for s in batch]))


def verl_pooled(executor: ProcessPoolExecutor, size: int) -> Round:
    async def score(batch: Sequence[Sample]) -> float:
        pairs = [(s.solution, str(s.ground_truth)) for s in batch]
        tasks = [pairs[n : n + size] for n in range(0, len(pairs), size)]
        loop = asyncio.get_running_loop()
        answers = await asyncio.gather(
            *(loop.run_in_executor(executor, _call_verl, task) for task in tasks)
        )
        return sum(map(sum, answers))

    return score


def judged(judge: PoolJudge) -> Round:
    async def score(batch: Sequence[Sample]) -> float:
        calls = [batch[n : n + 4 * BATCH] for n in range(0, len(batch), 4 * BATCH)]
        answers = await asyncio.gather(*(judge.score(call) for call in calls))
        scores = [score for answer in answers for score in answer]
        assert all(score.outcome is Outcome.OK for score in scores), scores[0].reason
        return sum(score.score for score in scores)

    return score


async def rates(
    rounds: dict[str, Round], batch: Sequence[Sample], repeats: int
) -> dict[str, float]:
    """Scores per second of each system, medians of rounds in turn."""
    found: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(repeats + 1):
        for name, score in rounds.items():
            began = time.perf_counter()
            total = await score(batch)
            found[name].append(len(batch) / (time.perf_counter() - began))
            assert total == len(batch) // 2, (name, total)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


async def overhead_us(judge: PoolJudge, batch: Sequence[Sample], plain_us: float) -> float:
    """Microseconds of one score above the plain call, in calls of 64 that follow one another."""
    calls = [batch[n : n + BATCH] for n in range(0, len(batch) - BATCH, BATCH)]
    took: list[float] = []
    for call in calls:
        began = time.perf_counter()
        await judge.score(call)
        took.append((time.perf_counter() - began) / len(call) * 1e6)
    return statistics.median(took[1:]) - plain_us


async def latencies(judge: PoolJudge, batch: Sequence[Sample], seconds: float) -> list[float]:
    """Milliseconds of calls of 8, one after the other."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        answers = await judge.score(batch[:8])
        took.append((time.perf_counter() - began) * 1e3)
        assert all(score.outcome is Outcome.OK for score in answers)
        await asyncio.sleep(0.001)
    return took


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def beside_a_hostile_one(
    batch: Sequence[Sample], seconds: float, repeats: int
) -> dict[str, float]:
    """p99 quiet and beside, in turn; medians."""
    honest = judge_of(SINGLE, Isolation.STRICT)
    quiet, beside = list[float](), list[float]()
    try:
        await honest.start()
        await latencies(honest, batch, 1.0)
        for _ in range(repeats):
            quiet.append(p99(await latencies(honest, batch, seconds)))
            hostile = judge_of(HOSTILE, Isolation.STRICT, processes=8)
            await hostile.start()
            spinning = asyncio.create_task(_score(hostile, batch[:1]))
            await asyncio.sleep(0.5)
            beside.append(p99(await latencies(honest, batch, seconds)))
            spinning.cancel()
            await asyncio.gather(spinning, return_exceptions=True)
            await hostile.close()
    finally:
        await honest.close()
    one, other = statistics.median(quiet), statistics.median(beside)
    return {"quiet_p99_ms": one, "beside_p99_ms": other, "ratio": other / one}


async def _score(judge: PoolJudge, batch: Sequence[Sample]) -> None:
    await judge.score(batch)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=16000)
    parser.add_argument("--verl", type=Path, default=PEER)
    options = parser.parse_args()
    batch, cores = samples(options.samples), os.sched_getaffinity(0)
    neighbours = Neighbours()
    os.sched_setaffinity(0, {max(cores)})
    judges = {
        "off": judge_of(SINGLE, Isolation.OFF),
        "strict": judge_of(SINGLE, Isolation.STRICT),
        "strict_batch": judge_of(BATCHED, Isolation.STRICT, FunctionKind.BATCH),
    }
    executor = ProcessPoolExecutor(1, initializer=_load_verl, initargs=(options.verl,))
    rounds: dict[str, Round] = {"plain": plain}
    _load_verl(options.verl)
    if _verl is not None:
        rounds |= {
            "verl": verl_plain,
            "verl_pool": verl_pooled(executor, 1),
            "verl_pool_64": verl_pooled(executor, BATCH),
        }
    try:
        await asyncio.gather(*(judge.start() for judge in judges.values()))
        rounds |= {name: judged(judge) for name, judge in judges.items()}
        figures = await rates(rounds, batch, options.repeats)
        above = {
            name: round(await overhead_us(judge, batch, 1e6 / figures["plain"]), 1)
            for name, judge in judges.items()
        }
    finally:
        for judge in judges.values():
            await judge.close()
        executor.shutdown()
    for name, rate in figures.items():
        print(f"{name:<14}{rate:>12,.0f} scores/s")
    os.sched_setaffinity(0, cores)
    hostile = await beside_a_hostile_one(batch, options.seconds, min(options.repeats, 3))
    print(f"hostile       {hostile}")
    services = await measure(options.rows, min(options.repeats, 3))
    print(f"services      {services}")
    report = {
        "benchmark": "reward",
        "samples": options.samples,
        "cores": len(cores),
        "scores_per_s_one_core": {name: round(rate) for name, rate in figures.items()},
        "overhead_us_at_64": above,
        "hostile": {name: round(value, 3) for name, value in hostile.items()},
        "services": {name: round(value, 3) for name, value in services.items()},
        **neighbours.seen(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
