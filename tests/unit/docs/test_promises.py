"""`make promises` runs what the README's table says, with fresh seeds, and tells what broke."""

from __future__ import annotations

import re

import pytest

from ... import promises
from ...promises import Promise

README = (promises.ROOT / "README.md").read_text()


def test_each_promise_of_the_readme_names_a_command_whose_files_exist() -> None:
    found = promises.promises(README)
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
    text = f"{promises.HEADING}\n\n| promise | command |\n|---|---|\n| it is fast | believe us |\n"
    with pytest.raises(ValueError, match="it is fast"):
        promises.promises(text)


def test_a_fresh_seed_replaces_the_one_of_the_readme() -> None:
    assert promises.seeded("make chaos SEED=1 KILLS=200", 77) == "make chaos SEED=77 KILLS=200"
    assert promises.seeded("python -m a --seed 1", 77) == "python -m a --seed 77"
    assert promises.seeded("make parity", 77) == "make parity"


def test_a_command_that_fails_is_a_broken_promise_with_its_last_line() -> None:
    held = promises.show(Promise("it holds", "echo fine; echo SEED=1"), 7, "today, abc")
    broken = promises.show(Promise("it breaks", "echo 'lost | 3'; exit 1"), 7, "today, abc")
    assert (held.held, held.last_line) == (True, "SEED=7")
    assert not broken.held
    assert held.row.startswith("| it holds | `echo fine; echo SEED=7` | yes |")
    assert "**no**" in broken.row and "lost \\| 3" in broken.row


def test_the_page_renews_what_was_run_and_keeps_the_other_rows_of_the_readme() -> None:
    three = [Promise("a", "true"), Promise("b", "true"), Promise("c", "true")]
    first = promises.page(three, [promises.show(each, 7, "monday, abc") for each in three[:2]], "")
    assert "2 of 3 held" in first and "| c | not run yet |" in first
    b = Promise("b", "false")
    second = promises.page([b, three[0]], [promises.show(b, 7, "tuesday, def")], first)
    rows = [line for line in second.splitlines() if line.startswith(("| a |", "| b |", "| c |"))]
    assert [row.split(" | ")[0::2][:3] for row in rows] == [
        ["| b", "**no**", "tuesday, def"],
        ["| a", "yes", "monday, abc"],
    ]
    assert "1 of 2 held" in second
