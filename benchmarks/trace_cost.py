"""What tracing costs: processor time of a row's spans in all services, with `run.trace` at 0, 0.1 and 1, in turns.

    .venv/bin/python benchmarks/trace_cost.py

The last line is JSON: microseconds per row by share, and that in percent of a row's own processor time (`--row-ms`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from meshrl.contract import tracing
from meshrl.contract.types import Uid

SHARES = (0.0, 0.1, 1.0)
ROWS = 1000
ROUNDS = 9


def one_row(number: int) -> None:
    """What the services do with a row of one turn."""
    uid = Uid("demo", f"0-{number // 8}", number % 8)
    with tracing.row_span("rollout", uid, delivery=1), tracing.span("generate", turn=0) as span:
        if span is not None:
            span.attributes |= {"tokens": 33, "versions": "1.4", "finish_reason": "stop"}
    if tracing.is_on():
        for name in ("admit", "write", "reward", "write", "reference", "write", "learn"):
            tracing.record_rows(name, [uid], 1, step=5)


def measured(share: float, first: int) -> float:
    """Microseconds of processor time per row, the writer's thread included."""
    with tempfile.TemporaryDirectory() as folder:
        tracing.start(Path(folder), "service", share)
        began = time.process_time()
        for number in range(first, first + ROWS):
            one_row(number)
        tracing.stop()
        return (time.process_time() - began) / ROWS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row-ms", type=float, default=10.0, help="processor time of a row")
    options = parser.parse_args()
    found: dict[float, list[float]] = {share: [] for share in SHARES}
    for turn in range(ROUNDS):
        for share in SHARES:
            found[share].append(measured(share, turn * ROWS))
    cost = {str(share): round(median(values), 1) for share, values in found.items()}
    percent = {share: round(us / options.row_ms / 10, 3) for share, us in cost.items()}
    print(json.dumps({"us_per_row": cost, "percent_of_a_row": percent, "row_ms": options.row_ms}))


if __name__ == "__main__":
    main()
