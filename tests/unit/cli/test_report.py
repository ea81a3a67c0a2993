"""The report of a run: a page that needs nothing beside it, and curves on a terminal and as pictures."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len

from meshrl.cli import main
from meshrl.cli.charts import Chart, ChartLine, braille, save, svg
from meshrl.cli.commands.queue import ledger_rows
from meshrl.common.files import lasting_fault
from meshrl.contract.types import Ledger

from ...view_runs import HOSTILE, add_recipe, add_rows, add_steps

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def meshrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    add_steps(tmp_path / "r", 0, 60)
    add_recipe(tmp_path / "r", "rollout.n=4")
    add_rows(tmp_path / "r", 59)
    return tmp_path / "r"


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_report_has_curves_samples_and_recipe_and_asks_nobody_for_anything(
    meshrl: Command, run_dir: Path
) -> None:
    code, said, _ = meshrl("report", str(run_dir))
    assert (code, said.strip()) == (0, str(run_dir / "report.html"))
    text = (run_dir / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    names = [tag for tag, _ in tags.found]
    assert names.count("svg") == 8 and "script" not in names and "img" not in names
    assert not [a for _, attributes in tags.found for a in ("src", "href") if a in attributes]
    assert HOSTILE not in text
    assert "Worst of step 59, trained" in text and "rollout.n" in text
    assert "No ledger: no address book" in text


def test_a_run_without_rows_or_recipe_has_a_report(meshrl: Command, tmp_path: Path) -> None:
    add_steps(tmp_path / "bare", 0, 1)
    code, said, _ = meshrl("report", "bare", "--out", "page.html")
    assert (code, said) == (0, "page.html\n")
    assert "No rows are logged" in Path("page.html").read_text()


@pytest.mark.parametrize("command", ["report", "plot"])
def test_what_is_no_run_is_one_line(meshrl: Command, command: str) -> None:
    code, _, said = meshrl(command, "nosuch")
    assert (code, len(said.splitlines())) == (2, 1)
    assert "no run 'nosuch': want a run's directory, or its name in runs/" in said


def test_curves_on_a_terminal_fit_80_columns(meshrl: Command, run_dir: Path) -> None:
    code, said, _ = meshrl("plot", str(run_dir), "reward/mean", "actor/entropy", "--log")
    assert code == 0
    assert max(map(cell_len, said.splitlines())) <= 80
    assert re.search("[\u2801-\u28ff]", said) and "step 59" in said


def test_a_metric_that_is_not_there_is_named_with_the_nearest(
    meshrl: Command, run_dir: Path
) -> None:
    code, _, said = meshrl("plot", str(run_dir), "reward/men")
    assert code == 2 and "did you mean 'reward/mean'?" in said
    assert "actor/entropy\n" in meshrl("plot", str(run_dir), "--list")[1]


def test_two_runs_are_drawn_over_each_other_as_pictures(
    meshrl: Command, run_dir: Path, tmp_path: Path
) -> None:
    add_steps(tmp_path / "other", 0, 10, seed=1)
    drawn = ("plot", str(run_dir), "reward/mean", "--with", "other")
    assert meshrl(*drawn, "--out", "a.svg")[0] == 0
    assert len(ElementTree.parse("a.svg").findall(".//{*}polyline")) == 2
    code, _, said = meshrl(*drawn, "--out", "a.png")
    assert (code, len(said.splitlines())) == (2, 1)


@pytest.mark.parametrize(
    "values", [[0.0], [1.0, 1.0], [-3.0, 1e-12], [1e9, 1e9 + 1], [0.0, -1.0], []]
)
@pytest.mark.parametrize("log", [False, True])
def test_any_figures_can_be_drawn(values: list[float], log: bool) -> None:
    curve = ChartLine("<b>", list(range(len(values))), values)
    chart = Chart(title="a & b", curves=[curve, curve], log=log)
    ElementTree.fromstring(svg(chart))
    assert list(braille(chart, 40, 5))


def test_what_is_held_out_is_scored_and_not_trained_on() -> None:
    ledger = Ledger(
        run="my.eval", admitted=5, trained=5, filtered={}, stale={}, dead_lettered={}, resident={}
    )
    assert [label for label, _, _ in ledger_rows(ledger)] == ["admitted", "scored"]


def test_a_picture_that_a_full_disk_refuses_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    curve = ChartLine("a", [1.0, 2.0], [0.1, 0.2])
    with pytest.raises(OSError) as error:
        save([Chart(title="reward", curves=[curve])], tmp_path / "curves.svg")
    assert lasting_fault(error.value) == f"{tmp_path / 'curves.svg'}: No space left on device"
    assert list(tmp_path.iterdir()) == []
