"""The demo's task, reward and report."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file

from meshrl.cli.commands.init import DEMO, recipes
from meshrl.cli.demo.command import DemoHistory, _report, _start_afresh, demo, draw_curves, summary
from meshrl.cli.demo.prepare import programs
from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Stage, warm_start
from meshrl.config import load_recipe
from meshrl.contract.errors import UserError
from meshrl.contract.types import Ledger
from meshrl.launcher.address_book import AddressBook, is_up, run_lock
from meshrl.trainer.offline.loop import OfflineProgress

ROOT = Path(__file__).parents[3]


def interpret(prompt: str) -> int:
    """Run a program the slow way: one assignment after the other, mod 10."""
    values: dict[str, int] = {}
    last = ""
    for statement in prompt.removesuffix("?").split(";"):
        last, expression = statement.split("=")
        tokens = re.findall(r"[a-z]|\d+|[+-]", expression)
        first = values[tokens[0]] if tokens[0].isalpha() else int(tokens[0])
        if len(tokens) == 3:
            operand = int(tokens[2])
            first = first + operand if tokens[1] == "+" else first - operand
        values[last] = first % 10
    return values[last]


def test_answers_are_what_the_program_computes() -> None:
    for program in itertools.islice(programs(3, held_out=False), 500):
        assert int(program.answer) == interpret(program.prompt)
        assert program.thought.endswith(f"={program.answer}#{program.answer}")
        assert 2 <= program.prompt.count("=") <= 8


def test_held_out_programs_are_never_drawn_for_training() -> None:
    train = {p.prompt for p in itertools.islice(programs(0, held_out=False), 3000)}
    held_out = {p.prompt for p in itertools.islice(programs(0, held_out=True), 300)}
    assert len(train) == 3000 and len(held_out) == 300
    assert not train & held_out


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reward", ROOT / "recipes/demo/reward.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("solution", "score", "thinks"),
    [
        ("#6", 1.0, 0.0),
        ("q=3;r=8#6", 1.0, 1.0),
        ("#7", 0.0, 0.0),
        ("6", 0.0, 0.0),
        ("#6#7", 0.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_only_the_digit_after_the_last_mark_counts(
    reward: ModuleType, solution: str, score: float, thinks: float
) -> None:
    found = reward.compute_score("trace", solution, "6")
    assert found == {"score": score, "thinks": thinks}


def history(directory: Path) -> Path:
    steps = [
        {
            "step": step,
            "reward/mean": 0.2 + step / 10,
            "reward_component/thinks": step / 10,
            "response/length_mean": 10 + step,
            "staleness/histogram": {"0": 6, str(step + 1): 2},
            "batch/rows": 8,
            "batch/tokens": 100,
            "time/unix_s": 1000.0 + step,
            "time/step_s": 1.0,
        }
        for step in range(3)
    ]
    evaluations = [
        {
            "step": step,
            "val/score/mean": score,
            "val/component/thinks": score,
            "val/response_length": 5.0,
            "val/version": f"1.{step}",
            "val/sample": "#3",
            "time/unix_s": 999.5 + step,
        }
        for step, score in ((0, 0.1), (3, 0.9))
    ]
    path = directory / "metrics.jsonl"
    lines = [evaluations[0], *steps, evaluations[1]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_summary_is_computed_from_the_metrics(tmp_path: Path) -> None:
    ledger = Ledger(
        run="demo",
        admitted=32,
        trained=24,
        filtered={},
        stale={"older": 2},
        dead_lettered={},
        resident={"ready": 6},
    )
    read = DemoHistory.read(history(tmp_path))
    shown = summary(read, ledger, tmp_path / "export")
    assert (shown["accuracy_before"], shown["accuracy_after"]) == (0.1, 0.9)
    assert (shown["steps"], shown["samples"], shown["tokens"]) == (3, 24, 300)
    assert shown["rl_seconds"] == 3.0
    assert shown["staleness"] == {"mean": 0.5, "p95": 3, "max": 3}
    assert shown["ledger"]["balanced"] is True
    json.dumps(shown)
    draw_curves(read, tmp_path / "curves.svg")
    assert len(ElementTree.parse(tmp_path / "curves.svg").findall(".//{*}polyline")) == 6


def test_a_run_that_left_no_history_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    with pytest.raises(UserError, match="0 steps and 0 evaluations"):
        DemoHistory.read(path)


def test_a_directory_that_is_no_demos_keeps_its_files(tmp_path: Path) -> None:
    notes = tmp_path / "thesis" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("years of work")
    with pytest.raises(UserError, match=r"is not the directory of a demo \(it has thesis\)"):
        _start_afresh(tmp_path, Path("runs/demo/assets/model"))
    assert notes.read_text() == "years of work"


def test_the_directory_of_another_run_keeps_its_files(tmp_path: Path) -> None:
    run(tmp_path, model=Path("models/qwen"))
    with pytest.raises(UserError, match="is not the directory of a demo"):
        _start_afresh(tmp_path, Path("runs/demo/assets/model"))
    assert (tmp_path / "queue" / "data").exists()


def test_an_earlier_demo_makes_room_but_for_its_model_and_the_lock(tmp_path: Path) -> None:
    run(tmp_path, model=tmp_path / "assets" / "model")
    (tmp_path / "assets").mkdir()
    with run_lock(tmp_path):
        _start_afresh(tmp_path, tmp_path / "assets" / "model")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["assets", "up.lock"]
        assert is_up(tmp_path)


def test_a_demo_leaves_the_directory_of_a_running_mesh_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, model=Path("runs/demo/assets/model"))
    monkeypatch.chdir(Path(__file__).parents[3])
    with run_lock(tmp_path):
        done = CliRunner().invoke(demo, [f"run.dir={tmp_path}"])
    assert isinstance(done.exception, UserError)
    assert "is in use" in str(done.exception)
    assert (tmp_path / "queue" / "data").exists()


def run(directory: Path, model: Path) -> None:
    """Write the files of a run."""
    (directory / "queue").mkdir()
    (directory / "queue" / "data").write_text("rows")
    (directory / "recipe.yaml").write_text(f"model: {{path: {model}}}\n")
    AddressBook(run="demo", recipe=directory / "recipe.yaml", services={}).save(
        directory / "mesh.json"
    )


def test_only_preparing_makes_what_is_missing_and_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, model=tmp_path / "assets" / "model")
    made: list[Path] = []
    monkeypatch.setattr(
        "meshrl.cli.demo.prepare.prepare", lambda directory, **_: made.append(directory)
    )
    words = ["--only-prepare", f"run.dir={tmp_path}", f"model.path={tmp_path / 'assets/model'}"]
    done = CliRunner().invoke(demo, words)
    assert done.exit_code == 0, done.output
    assert made == [tmp_path / "assets"]
    assert (tmp_path / "queue" / "data").exists()


def test_the_directory_that_it_makes_is_closed_to_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.cli.demo.prepare.prepare", lambda *_, **__: None)
    directory = tmp_path / "runs" / "first"
    done = CliRunner().invoke(demo, ["--only-prepare", f"run.dir={directory}"])
    assert done.exit_code == 0, done.output
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_run_too_short_for_curves_ends_well_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(recipes() / DEMO, [f"run.dir={tmp_path}"], check=False)
    recipe.metrics_path.write_text('{"step": 0, "reward/mean": 0.5}\n')
    _report(recipe)
    assert "1 step and 0 evaluations: no curves" in capsys.readouterr().out


PAIRS = [(f"{n}+{n}=", f"#{n + n}") for n in range(8)]
STAGES = [
    Stage(name="big steps", rows=PAIRS, steps=4, lr=3e-3, seed=0, enough=1.0),
    Stage(name="tiny ones", rows=PAIRS, steps=1, lr=1e-9, seed=0),
]


def start(directory: Path) -> dict[str, OfflineProgress]:
    """The last report of each stage."""
    directory.mkdir(exist_ok=True)
    seen: dict[str, OfflineProgress] = {}
    warm_start(directory, STAGES, PAIRS[:1], seed=0, report=lambda n, p: seen.update({n: p}))
    return seen


def test_each_stage_begins_with_what_the_one_before_it_wrote_and_only_the_first_is_measured(
    tmp_path: Path,
) -> None:
    seen = start(tmp_path)
    assert list(seen) == ["big steps", "tiny ones"]
    assert seen["big steps"].exact_match is not None and seen["tiny ones"].exact_match is None
    random, first, last = (
        load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"]
        for name in ("random", "big_steps", "model")
    )
    assert abs(last - first).max() < 1e-6 < 1e-3 < abs(last - random).max()


@pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("2,1", 2)])
def test_it_computes_on_one_thread_unless_told_and_leaves_torch_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    seen: set[int] = set()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        warm_start(
            tmp_path,
            STAGES[1:],
            [],
            seed=0,
            report=lambda _name, _now: seen.add(torch.get_num_threads()),
        )
        assert (seen, torch.get_num_threads()) == ({threads}, 2)
    finally:
        torch.set_num_threads(before)


def test_a_finished_warm_start_is_kept_and_one_that_was_interrupted_begins_anew(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()  # without its config.json
    assert start(tmp_path)
    assert not start(tmp_path)


def test_rows_are_pairs_or_what_sft_reads(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    stage = Stage(name="talk", rows=[talk, ("a", "bc")], steps=1, lr=1e-3, seed=0, enough=1.0)
    seen: list[OfflineProgress] = []
    warm_start(
        tmp_path,
        [stage],
        [talk],
        seed=0,
        report=lambda _, now: seen.append(now),
        tokenizer=chat_tokenizer([]),
    )
    assert seen[-1].exact_match is not None and seen[-1].loss > 0


def test_a_chat_tokenizer_keeps_the_parts_of_a_chat_and_the_words_whole() -> None:
    tokenizer = chat_tokenizer(["<call>"])
    tokens = tokenizer.encode("<|user|>a b<|end|><call>")
    assert len(tokens) == 6 and tokenizer.decode(tokens) == "<|user|>a b<|end|><call>"
    turn = [{"role": "user", "content": "a b"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "<|user|>a b<|end|>"
