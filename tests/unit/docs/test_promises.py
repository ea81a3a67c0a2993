"""`make promises` runs what the table of promises says, with fresh seeds, and tells what broke."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ... import promises
from ...promises import Promise, Shown

PAGE = promises.PAGE.read_text()


def test_each_promise_names_a_command_whose_files_exist() -> None:
    found = promises.promises(PAGE)
    assert len(found) > 10
    targets = (promises.ROOT / "Makefile").read_text()
    for each in found:
        for path in re.findall(r"(?:tests|benchmarks)/\S+", each.command):
            assert (promises.ROOT / path).exists(), each
        for module in re.findall(r"-m (tests\.\S+)", each.command):
            place = promises.ROOT.joinpath(*module.split("."))
            assert place.is_dir() or place.with_suffix(".py").is_file(), each
        for target in re.findall(r"^make (\S+)", each.command):
            assert re.search(rf"^{target}:", targets, re.MULTILINE), each


def test_a_row_without_a_command_is_refused() -> None:
    text = f"{promises.HEADS}\n|---|---|---|\n| it is fast | believe us | yes |\n"
    with pytest.raises(ValueError, match="it is fast"):
        promises.promises(text)


def test_a_fresh_seed_replaces_the_one_of_the_page() -> None:
    assert promises.seeded("make chaos SEED=1 KILLS=200", 77) == "make chaos SEED=77 KILLS=200"
    assert promises.seeded("python -m a --seed 1", 77) == "python -m a --seed 77"
    assert promises.seeded("make parity", 77) == "make parity"


def test_a_command_that_fails_is_a_broken_promise_with_its_last_line() -> None:
    held = promises.show(Promise("it holds", "echo fine; echo SEED=1"), 7, "today, abc")
    broken = promises.show(Promise("it breaks", "echo 'lost | 3'; exit 1"), 7, "today, abc")
    assert (held.held, held.last_line) == (True, "SEED=7")
    assert not broken.held
    assert held.row.startswith("| it holds | `echo fine; echo SEED=7` | yes, ")
    assert "**no**, " in broken.row and "lost \\| 3" in broken.row


def ran(promise: Promise, when: str, *, held: bool) -> Shown:
    return Shown(promise, promise.command, held, 2.0, "done", when)


def test_what_was_run_renews_the_last_column_of_its_row() -> None:
    page = f"{promises.HEADS}\n|---|---|---|\n| a | `true` | never |\n| b (1 + 1) | `false` | never |\n\nMore.\n"
    a, b = promises.promises(page)
    first = promises.renewed(page, [ran(a, "monday, abc", held=True)])
    assert "| a | `true` | yes, 2 s, monday, abc |" in first
    assert "| b (1 + 1) | `false` | never |" in first
    second = promises.renewed(first, [ran(b, "tuesday, def", held=False)])
    assert "| b (1 + 1) | `false` | **no**, 2 s, tuesday, def |" in second
    assert "| a | `true` | yes, 2 s, monday, abc |" in second
    assert promises.promises(second) == [a, b]


ROOT = Path(__file__).parents[3]
SPEAKS = re.compile(r"\bGPUs?\b|\bCUDA\b|\bNCCL\b")
SAYS = re.compile(
    r"not\s+(been\s+)?run|not\s+tried|none\s+has\s+run|no\s+gpu|without\s+a\s+gpu", re.IGNORECASE
)
CLAIMS_NOTHING = {
    "docs/README.md",  # links
    "docs/how-to/coming-from.md",  # keys of others
    "docs/how-to/resume.md",  # a key that may change
    "docs/how-to/fleet.md",  # an error in an example
    "docs/reference/ports.md",  # where NCCL listens
    "docs/decisions/005-launcher.md",  # what a preloader must not touch
    "services/meshrl/planning/README.md",  # a link
}
ROOMS = ("docs", "recipes", "benchmarks", "trainer", "rollout", "services", "deploy")
PAGES = [
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *(p for room in ROOMS for p in (ROOT / room).rglob("*.md"))]
    if SPEAKS.search(page.read_text())
]


def unwrapped(page: Path) -> str:
    return " ".join(page.read_text().split())


def test_a_page_that_speaks_of_gpus_says_what_was_not_run_on_one() -> None:
    silent = {page for page in PAGES if not SAYS.search(unwrapped(ROOT / page))}
    assert silent == CLAIMS_NOTHING


def shown() -> list[tuple[str, str]]:
    """Each command of the section, and the table below it."""
    page = (ROOT / "docs/how-to/gpus.md").read_text()
    section = page.split("## One GPU, two, two machines")[1].split("## ")[0]
    parts = section.split("```")[1].split("$ meshrl ")[1:]
    return [(command, table.strip()) for command, _, table in (p.partition("\n") for p in parts)]


@pytest.mark.parametrize(("command", "table"), shown(), ids=["1", "2", "2 x 8"])
def test_the_tables_of_placement_are_what_is_printed(command: str, table: str) -> None:
    words = re.split(r" (?![^{]*})", command)
    done = subprocess.run(
        [sys.executable, "-m", "meshrl.cli", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert table in done.stdout
