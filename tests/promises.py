"""Runs every line of the table of promises with fresh seeds, and ends in one table.

    make promises                        # all of them, one after the other (about half an hour)
    make promises ONLY=chaos             # those whose command has this word
    make promises WRITE=1                # also renews the last column of docs/reference/promises.md

That page is the list: each row names a promise and the command that shows it. `SEED=1` and `--seed 1` in a command
become a fresh seed, which the table shows, so that a broken promise can be repeated. Ctrl-C ends the command that
runs and prints what is known by then.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "promises.md"
HEADS = "| promise | command | last run |"
LONGEST_S = 3600.0
"""A command that runs longer counts as broken: it waits for ever."""
STEP_S = 0.5
TAIL = 200
"""Most characters of a command's last line that the table shows."""


@dataclass(frozen=True)
class Promise:
    """One row of the table."""

    says: str
    command: str


@dataclass(frozen=True)
class Shown:
    """One command's result for its promise."""

    promise: Promise
    command: str
    """As it was run, with its seed."""
    held: bool
    seconds: float
    last_line: str
    when: str
    """The day and the commit."""

    @property
    def last_run(self) -> str:
        """The cell of the page's last column."""
        return f"{'yes' if self.held else '**no**'}, {self.seconds:.0f} s, {self.when}"

    @property
    def row(self) -> str:
        """The row of the table that is printed."""
        said = self.last_line.replace("|", "\\|").replace("`", "'")
        return f"| {self.promise.says} | `{self.command}` | {self.last_run} | `{said}` |"


def promises(page: str) -> list[Promise]:
    """The rows of the page's table.

    Raises:
        ValueError: a row names no command.
    """
    rows = page.partition(HEADS)[2].strip().partition("\n\n")[0].splitlines()
    found = []
    for says, shows, _ in (row.strip("|").split("|") for row in rows[1:]):
        command = re.search(r"`([^`]+)`", shows)
        if command is None:
            raise ValueError(f"the page names no command for this promise: {says.strip()}")
        found.append(Promise(says.strip(), command[1]))
    return found


def seeded(command: str, seed: int) -> str:
    """The command with `seed` where it names one."""
    return re.sub(r"(SEED=|--seed )\d+", rf"\g<1>{seed}", command)


def last_line(output: IO[str]) -> str:
    """The last line that is not blank, cut to TAIL characters."""
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    return lines[-1][-TAIL:] if lines else ""


def show(promise: Promise, seed: int, when: str) -> Shown:
    """Run the promise's command, with one line of progress on a terminal."""
    command, begin = seeded(promise.command, seed), time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ("bash", "-c", command),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() - begin < LONGEST_S:
                if sys.stderr.isatty():
                    print(
                        f"\r{time.monotonic() - begin:5.0f} s  {command}", end="", file=sys.stderr
                    )
                time.sleep(STEP_S)
        finally:
            _end(process)
        said = last_line(output)
    held = process.returncode == 0
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    return Shown(promise, command, held, time.monotonic() - begin, said, when)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, with all that it started: first kindly, then by force."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            continue


def today_and_commit() -> str:
    """The day in UTC and the short commit, as pages with results show them."""
    commit = subprocess.check_output(("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, text=True)
    return f"{datetime.now(UTC).date().isoformat()}, {commit.strip()}"


def renewed(page: str, shown: Iterable[Shown]) -> str:
    """The page with the last column of the promises that were run."""
    last_runs = {each.promise: each.last_run for each in shown}
    for promise, last_run in last_runs.items():
        row = f"| {promise.says} | `{promise.command}` |"
        page = re.sub(rf"^({re.escape(row)}) .* \|$", rf"\1 {last_run} |", page, flags=re.MULTILINE)
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="run the promises whose command has this word")
    parser.add_argument("--write", action="store_true", help=f"renew {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    promised = promises(PAGE.read_text())
    chosen = [each for each in promised if options.only in each.command]
    if not chosen:
        print(f"no promise has {options.only!r} in its command", file=sys.stderr)
        return 2
    when = today_and_commit()
    shown: list[Shown] = []
    try:
        for promise in chosen:
            shown.append(result := show(promise, secrets.randbelow(2**31), when))
            held = "held" if result.held else "BROKEN"
            print(f"{held:6} {result.seconds:6.0f} s  {result.command}", flush=True)
    except KeyboardInterrupt:
        print(f"ended after {len(shown)} of {len(chosen)}", file=sys.stderr)
    print("\n| promise | command | held | last line |", "|---|---|---|---|", sep="\n")
    print("\n".join(each.row for each in shown))
    if options.write:
        PAGE.write_text(renewed(PAGE.read_text(), shown))
    return 0 if len(shown) == len(chosen) and all(each.held for each in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
