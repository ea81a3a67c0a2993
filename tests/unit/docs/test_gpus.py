"""No page claims more of GPUs than has been run, and the tables of placement are what the command prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SPEAKS = re.compile(r"\bGPUs?\b|\bCUDA\b|\bNCCL\b")
SAYS = re.compile(
    r"not run|not been run|not tried|none has run|no gpu|without a gpu", re.IGNORECASE
)
CLAIMS_NOTHING = {
    "docs/README.md",  # links
    "docs/how-to/coming-from.md",  # keys of others
    "docs/how-to/resume.md",  # a key that may change
    "docs/how-to/fleet.md",  # an error in an example
    "docs/reference/ports.md",  # where NCCL listens
    "services/meshrl/launcher/README.md",  # what a preloader must not touch
    "services/meshrl/planning/README.md",  # a link
    "services/meshrl/testing/README.md",  # what stands in for GPUs
}
ROOMS = ("docs", "recipes", "benchmarks", "trainer", "rollout", "services", "deploy")
PAGES = [
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *(p for room in ROOMS for p in (ROOT / room).rglob("*.md"))]
    if SPEAKS.search(page.read_text())
]


def test_a_page_that_speaks_of_gpus_says_what_was_not_run_on_one() -> None:
    silent = {page for page in PAGES if not SAYS.search((ROOT / page).read_text())}
    assert silent == CLAIMS_NOTHING


def shown() -> list[tuple[str, str]]:
    """Each command of the section, and the table below it."""
    page = (ROOT / "docs/how-to/gpus.md").read_text()
    section = page.split("## One GPU, two, eight, two machines")[1].split("## ")[0]
    parts = section.split("```")[1].split("$ meshrl ")[1:]
    return [(command, table.strip()) for command, _, table in (p.partition("\n") for p in parts)]


@pytest.mark.parametrize(("command", "table"), shown(), ids=["1", "2", "8", "2 x 8"])
def test_the_tables_of_placement_are_what_is_printed(command: str, table: str) -> None:
    words = re.split(r" (?![^{]*})", command)
    done = subprocess.run(
        [sys.executable, "-m", "meshrl.cli", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert table in done.stdout
