"""The fleet: a replica that fails fast, a fleet that grows and shrinks, what asynchrony gains, how fast one joins.

    python benchmarks/fleet.py [--only failing,elastic,modes,learn,join] [--seconds 10] [--check]

The queue, the workers with journal and breaker, the weights' two-phase commit and, in `join`, every service are
the real ones. Engines echo their prompt at a given number of tokens a second and request (`rollout.name:
echo`), as many requests at once as they have slots: what a GPU does below saturation, without one, so that two
cores are enough and what is measured is scheduling. The trainer of `modes` is a sleep around the queue's real
verbs. In `learn` engine and trainer are real, too, of a model so tiny that two cores mostly wait for its tools; it
takes ten minutes. Each part says more in its file under fleet_bench/:

    failing   one of four replicas answers with an error after 1 ms; its share of the prompts, beside least-in-flight
    elastic   tokens while the fleet goes 1, 2, 4, 2, 1, over what so many replicas could make
    modes     trained samples an hour: synchronous, then overlap, streaming and partial rollout added one by one
    learn     the same modes under `meshrl up` with a policy that learns: samples an hour and held-out accuracy
    join      seconds from `meshrl fleet add` to the first trained token, with `meshrl up`

The last line is one JSON object. With --check the exit code is 1 if a part does not reach what the promises say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from fleet_bench import elastic, failing, join, learn, modes

PARTS: dict[str, Callable[[float], Awaitable[dict[str, Any]]]] = {
    "failing": failing.measure,
    "elastic": elastic.measure,
    "modes": modes.measure,
    "learn": lambda seconds: learn.measure(),
    "join": lambda seconds: join.measure(),
}


def show(name: str, report: dict[str, Any]) -> None:
    """For people."""
    if name == "failing":
        for side in ("ours", "least_in_flight"):
            one = report[side]
            print(
                f"{side:>16}: {one['broken_share']:7.2%} of the prompts to the broken replica, "
                f"{one['finished_per_s']:.0f} of {one['possible_per_s']:.0f} finished a second"
            )
    elif name == "elastic":
        by_phase = ", ".join(
            f"{p['replicas']}: {p['share_of_ideal']:.2f}" for p in report["phases"]
        )
        print(f"         elastic: area {report['area']:.3f} of ideal ({by_phase})")
    elif name == "modes":
        for one in report["modes"]:
            print(
                f"{one['mode']:>32}: {one['samples_per_hour']:8,.0f} samples/h, trainer waits "
                f"{one['trainer_waits']:.0%}, staleness {one['mean_staleness']:.1f} (max {one['max_staleness']})"
            )
        print(
            f"fully asynchronous over synchronous: {report['full_over_synchronous']:.2f} on the same split, "
            f"{report['full_over_synchronous_colocated']:.2f} over colocated"
        )
    elif name == "learn":
        print(
            f"fully asynchronous over synchronous: {report['full_over_synchronous']:.2f}, "
            f"accuracy {report['accuracy_difference']:+.3f}"
        )
    else:
        print(
            f"            join: serving after {report['serving_s']:.1f} s, first row {report['first_row_s']:.1f} s, "
            f"trained after {report['trained_s_at_most']:.1f} s at most"
        )


def kept(results: dict[str, Any]) -> bool:
    """Whether the parts that ran keep their promises."""
    failing, elastic = results.get("failing"), results.get("elastic")
    return (failing is None or failing["ours"]["broken_share"] < 0.01) and (
        elastic is None or elastic["area"] > 0.9
    )


def main() -> int:
    """Run the parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="per window that is timed")
    parser.add_argument("--check", action="store_true", help="fail if a promise is broken")
    options = parser.parse_args()
    unknown = sorted(set(options.only.split(",")) - set(PARTS))
    if unknown:
        parser.error(f"no part named {unknown[0]}; there are {', '.join(PARTS)}")
    logging.disable(logging.WARNING)
    results = {}
    for name in options.only.split(","):
        results[name] = asyncio.run(PARTS[name](options.seconds))
        show(name, results[name])
    print(json.dumps(results))
    return 0 if kept(results) or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
