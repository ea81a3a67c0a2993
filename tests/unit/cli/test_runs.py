from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from rich.cells import cell_len

from meshrl.cli import main
from meshrl.cli.options import NamedRun
from meshrl.contract.errors import UserError
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
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["runs", "nowhere"], "nowhere: no such directory; want one with a directory per run"),
        (
            ["report", "runs/notes"],
            "runs/notes: no run's directory: it holds none of mesh.json, metrics.jsonl, recipe.yaml, trajectories",
        ),
    ],
)
def test_what_is_no_run_is_one_line(meshrl: Command, arguments: list[str], line: str) -> None:
    assert meshrl(*arguments) == (2, "", f"error: {line}\n")


TO_NAME_A_RUN: dict[str, Callable[[str], list[str]]] = {
    "status": lambda run: ["status", run],
    "ledger": lambda run: ["ledger", run],
    "ledger audited": lambda run: ["ledger", run, "--audit"],
    "why-waiting": lambda run: ["why-waiting", run],
    "dead letters": lambda run: ["dead-letters", run],
    "dead letters, an option first": lambda run: ["dead-letters", "--json", run],
    "replayed letters": lambda run: ["dead-letters", run, "replay", "--all"],
    "fleet": lambda run: ["fleet", run],
    "one more worker": lambda run: ["fleet", run, "add"],
    "one worker less": lambda run: ["fleet", run, "drain", "rollout-0"],
    "rewards": lambda run: ["reward", run, "list"],
    "scored again": lambda run: ["reward", run, "rescore-run"],
    "export": lambda run: ["export", run, "exported"],
    "backup": lambda run: ["queue", "backup", run, "copy"],
    "verify": lambda run: ["queue", "verify", run],
    "stored": lambda run: ["runs", "stored", run],
    "removed": lambda run: ["runs", "remove", run, "other"],
    "rows": lambda run: ["rows", run],
    "replay": lambda run: ["replay", run, "--step", "1"],
    "trace": lambda run: ["trace", run, "0-1/0.0"],
    "report": lambda run: ["report", run],
    "plot": lambda run: ["plot", run],
}
OLD_WAYS: dict[str, Callable[[str], list[str]]] = {
    "ledger": lambda run: ["ledger", "--run-dir", run],
    "fleet": lambda run: ["fleet", "--run-dir", run],
    "fleet, behind": lambda run: ["fleet", "add", "--run-dir", run],
    "export": lambda run: ["export", "exported", "--run-dir", run],
    "backup": lambda run: ["queue", "backup", "copy", "--run-dir", run],
    "trace": lambda run: ["trace", "0-1/0.0", "--run-dir", run],
    "by name": lambda run: ["status", "--run", run],
}


@pytest.mark.parametrize("command", [*TO_NAME_A_RUN.values(), *OLD_WAYS.values()])
@pytest.mark.parametrize("name", ["mine", "runs/mine"])
@pytest.mark.usefixtures("here")
def test_every_command_takes_a_run_by_its_name_and_by_its_directory(
    meshrl: Command, command: Callable[[str], list[str]], name: str
) -> None:
    """Each says of it what it says of no other run here: that its files are broken."""
    Path("runs/mine").mkdir()
    for mark in ("mesh.json", "metrics.jsonl", "recipe.yaml"):
        Path("runs/mine", mark).write_text("broken")
    Path("runs/newest").mkdir()
    Path("runs/newest/mesh.json").write_text("of another")
    code, out, err = meshrl(*command(name))
    assert "Usage" not in err
    assert "runs/mine" in out + err and "newest" not in out + err, (code, out, err)


@pytest.mark.parametrize("command", TO_NAME_A_RUN.values())
@pytest.mark.usefixtures("here")
def test_a_run_that_is_not_here_is_told_with_those_that_are(
    meshrl: Command, command: Callable[[str], list[str]]
) -> None:
    code, _, err = meshrl(*command("nobody"))
    assert code in (1, 2) and "nobody" in err
    assert "early, late" in err or "not a run here, and no command" in err or "no backup" in err


def test_a_queue_is_asked_for_a_run_by_the_same_word(
    meshrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[NamedRun] = []

    def note(named: NamedRun, *, stopped: bool = False) -> NoReturn:
        asked.append(named)
        raise UserError("noted")

    monkeypatch.setattr("meshrl.cli.commands.queue.find_mesh", note)
    where = NamedRun(queue="a:1", name="mine")
    for words in (
        ["ledger", "mine", "--queue", "a:1"],
        ["ledger", "--queue", "a:1", "--run", "mine"],
        ["dead-letters", "mine", "--queue", "a:1"],
        ["dead-letters", "mine", "replay", "--all", "--queue", "a:1"],
        ["queue", "backup", "mine", "copy", "--queue", "a:1"],
    ):
        assert meshrl(*words)[0] == 2
    assert asked == [where] * len(asked) and len(asked) == 5
    monkeypatch.setenv("MESHRL_QUEUE", "a:1")
    monkeypatch.setenv("MESHRL_RUN", "theirs")
    meshrl("ledger")
    meshrl("ledger", "mine")
    assert [named.name for named in asked[5:]] == ["theirs", "mine"]
