"""How many simulated trainings fit into an hour of one core? The meshes that seeds draw, and a small one.

    python benchmarks/simulate.py [--seeds 50] [--rounds 3]

*drawn* is what `make simulate` runs: up to four workers, four trainer ranks, four queue processes and six agents.
*small* is two workers, one queue process and one rank, with faults drawn for them. Both run in forks that collect no
garbage; *collected* is *drawn* in one process that collects after each run, as campaigns did before. The three take
turns; each figure is the median of the rounds, in processor time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ of the checkout

from tests.simulation.campaign import campaign
from tests.simulation.mesh import simulate
from tests.simulation.shape import Shape
from tests.simulation.virtual_loop import quiet


def forked(run: Callable[..., object], seeds: Iterator[int]) -> float:
    """Runs an hour of a campaign. Raises RuntimeError if a seed fails."""
    totals = campaign(seeds, told=lambda _: None, run=run)  # type: ignore[arg-type]
    if totals.failed:
        raise RuntimeError(f"seeds {totals.failed} failed")
    return totals.per_hour


def collected(seeds: Iterator[int]) -> float:
    """Runs an hour in this process."""
    gc.collect()
    gc.freeze()
    began, runs = time.process_time(), 0
    for seed in seeds:
        simulate(seed)
        with quiet():
            gc.collect()
        gc.freeze()
        runs += 1
    gc.unfreeze()
    return 3600 * runs / (time.process_time() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=50, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    ways: dict[str, Callable[[Iterator[int]], float]] = {
        "drawn": partial(forked, simulate),
        "small": partial(forked, partial(simulate, shape=Shape())),
        "collected": collected,
    }
    collected(iter(range(2)))  # imports and caches
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number, (name, way) in itertools.product(range(options.rounds), ways.items()):
        first = number * options.seeds
        found[name].append(way(iter(range(first, first + options.seeds))))
        print(f"{name:>9}: {found[name][-1]:6,.0f} runs/h", flush=True)
    ratios = [now / then for now, then in zip(found["drawn"], found["collected"], strict=True)]
    print(json.dumps({n: round(median(f)) for n, f in found.items()} | {"ratio": median(ratios)}))


if __name__ == "__main__":
    main()
