"""`benchmarks/gpu/day.sh`: parts that fail stop none of the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$1" in
  *machine.py) echo "no driver"; exit 3 ;;
  *nccl_channels.py) echo '{"benchmark": "nccl"}' ;;
  *trainer_mfu.py) echo '{"benchmark": "a"}'; echo between; echo '{"benchmark": "b"}' ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


def day(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    names = {"PYTHON": str(python), "REAL_PYTHON": sys.executable, "DAY": str(tmp_path / "day")}
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu/day.sh"), *arguments],
        env={**os.environ, **names}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_every_part_ends_in_one_line_of_json_and_one_that_fails_stops_none(tmp_path: Path) -> None:
    done = day(tmp_path, "--rehearse", "--parts", "nccl,machine,mfu")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(part["part"], part["ok"], part["code"], part["result"]) for part in found] == [
        ("machine", False, 3, "no driver"),
        ("mfu", True, 0, [{"benchmark": "a"}, {"benchmark": "b"}]),
        ("nccl", True, 0, {"benchmark": "nccl"}),
    ]


def test_a_part_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = day(tmp_path, "--parts", "machine,ncll")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no part ncll (there are install machine mesh_nccl" in done.stderr
