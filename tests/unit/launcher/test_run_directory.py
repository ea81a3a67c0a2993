"""A run's directory keeps the recipe that was accepted, knows its end, and means the same wherever it lies."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from meshrl.cli.find_mesh import find_mesh, last_step
from meshrl.cli.options import NamedRun
from meshrl.config import load_recipe
from meshrl.config.loading import anchored, load_run, save_recipe
from meshrl.config.recipe import Recipe
from meshrl.contract.types import Ledger, TrainerPhase, TrainerStatus, Version
from meshrl.launcher.address_book import AddressBook
from meshrl.launcher.run_directory import busy_port, finished_line, note_finished, recipe_on_trial
from meshrl.launcher.view import MeshStatus

TEXT = """
run: {name: my}
model: {path: model}
data: {train_files: [train.jsonl]}
trainer: {total_training_steps: 15}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(TEXT)
    return load_recipe(Path("my.yaml"), check=False)


def started(recipe: Recipe) -> Path:
    """The directory of a run as `up` leaves it."""
    directory = recipe.run.path
    directory.mkdir(parents=True)
    save_recipe(anchored(recipe), directory / "recipe.yaml")
    book = AddressBook(run=recipe.run.name, recipe=directory / "recipe.yaml", services={})
    book.save(directory / "mesh.json")
    (directory / "metrics.jsonl").write_text('{"step": 14}\n{"step": 15}\n{"st')
    return directory


def test_a_renamed_run_answers_for_itself_while_another_has_its_name(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    started(recipe).rename("runs/old")
    Path("runs/old/queue").mkdir()
    started(recipe)
    found = find_mesh(NamedRun(path=Path("runs/old")), stopped=True)
    assert found.stopped is not None
    assert found.stopped.queue_path == Path("runs/old/queue")
    assert found.stopped.checkpoint_dir == Path("runs/old/checkpoints")
    assert capsys.readouterr().err == "run my in runs/old: step 15, not running\n"


def test_a_run_is_read_from_any_working_directory(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = started(recipe).absolute()
    monkeypatch.chdir("/")
    found = load_run(AddressBook.load(directory / "mesh.json").recipe)
    assert found.queue_path == directory / "queue"
    assert found.model.path == tmp_path / "model"


def test_the_address_book_names_its_recipe_by_a_path_relative_to_itself(recipe: Recipe) -> None:
    directory = started(recipe)
    assert json.loads((directory / "mesh.json").read_text())["recipe"] == "recipe.yaml"


def test_a_moved_run_of_an_earlier_version_answers_for_itself_too(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = started(recipe)
    save_recipe(recipe, directory / "recipe.yaml")  # relative paths, and no run.dir
    fields = {"run": "my", "recipe": "runs/my/recipe.yaml", "services": {}}
    (directory / "mesh.json").write_text(json.dumps(fields))
    directory.rename("runs/old")
    Path("model").mkdir()
    monkeypatch.chdir("/")
    found = load_run(AddressBook.load(tmp_path / "runs/old/mesh.json").recipe)
    assert found.queue_path == tmp_path / "runs/old/queue"
    assert found.model.path == tmp_path / "model"


def test_a_refused_recipe_does_not_replace_the_accepted_one(recipe: Recipe) -> None:
    path = started(recipe) / "recipe.yaml"
    before = path.read_text()
    other = load_recipe(Path("my.yaml"), ["rollout.n=4"], check=False)
    with recipe_on_trial(other, path.parent) as trial:
        assert load_recipe(trial.running, check=False).rollout.n == 4
        # kill -9 at this moment, or a refusal:
        assert path.read_text() == before
    assert path.read_text() == before
    assert not trial.running.exists()
    with recipe_on_trial(other, path.parent) as trial:
        trial.accept()
        assert load_recipe(path, check=False).rollout.n == 4


def test_the_first_start_of_a_run_leaves_its_recipe_for_others_to_read_at_once(
    recipe: Recipe,
) -> None:
    recipe.run.path.mkdir(parents=True)
    with recipe_on_trial(recipe, recipe.run.path) as trial:
        assert load_recipe(trial.accepted, check=False) == load_recipe(trial.running, check=False)


def finished() -> MeshStatus:
    """The status that `up` has at the end of a run of 15 steps."""
    mesh_status = MeshStatus(run="my", states={})
    mesh_status.trainer = TrainerStatus(
        phase=TrainerPhase.DONE, step=15, total_steps=15, version=Version(1, 15)
    )
    mesh_status.rewards = {14: 0.25, 15: 0.5}
    mesh_status.scores = {0: 0.125, 15: 0.75}
    mesh_status.ledger = Ledger(
        run="my", admitted=240, trained=240, filtered={}, stale={}, dead_lettered={}, resident={}
    )
    return mesh_status


def test_a_finished_run_leaves_a_note_of_what_it_came_to(recipe: Recipe) -> None:
    directory = started(recipe)
    (directory / "export").mkdir()
    note_finished(recipe, finished())
    told = json.loads((directory / "finished.json").read_text())
    assert datetime.fromisoformat(told.pop("finished_at")).tzinfo is UTC
    del told["length"]
    assert told == {
        "run": "my",
        "step": 15,
        "reward": 0.5,
        "held_out_score": 0.75,
        "trained_rows": 240,
        "balanced": True,
        "model": "export",
    }


def test_a_finished_run_says_so_until_it_is_asked_for_more(recipe: Recipe) -> None:
    assert finished_line(recipe) is None
    (started(recipe) / "checkpoints" / "step-15").mkdir(parents=True)
    assert finished_line(recipe) is None
    note_finished(recipe, finished())
    line = finished_line(recipe)
    assert line is not None
    assert line.startswith("run my is finished at step 15; files in runs/my: to train on, raise")
    assert line.isprintable()
    more = load_recipe(Path("my.yaml"), ["trainer.total_training_steps=20"], check=False)
    assert finished_line(more) is None
    anew = load_recipe(Path("my.yaml"), ["trainer.resume_mode=disable"], check=False)
    assert finished_line(anew) is None


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    assert last_step(tmp_path / "metrics.jsonl") is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4, "rew')
    assert last_step(tmp_path / "metrics.jsonl") == 3


def _busy_port_after_a_free_one(servers: ExitStack) -> int:
    while True:
        server = servers.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = int(server.getsockname()[1])
        with suppress(OSError), socket.create_server(("127.0.0.1", port - 1)):
            return port


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("reward.registry.http_port", ()),
        ("weights.port", ()),
        ("rollout.gateway.port", ("rollout.program=openai", "rollout.workers=2")),
    ],
)
def test_a_busy_port_of_the_recipe_is_said_before_anything_starts(
    recipe: Recipe, key: str, more: tuple[str, ...]
) -> None:
    with ExitStack() as servers:
        port = _busy_port_after_a_free_one(servers)
        first = port - ("gateway" in key)  # of the second worker
        wanted = load_recipe(Path("my.yaml"), (f"{key}={first}", *more), check=False)
        line = f"{key}={port}: another program listens on 127.0.0.1:{port}; choose another port"
        assert busy_port(wanted, {}) == line
    assert busy_port(wanted, {}) is None
    assert busy_port(recipe, {}) is None


def test_a_port_where_a_connection_has_just_ended_is_not_busy(recipe: Recipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # who closes first remembers the connection for a minute
            assert client.recv(1) == b""
    assert busy_port(recipe, {"queue": port}) is None
