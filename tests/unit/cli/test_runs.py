from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from meshrl.cli import main
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, LOCK_NAME, AddressBook, run_lock
from meshrl.launcher.run_directory import FINISHED_NAME

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def meshrl(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def make(
    name: str, steps: int, *, began: float, reward: float = 0.1, recipe: str = "", done: bool = True
) -> Path:
    """A run that rose from `reward` by a tenth with each step of a minute."""
    directory = Path("runs") / name
    directory.mkdir(parents=True)
    lines = [
        {"step": step, "reward/mean": reward * (step + 1), "batch/rows": 16,
         "time/unix_s": began + 60 * step}
        for step in range(steps)
    ]  # fmt: skip
    if steps:
        lines.append({"step": steps, "val/score/mean": 0.5, "time/unix_s": began + 60 * steps})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    (directory / "recipe.yaml").write_text(f"run: {{name: {name}}}\n{recipe}")
    AddressBook(run=name, recipe=directory / "recipe.yaml", services={}).save(
        directory / ADDRESS_BOOK_NAME
    )
    if done:
        (directory / FINISHED_NAME).write_text(json.dumps({"step": steps}))
    return directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make("late", 3, began=2e9, recipe="rollout: {n: 4}\n", done=False)
    make("early", 5, began=1e9, recipe="rollout: {n: 8}\ndata: {seed: 1}\n")
    Path("runs/notes").mkdir()


@pytest.mark.usefixtures("here")
def test_runs_are_listed_the_newest_last(meshrl: Command) -> None:
    make("fresh" * 20, 0, began=0.0)
    code, out, _ = meshrl("runs")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and max(map(cell_len, out.splitlines())) <= 80
    assert [line[:6] for line in lines if line[0] in ("early", "late")] == [
        ["early", "finished", "5", "0.500", "0.500", "0:05:00"],
        ["late", "stopped", "3", "0.300", "0.500", "0:03:00"],
    ]
    found = json.loads(meshrl("runs", "--json")[1])
    assert [(run["run"], run["steps"], run["state"]) for run in found][1:] == [
        ("early", 5, "finished"),
        ("late", 3, "stopped"),
    ]


@pytest.mark.usefixtures("here")
def test_a_run_that_is_not_running_shows_what_it_came_to(meshrl: Command) -> None:
    code, out, err = meshrl("status", "--run-dir", "runs/late")
    assert (code, err) == (0, "run late in runs/late: step 3, not running\n")
    assert max(map(cell_len, out.splitlines())) <= 80
    for part in ("stopped", "0.100 → 0.300", "48", "meshrl rows runs/late", "meshrl up runs/late"):
        assert part in out
    # A copy without its address book, too.
    Path("runs/late/mesh.json").unlink()
    Path("runs/late").rename("archive")
    code, out, _ = meshrl("status", "--run-dir", "archive", "--json")
    assert code == 0 and json.loads(out) == {
        "run": "archive", "state": "stopped", "steps": 3, "seconds": 180.0, "samples": 48,
        "reward": pytest.approx(0.3), "held_out_score": 0.5,
    }  # fmt: skip


@pytest.mark.usefixtures("here")
def test_a_run_that_went_on_after_its_end_is_finished_no_more(meshrl: Command) -> None:
    Path("runs/early/finished.json").write_text('{"step": 4}')
    assert (
        json.loads(meshrl("status", "--run-dir", "runs/early", "--json")[1])["state"] == "stopped"
    )


@pytest.mark.usefixtures("here")
def test_rows_are_counted_where_some_steps_are_left_out_of_the_metrics(meshrl: Command) -> None:
    path = Path("runs/early/metrics.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in (lines[0], *lines[3:])))
    found = json.loads(meshrl("status", "--run-dir", "runs/early", "--json")[1])
    assert (found["steps"], found["samples"]) == (5, 80)


@pytest.mark.usefixtures("here")
def test_a_run_that_is_up_is_asked_itself(meshrl: Command) -> None:
    with run_lock(Path("runs/late")):
        assert [r["state"] for r in json.loads(meshrl("runs", "--json")[1])] == [
            "finished",
            "running",
        ]
        assert (Path("runs/late") / LOCK_NAME).exists()


@pytest.mark.usefixtures("here")
def test_two_runs_stand_beside_each_other(meshrl: Command) -> None:
    code, out, _ = meshrl("compare", "runs/early", "runs/late")
    assert code == 0 and max(map(cell_len, out.splitlines())) <= 80
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert ["rollout.n", "8", "4"] in cells and ["data.seed", "1", "(default)"] in cells
    assert ["steps", "5", "3"] in cells and not any("run.name" in row for row in cells)
    found = json.loads(meshrl("compare", "runs/early", "runs/late", "--json")[1])
    assert found["recipe"] == {"rollout.n": ["8", "4"], "data.seed": ["1", None]}
    assert [run["last"]["reward/mean"] for run in found["runs"]] == pytest.approx([0.5, 0.3])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["runs", "nowhere"], "nowhere: no such directory; want one with a directory per run"),
        (
            ["compare", "runs/early", "runs/notes"],
            "runs/notes: no run's directory (it has no mesh.json and no metrics.jsonl)",
        ),
    ],
)
def test_what_is_no_run_is_one_line(meshrl: Command, arguments: list[str], line: str) -> None:
    assert meshrl(*arguments) == (2, "", f"error: {line}\n")
