"""`python -m tests.doubles.parity DIR`: a line per family and the totals; exit code 1 on a failure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshrl.contract.errors import UserError
from tests.doubles.parity.cases import load
from tests.doubles.parity.compare import Verdict, judge, summary


def main(arguments: list[str]) -> int:
    """Judge every case of a directory; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.doubles.parity", description=__doc__)
    parser.add_argument("directory", type=Path, help="holds index*.json and golden*.npz")
    directory = parser.parse_args(arguments).directory
    try:
        verdicts = [judge(case) for case in load(directory)]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(summary(verdicts)))
    return int(any(v.verdict is Verdict.FAILED for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
