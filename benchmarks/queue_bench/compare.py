"""Rounds of every system in turn, medians, and how many times better ours is than the peer."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import systems
from system import ChildFailed, Pass, System
from work import BATCH, GROUP, group, payload_bytes, verify

SEED = 0
WARM_UP = 2 * BATCH // GROUP
"""Groups of the pass that is not counted."""
Opener = Callable[[Path], AbstractAsyncContextManager[System]]


def main(description: str) -> None:
    arguments = parse(description)
    try:
        asyncio.run(compare(arguments))
    except ChildFailed as error:
        sys.exit(f"error: {error}")


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="memory,disk,redis", help="stores of ours (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2, help="counted passes of ours a round")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the stores lie: a real disk, since fsync is measured (%(default)s)",
        default=systems.ROOT / "runs",
    )
    tuning = parser.add_argument_group("tuning of ours")
    tuning.add_argument("--groups", type=int, default=16, help="groups of one call (%(default)s)")
    tuning.add_argument("--in-flight", type=int, default=2, help="calls of each client")
    tuning.add_argument("--admit", type=int, default=64, help="tasks of one call")
    tuning.add_argument("--resident-batches", type=int, default=8, help="bound of admission")
    tuning.add_argument("--shards", type=int, default=1, help="queue processes (%(default)s)")
    tuning = parser.add_argument_group("tuning of the peer")
    tuning.add_argument("--peer-in-flight", type=int, default=2, help="calls of each client")
    tuning.add_argument(
        "--peer-rows", default="8,256", help="rows of a producer's put, a system each"
    )
    tuning.add_argument(
        "--peer-annotated-rows", type=int, default=64, help="of an annotator's, at least"
    )
    tuning.add_argument("--peer-poll-ms", type=float, default=10.0, help="between two questions")
    tuning.add_argument("--peer-units", type=int, default=2, help="storage units")
    arguments = parser.parse_args()
    if arguments.samples % BATCH:
        parser.error(f"--samples {arguments.samples} is no multiple of the batch, {BATCH}")
    if not arguments.no_peer and not systems.PEER_PYTHON.exists():
        parser.error("the peer is not installed: run `make venv-peer-queue`, or give --no-peer")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    return arguments


def openers(arguments: argparse.Namespace) -> dict[str, Opener]:
    """Who takes part, by name."""
    tuning = {
        "groups": arguments.groups,
        "in_flight": arguments.in_flight,
        "admit": arguments.admit,
        "resident_batches": arguments.resident_batches,
        "shards": arguments.shards,
    }
    found: dict[str, Opener] = {
        store: partial(systems.ours, store, seed=SEED, tuning=tuning)
        for store in arguments.store.split(",")
        if store
    }
    if not arguments.no_peer:
        tuning = {
            "in_flight": arguments.peer_in_flight,
            "annotated_rows": arguments.peer_annotated_rows,
            "poll_ms": arguments.peer_poll_ms,
            "units": arguments.peer_units,
        }
        for rows in map(int, arguments.peer_rows.split(",")):
            found[f"peer-{rows}"] = partial(systems.peer, rows, seed=SEED, tuning=tuning)
    return found


async def compare(arguments: argparse.Namespace) -> None:
    count = arguments.samples // GROUP
    nbytes = payload_bytes(group(SEED, number) for number in range(count))
    kinds = openers(arguments)
    passes: dict[str, list[Pass]] = {name: [] for name in kinds}
    for number in range(arguments.rounds):
        for name, opener in kinds.items():
            times = 1 if name.startswith("peer") else arguments.passes
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                async with opener(Path(folder)) as system:
                    check(name, await system.run("warm-up", WARM_UP), WARM_UP)
                    for again in range(times):
                        done = await system.run(f"pass-{again}", count)
                        check(name, done, count)
                        passes[name].append(done)
                        tell(number, name, done, arguments.samples)
    figures = {name: summary(done, arguments.samples, nbytes) for name, done in passes.items()}
    line = json.dumps(
        {
            "benchmark": "queue",
            "samples": arguments.samples,
            "payload_bytes": nbytes,
            "rounds": arguments.rounds,
            "tuning": {
                key: value
                for key, value in vars(arguments).items()
                if key in ("groups", "in_flight", "admit", "resident_batches", "shards")
                or key.startswith("peer_")
            },
            "systems": figures,
            "ratios": ratios(figures),
        }
    )
    print(line)
    if arguments.json:
        arguments.json.write_text(line + "\n")


def check(name: str, done: Pass, groups: int) -> None:
    """Every row came once, whole and as it was made, in whole groups; nothing is measured otherwise."""
    wrong = verify(SEED, groups, done.arrived)
    if any(wrong.values()):
        raise ChildFailed(f"{name} delivered something else: {wrong}")


def tell(number: int, name: str, done: Pass, samples: int) -> None:
    print(
        f"{number}: {name} {samples / done.wall_s:,.0f} samples/s, "
        f"{1e6 * (done.cpu_s['server'] + done.cpu_s['clients']) / samples:,.0f} us CPU a sample",
        flush=True,
    )


def summary(passes: Sequence[Pass], samples: int, nbytes: int) -> dict[str, Any]:
    """Medians over the passes; latencies over all calls of all passes."""
    rates = [samples / done.wall_s for done in passes]
    rate = statistics.median(rates)

    def cpu_us(*parts: str) -> float:
        spent = [sum(done.cpu_s[part] for part in parts) for done in passes]
        return round(1e6 * statistics.median(spent) / samples, 1)

    puts = [ms for done in passes for ms in done.put_ms]
    takes = [ms for done in passes for ms in done.take_ms]
    return {
        "samples_per_s": round(rate),
        "samples_per_s_spread": [round(min(rates)), round(max(rates))],
        "mb_per_s": round(rate * nbytes / samples / 1e6, 1),
        "cpu_us_per_sample": cpu_us("server", "clients"),
        "cpu_us_per_sample_by_part": {part: cpu_us(part) for part in passes[0].cpu_s},
        "put_ms": {"p50": quantile(puts, 0.5), "p99": quantile(puts, 0.99)},
        "take_ms": {"p50": quantile(takes, 0.5), "p99": quantile(takes, 0.99)},
        "server_rss_mb": round(max(done.server_rss for done in passes) / 1e6),
    }


def quantile(values: Sequence[float], part: float) -> float:
    """Nearest rank."""
    return round(sorted(values)[max(0, math.ceil(part * len(values)) - 1)], 2)


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each of our stores to each peer, and to the peer's best in either figure."""
    peers = {name: made for name, made in figures.items() if name.startswith("peer")}
    if not peers:
        return {}
    rated = {
        name: (made["samples_per_s"], made["cpu_us_per_sample"]) for name, made in peers.items()
    }
    rated["peer-best"] = (
        max(rate for rate, _ in rated.values()),
        min(cpu for _, cpu in rated.values()),
    )
    return {
        f"{name}/{other}": {
            "samples_per_s": round(made["samples_per_s"] / rate, 1),
            "cpu_per_sample": round(cpu / made["cpu_us_per_sample"], 1),
        }
        for name, made in figures.items()
        if name not in peers
        for other, (rate, cpu) in rated.items()
    }
