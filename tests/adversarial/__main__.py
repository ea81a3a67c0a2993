"""The attacks on what runs untrusted code: `python -m tests.adversarial` prints what each did; 1 if one got through.

It needs nothing but meshrl, so that an image or a unit can run it where it ships.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshrl.sandbox.sandbox import Isolation
from tests.adversarial import programs, python_tool
from tests.adversarial.attacks import ATTACKS
from tests.adversarial.campaign import faults, honest_faults, run_campaign, why_not

Row = tuple[str, str, str]
"""Target, attack and fault; the fault is empty if the target held, `skipped: …` if this machine cannot show it."""


def functions(level: Isolation, folder: Path, only: str) -> Iterator[Row]:
    """The hostile reward functions in sandboxes of this level."""
    folder.mkdir()
    folder.chmod(0o755)
    if (why := why_not(level, folder)) is not None:
        yield (level, "all", f"skipped: {why}")
        return
    attacks = [a for a in ATTACKS if (a.weak or level is Isolation.STRICT) and only in a.name]
    run = run_campaign(level, attacks, folder)
    for attack in attacks:
        if attack.name in run.skipped:
            yield (level, attack.name, f"skipped: {run.skipped[attack.name]}")
        else:
            yield (level, attack.name, "; ".join(faults(attack, run.ended[attack.name])))
    if attacks and not only:
        yield (level, "the honest function beside them", "; ".join(honest_faults(run)))


def policy_programs(only: str) -> Iterator[Row]:
    """The programs that a policy wrote, scored by the reward `code`."""
    if (why := why_not(Isolation.STRICT, Path())) is not None:
        yield ("code", "all", f"skipped: {why}")
        return
    for name, fault in asyncio.run(programs.run(only)).items():
        yield ("code", name, fault)


def tool_runs(only: str) -> Iterator[Row]:
    """The code that a policy gives to the tool `python`."""
    if (why := why_not(Isolation.STRICT, Path())) is not None:
        yield ("python", "all", f"skipped: {why}")
        return
    for name, fault in asyncio.run(python_tool.run(only)).items():
        yield ("python", name, fault)


def main() -> int:
    """Print a row as it is known; the exit code is 1 if any attack got through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--level", choices=["strict", "weak", "code", "python"], action="append")
    parser.add_argument("--only", default="", help="attacks whose name holds this text")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    levels = options.level or ["strict", "weak", "code", "python"]
    print(f"user {os.geteuid()}, Linux {os.uname().release}, Python {sys.version.split()[0]}")
    broken = shown = 0
    with tempfile.TemporaryDirectory(prefix="meshrl-adversarial-") as name:
        Path(name).chmod(0o755)
        for level in levels:
            if level == "code":
                rows = policy_programs(options.only)
            elif level == "python":
                rows = tool_runs(options.only)
            else:
                rows = functions(Isolation(level), Path(name, level), options.only)
            for what, attack, fault in rows:
                held = not fault or fault.startswith("skipped")
                broken += not held
                shown += not fault
                verdict = "held" if not fault else fault if held else f"FAILED: {fault}"
                print(f"| {what} | {attack} | {verdict} |", flush=True)
    print(f"{shown} held, {broken} failed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
