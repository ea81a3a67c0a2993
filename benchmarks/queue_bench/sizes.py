"""The comparison for each size of rows: processes of their own, which know the size from their environment."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def of_each(description: str) -> None:
    """Run `compare.main`, once for each of `--tokens`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tokens", default="")
    parser.add_argument("--experts", action="store_true")
    asked, _ = parser.parse_known_args()
    if (not asked.tokens and not asked.experts) or "QUEUE_BENCH_TOKENS" in os.environ:
        from compare import main

        main(description)
        return
    for tokens in (asked.tokens or "512").split(","):
        size = {"QUEUE_BENCH_TOKENS": tokens} | (
            {"QUEUE_BENCH_EXPERTS": "1"} if asked.experts else {}
        )
        done = subprocess.run([sys.executable, *sys.argv], env={**os.environ, **size})
        if done.returncode:
            sys.exit(done.returncode)
