"""`meshrl eval` scores a real checkpoint in one process, with the recipe's own engine and reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.cli.demo.tiny_model import write_tiny_model

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 if ground_truth == "yes" else 0.0, "length": float(len(solution_str))}
"""

JUDGE = """
from pydantic import BaseModel
from meshrl.contract.types import Outcome, Score

class Config(BaseModel):
    pass

class Judge:
    reward_hash = "0"

    async def start(self):
        pass

    async def close(self):
        pass

    async def score(self, samples):
        said = [message.content for sample in samples for message in sample.messages]
        assert said == ["q=1;r=q+5?"], said
        return [Score(uid=sample.uid, outcome=Outcome.OK, score=0.25) for sample in samples]

def build(config):
    return Judge()
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    write_tiny_model(Path("model"), seed=0)
    Path("mine.py").write_text(REWARD)
    rows = [
        {"prompt": f"q={n};r=q+5?", "answer": "yes" if n % 4 else "no", "data_source": f"s{n % 2}"}
        for n in range(1, 9)
    ]
    Path("held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("my.yaml").write_text(
        "model: {path: model}\n"
        "data: {val_files: [held_out.jsonl], max_prompt_length: 32, max_response_length: 8}\n"
        "rollout: {slots: 3}\n"
        "reward: {custom_reward_function: {path: mine.py}}\n"
    )
    return "my.yaml"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_every_held_out_prompt_is_answered_and_scored(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", recipe, "rollout.val_kwargs.n=2", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tasks"], report["rows"]) == (8, 16)
    assert report["score"] == pytest.approx(6 / 8)
    assert report["by_source"] == {"s0": pytest.approx(0.5), "s1": pytest.approx(1.0)}
    assert report["components"]["length"] >= 0
    assert report["unscored"] == {} and "answers" not in report
    assert report["pass_at"]["2"]["mean"] == pytest.approx(6 / 8)
    assert report["interval"][0] < 6 / 8 < report["interval"][1]
    assert report["sources"]["s1"]["pass_at"]["1"] == {"mean": 1.0, "low": 1.0, "high": 1.0}


def test_every_answer_is_written_out(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("eval", recipe, "rollout.val_kwargs.n=2", "--out", "answers.jsonl")
    assert run(*arguments) == 0
    said = capsys.readouterr()
    assert said.err == "" and max(map(len, said.out.splitlines())) <= 80
    shown = [line for line in said.out.splitlines() if line.startswith("0.000")]
    assert len(shown) == 3 and all("wanted no" in line for line in shown)
    assert "pass@2" in said.out and "16 answers in answers.jsonl" in said.out
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [(row["task"], row["index"]) for row in rows] == [
        (str(task), index) for task in range(8) for index in range(2)
    ]
    first = rows[0]
    assert first["messages"] == [{"role": "user", "content": "q=1;r=q+5?"}]
    assert (first["ground_truth"], first["score"], first["right"]) == ("yes", 1.0, True)
    assert first["components"]["length"] == len(first["response"])
    assert run(*arguments) == 2
    assert capsys.readouterr().err == (
        "error: --out answers.jsonl already exists; choose another, or give --force\n"
    )


def test_a_person_reads_a_table(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", recipe, "data.val_max_samples=4") == 0
    out = capsys.readouterr().out
    assert "0.7500" in out and "4 (4 answers)" in out
    assert "[low, high]: 95 %, bootstrapped over prompts" in out


def test_a_judge_reads_the_prompt(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("judges_of_mine").mkdir()
    Path("judges_of_mine/prompted.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(Path.cwd())
    judged = "reward.judges=[{kind: judges_of_mine.prompted}]"
    assert run("eval", recipe, "data.val_max_samples=1", judged, "--json") == 0
    assert json.loads(capsys.readouterr().out)["score"] == 1.25


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--checkpoint", "nowhere"], "error: no such checkpoint: nowhere"),
        (
            ["--out", "nowhere/answers.jsonl"],
            "error: --out nowhere/answers.jsonl: want a file in a directory that exists",
        ),
        (
            ["data.val_files=[]"],
            "error: my.yaml: data.val_files is empty; want held-out parquet or jsonl files, or data.reasoning_gym",
        ),
        (
            ["rollout.name=echo"],
            "error: meshrl eval needs an engine that serves a checkpoint by itself; echo does not "
            "(rollout.name=torch does)",
        ),
    ],
)
def test_what_cannot_be_scored_is_one_line(
    recipe: str, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert run("eval", recipe, *arguments) == 2
    assert capsys.readouterr().err.splitlines() == [line]
