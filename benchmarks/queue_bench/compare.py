"""Rounds of every system in turn, medians, and how many times better ours is than the peer."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import systems
from neighbours import Neighbours
from system import ChildFailed, Pass, System, run
from work import BATCH, EXPERTS, GROUP, SAMPLED_BYTES, SAMPLES, TOKENS, group, payload_bytes, verify

SEED = 0
CALL_GROUPS = max(1, min(64, (16 << 20) // (GROUP * TOKENS * SAMPLED_BYTES)))
"""Groups of one call of ours, unless said: 16 MiB, at most 64."""
WARM_UP = 2 * BATCH // GROUP
"""Groups of the pass that is not counted."""
PEER = "peer"
FLOOR = "floor"
"""gRPC with nothing behind it: what any queue over it costs at least."""
TUNING = ("groups", "in_flight", "admit", "resident_batches")
"""Options of our side."""
Opener = Callable[[Path], AbstractAsyncContextManager[System]]


def main(description: str) -> None:
    run(compare(parse(description)))


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="memory,disk,redis", help="stores of ours (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2, help="counted passes of a system a round")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a pass (%(default)s)")
    parser.add_argument("--tokens", default="512", help="mean of an answer; several: one by one")
    parser.add_argument("--experts", action="store_true", help="384 bytes more for each token")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--floor", action="store_true", help="also the same messages and no queue")
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the stores lie: a real disk, since fsync is measured (%(default)s)",
        default=systems.ROOT / "runs",
    )
    tuning = parser.add_argument_group("tuning of ours")
    tuning.add_argument(
        "--groups", type=int, default=CALL_GROUPS, help="groups of one call (%(default)s)"
    )
    tuning.add_argument("--in-flight", type=int, default=2, help="calls of each client")
    tuning.add_argument("--admit", type=int, default=128, help="tasks of one call")
    tuning.add_argument("--resident-batches", type=int, default=16, help="bound of admission")
    tuning = parser.add_argument_group("tuning of the peer")
    tuning.add_argument("--peer-in-flight", type=int, default=2, help="calls of each client")
    tuning.add_argument(
        "--peer-rows",
        default=f"8,{BATCH}" if BATCH > GROUP else "8",
        help="rows of a producer's put, a system each",
    )
    tuning.add_argument(
        "--peer-annotated-rows",
        type=int,
        default=min(64, BATCH),
        help="of an annotator's, at least",
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


def openers(arguments: argparse.Namespace) -> list[tuple[Opener, dict[str, dict[str, int]]]]:
    """How each system is started, and what is measured on it: names, and the options of their passes."""
    tuning = {name: getattr(arguments, name) for name in TUNING}
    found: list[tuple[Opener, dict[str, dict[str, int]]]] = [
        (partial(systems.ours, store, seed=SEED, tuning=tuning), {store: {}})
        for store in arguments.store.split(",")
        if store
    ]
    if arguments.floor:
        found.append((partial(systems.floor, seed=SEED, tuning=tuning), {FLOOR: {}}))
    if not arguments.no_peer:
        tuning = {
            "in_flight": arguments.peer_in_flight,
            "annotated_rows": arguments.peer_annotated_rows,
            "poll_ms": arguments.peer_poll_ms,
            "units": arguments.peer_units,
        }
        puts = map(int, arguments.peer_rows.split(","))
        names = {f"{PEER}-{rows}": {"rows": rows} for rows in puts}
        found.append((partial(systems.peer, seed=SEED, tuning=tuning), names))
    return found


async def compare(arguments: argparse.Namespace) -> None:
    count = arguments.samples // GROUP
    nbytes = payload_bytes(group(SEED, number) for number in range(count))
    passes: dict[str, list[Pass]] = {}
    neighbours = Neighbours()
    for number in range(arguments.rounds):
        for opener, kinds in openers(arguments):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                async with opener(Path(folder)) as system:
                    for name, order in kinds.items():
                        done = await measured(system, name, order, count, arguments.passes)
                        passes.setdefault(name, []).extend(done)
                        tell(number, name, done, arguments.samples)
    figures = {name: summary(done, arguments.samples, nbytes) for name, done in passes.items()}
    line = json.dumps(
        {
            "benchmark": "queue",
            "samples": arguments.samples,
            "tokens": TOKENS,
            "experts": EXPERTS,
            "payload_bytes": nbytes,
            "rounds": arguments.rounds,
            "tuning": {
                key: value
                for key, value in vars(arguments).items()
                if key in TUNING or key.startswith("peer_")
            },
            "systems": figures,
            "ratios": ratios(figures),
            **neighbours.seen(),
        }
    )
    print(line)
    if arguments.json:
        arguments.json.write_text(line + "\n")


async def measured(
    system: System, name: str, order: dict[str, int], count: int, times: int
) -> list[Pass]:
    """The counted passes; every row of each has to arrive once, whole and as it was made, in whole groups.

    The floor carries bytes, not rows.
    """
    done: list[Pass] = []
    for number in range(times + 1):
        groups = count if number else WARM_UP
        done.append(await system.run(f"{name}-{number}", groups=groups, **order))
        wrong = {} if name == FLOOR else verify(SEED, groups, done[-1].arrived)
        if any(wrong.values()):
            raise ChildFailed(f"{name} delivered something else: {wrong}")
    return done[1:]


def tell(number: int, name: str, passes: Sequence[Pass], samples: int) -> None:
    for done in passes:
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
    shares = {f"{ranks}_ranks": slowest_share(passes, ranks) for ranks in (2, 4, 8)}
    return {
        **({"slowest_rank_share": shares} if passes[0].lengths else {}),
        "samples_per_s": round(rate),
        "samples_per_s_spread": [round(min(rates)), round(max(rates))],
        "mb_per_s": round(rate * nbytes / samples / 1e6, 1),
        "cpu_us_per_sample": cpu_us("server", "clients"),
        "cpu_us_per_sample_by_part": {part: cpu_us(part) for part in passes[0].cpu_s},
        "put_ms": {"p50": quantile(puts, 0.5), "p99": quantile(puts, 0.99)},
        "take_ms": {"p50": quantile(takes, 0.5), "p99": quantile(takes, 0.99)},
        "server_rss_mb": round(max(done.server_rss for done in passes) / 1e6),
    }


def slowest_share(passes: Sequence[Pass], ranks: int) -> float:
    """The payload that the busiest rank fetches, in the worst batch, against the mean: as the trainer deals rows."""
    from meshrl.trainer.model.packing import (
        alone,
        plan,
    )  # brings torch, and the clocks have stopped

    worst = 0.0
    for lengths in (lengths for done in passes for lengths in done.lengths):
        dealt = plan(alone(lengths), ranks=ranks, max_tokens=1 << 30)
        loads = [sum(lengths[row] for row in dealt.rows_of(rank)) for rank in range(ranks)]
        worst = max(worst, max(loads) * ranks / sum(loads))
    return round(worst, 3)


def quantile(values: Sequence[float], part: float) -> float:
    """Nearest rank."""
    return round(sorted(values)[max(0, math.ceil(part * len(values)) - 1)], 2)


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ratios of each of our stores to each peer, to the peer's best in either figure, and to the floor."""
    rated = {
        name: (made["samples_per_s"], made["cpu_us_per_sample"])
        for name, made in figures.items()
        if name.startswith((PEER, FLOOR))
    }
    peers = [made for name, made in rated.items() if name.startswith(PEER)]
    if peers:
        rated[f"{PEER}-best"] = (max(rate for rate, _ in peers), min(cpu for _, cpu in peers))
    return {
        f"{name}/{other}": {
            "samples_per_s": round(made["samples_per_s"] / rate, 2),
            "cpu_per_sample": round(cpu / made["cpu_us_per_sample"], 2),
        }
        for name, made in figures.items()
        if name not in rated
        for other, (rate, cpu) in rated.items()
    }
