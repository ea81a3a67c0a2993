from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from rich.cells import cell_len
from rich.console import Console

from meshrl.cli import main
from meshrl.cli.commands.rows import _spans_table
from meshrl.contract.types import Media
from meshrl.trainer.trajectories.files import FOLDER, PER_TOKEN, PICTURES, PictureFiles, file_of
from meshrl.trainer.trajectories.table import schema

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def meshrl(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["rows", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def row(step: int, task: str, index: int, reward: float, **changes: Any) -> dict[str, Any]:
    return {
        "uid": f"r/{task}/{index}.0", "task": task, "index": index, "attempt": 0, "group_size": 2,
        "split": "train", "step": step, "epoch": 1, "data_source": "sums", "prompt": f"task {task}?",
        "ground_truth": '"12"', "response": f"answer {index}", "turns": 1, "prompt_length": 2, "length": 3,
        "reward": reward, "reward_components": [("acc", reward)], "advantage": reward - 0.5, "mismatch": 0.01,
        "staleness": step % 3, "outcome": "ok", "worker": "rollout-0", "time_unix_s": 1.0,
        "spans": [{"epoch": 1, "step": step, "start": 0, "end": 3}], "response_ids": [1, 2, 3],
        "advantages": [reward - 0.5] * 3, **changes,
    }  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 0 to 3 of two groups of two rows, and an evaluation."""
    folder = tmp_path / "r" / FOLDER
    folder.mkdir(parents=True)
    for step in range(4):
        rows = [
            row(step, f"{step}-{group}", index, (step + group + index) / 10)
            for group in range(2)
            for index in range(2)
        ]
        save(file_of(folder, "train", step), rows)
    save(file_of(folder, "eval", 3), [row(3, "1.3-0", 0, 0.9, split="eval", outcome=None)])
    return tmp_path / "r"


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(arrow.Table.from_pylist(rows, schema=schema()), path)


def test_the_newest_step_is_listed_group_by_group_in_80_columns(
    run_dir: Path, meshrl: Command
) -> None:
    long = row(9, "g" * 60, 0, 1.0, response="漢字 and more\n" * 50, prompt="[red]p\x1b[2J" * 30)
    save(file_of(run_dir / FOLDER, "train", 4), [long, row(9, "short", 1, 0.0)])
    code, out, err = meshrl(str(run_dir))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert "\x1b" not in out and "[red]p" in out and "\\x1b[2J" in out
    assert [line.split()[:6] for line in lines if line.startswith("  ")] == [
        ["0.0", "1.000", "0.500", "0", "3", "漢字"],
        ["1.0", "0.000", "-0.500", "0", "3", "answer"],
    ]


@pytest.mark.parametrize(
    ("options", "uids"),
    [
        ([], ["r/3-0/0.0", "r/3-0/1.0", "r/3-1/0.0", "r/3-1/1.0"]),
        (["--step", "1", "--limit", "1"], ["r/1-0/0.0"]),
        (["--step", "all", "--worst", "--limit", "1"], ["r/0-0/0.0"]),
        (["--step", "0-1", "--best", "--limit", "1"], ["r/1-1/1.0"]),
        (["--step", "all", "--limit", "0", "--where", "reward > 0.4"], ["r/3-1/1.0"]),
        (["--step", "2", "--where", "reward == 0.4"], ["r/2-1/1.0"]),
        (["--uid", "2-1"], ["r/2-1/0.0", "r/2-1/1.0"]),
        (["--uid", "2-1/1.0"], ["r/2-1/1.0"]),
        (["--uid", "r/0-0/0.0"], ["r/0-0/0.0"]),
        (["--eval"], ["r/1.3-0/0.0"]),
        (["--uid", "nobody"], []),
    ],
)
def test_rows_are_chosen_by_step_reward_name_and_condition(
    run_dir: Path, meshrl: Command, options: list[str], uids: list[str]
) -> None:
    code, out, err = meshrl(str(run_dir), "--json", *options)
    assert (code, err) == (0, "")
    assert [json.loads(line)["uid"] for line in out.splitlines()] == uids


def test_json_has_every_column(run_dir: Path, meshrl: Command) -> None:
    _, out, _ = meshrl(str(run_dir), "--json", "--limit", "1")
    found = json.loads(out)
    assert list(found) == schema().names
    assert found["response_ids"] == [1, 2, 3] and found["reward_components"] == {
        "acc": pytest.approx(0.3)
    }
    assert set(PER_TOKEN) <= set(found)


def test_one_row_is_shown_whole(run_dir: Path, meshrl: Command) -> None:
    parts = [
        {"sampled": True, "start": 0, "end": 1, "text": "<tool_call>add"},
        {"sampled": False, "start": 1, "end": 2, "text": "12"},
        {"sampled": True, "start": 2, "end": 3, "text": "it is\n12\x07"},
    ]
    call = {"name": "add", "arguments": '{"a": 5}'}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    times = {"sample_s": 1.5, "score_wait_s": 0.25, "score_s": 0.5, "train_wait_s": 2.0}
    whole = row(8, "t", 0, 0.75, parts=parts, turns=2, conversation=[said], **times)
    save(file_of(run_dir / FOLDER, "train", 8), [whole])
    code, out, _ = meshrl(str(run_dir), "--uid", "r/t/0.0")
    assert code == 0
    for line in (
        "reward     0.7500, acc 0.75", "versions   1.8 [0, 3); staleness 2", 'answer     "12"',
        "times      sampled 1.50 s, waited for its judge 0.25 s, scored 0.50 s, waited to be trained 2.00 s",
        'calls      add({"a": 5})', "task t?", "policy", "<tool_call>add", "observed", "it is", "12\\x07",
    ):  # fmt: skip
        assert line in out.splitlines(), out


def test_the_pictures_of_a_row_are_listed_by_name_and_size(run_dir: Path, meshrl: Command) -> None:
    kept = Media.of(b"a file")
    PictureFiles(run_dir / FOLDER / PICTURES, 1 << 20).keep([kept])
    names = [kept.sha256, "0" * 64, "\x1b[2Jno name"]
    prompt = f"<|im_start|>{'<|image_pad|>' * 256}what?"
    shown = row(9, "9-0", 0, 1.0, pictures=names, prompt=prompt)
    save(file_of(run_dir / FOLDER, "train", 9), [shown])
    code, out, _ = meshrl(str(run_dir), "--uid", "9-0/0.0")
    assert code == 0 and f"picture 1  {kept.sha256}, 6 bytes" in out
    assert f"picture 2  {'0' * 64}, not kept" in out and "no name of a picture" in out
    assert "<|im_start|><|image_pad|>×256what?" in out and "\x1b" not in out
    _, out, _ = meshrl(str(run_dir), "--step", "9", "--json")
    assert json.loads(out)["pictures"] == names


def test_files_without_times_and_conversations_are_read(run_dir: Path, meshrl: Command) -> None:
    path = file_of(run_dir / FOLDER, "train", 3)
    later = [name for name in schema().names if name.endswith("_s") and name != "time_unix_s"]
    parquet.write_table(parquet.read_table(path).drop_columns([*later, "conversation"]), path)
    assert meshrl(str(run_dir), "--uid", "r/3-0/0.0")[0] == 0
    code, out, _ = meshrl(str(run_dir), "--where", "sample_s > 1")
    assert code == 0 and "answer 0" not in out
    code, out, _ = meshrl(str(run_dir), "--where", "sample_s == None")
    assert code == 0 and "answer 0" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "no run 'nowhere': want a run's directory, or its name in runs/"),
        (
            ["."],
            ".: no run's directory: it holds none of mesh.json, metrics.jsonl, recipe.yaml, trajectories",
        ),
        (["r", "--step", "7"], "--step 7: no rows are logged of it; there are 4 steps from 0 to 3"),
        (["r", "--step", "x"], "--step x: want a number, two with a dash (10-20), or all"),
        (["r", "--step", "3-"], "--step 3-: want a number, two with a dash (10-20), or all"),
        (["r", "--worst", "--best"], "--worst and --best exclude each other"),
        (["r", "--where", "rewrd > 1"], "no column 'rewrd' to ask for; did you mean reward?"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    run_dir: Path,
    meshrl: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(run_dir.parent)
    code, out, err = meshrl(*arguments)
    assert (code, out, err) == (2, "", f"error: {line}\n")


def test_a_broken_file_is_named(run_dir: Path, meshrl: Command) -> None:
    broken = file_of(run_dir / FOLDER, "train", 9)
    broken.write_bytes(b"PAR1 and no more")
    code, _, err = meshrl(str(run_dir))
    assert code == 2 and err.startswith(f"error: {broken}: no logged rows can be read there: ")
    assert err.count("\n") == 1


def test_figures_are_whole_however_much_a_span_has_to_say() -> None:
    facts = {"turn": 0, "tokens": 54, "versions": "1.1, 1.2, 1.3", "finish_reason": "stop"}
    spans = [
        {"span": f"{at}", "parent": "", "name": "generate", "service": "rollout-0"}
        | {"start_ns": at * 10**9, "end_ns": at * 10**9 + 5 * 10**8, "attributes": facts}
        for at in range(2)
    ]
    console = Console(width=80)
    with console.capture() as said:
        console.print(_spans_table(spans))
    lines = said.get().splitlines()
    assert lines[0].split()[:4] == ["from", "s", "took", "s"]
    assert lines[1].split()[:3] == ["0.000", "0.500", "rollout-0"]
    assert max(map(len, lines)) <= 80
