"""`meshrl data`: bad rows, long ones, repetitions and leaks named with file and row; rows as the model reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from meshrl.cli import main
from tests.chat_model import write_chat_model

Ask = Callable[..., tuple[int, str, str]]


def row(question: str, answer: str = "1", source: str = "sums") -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"prompt": messages, "answer": answer, "data_source": source}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_chat_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    train = [row("q=1"), row("q=2"), row("q=1"), row("q=" + "7" * 40)]
    lines = [json.dumps(one) for one in train]
    Path("train.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    table = pyarrow.Table.from_pylist([row("q=4", source="more"), row("q=5", source="more")])
    parquet.write_table(table, "more.parquet")
    held_out = [row("q=9"), row(" q=5\n")]
    Path("val.jsonl").write_text("".join(json.dumps(one) + "\n" for one in held_out))
    data = "train_files: [train.jsonl, more.parquet], val_files: [val.jsonl], max_prompt_length: 32"
    reward = "reward: {functions: [{name: exact_match}]}\n"
    Path("my.yaml").write_text(f"model: {{path: model}}\ndata: {{{data}}}\n{reward}")
    return Path("my.yaml")


@pytest.fixture
def ask(recipe: Path, capfd: pytest.CaptureFixture[str]) -> Ask:
    def asked(command: str, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["data", command, str(recipe), *arguments])
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return asked


def test_check_names_what_is_too_long_what_repeats_and_what_leaks(ask: Ask) -> None:
    code, out, err = ask("check")
    assert code == 0
    assert err.splitlines() == [
        "warning: train: 1 row longer than data.max_prompt_length 32: skipped,"
        " the first at train.jsonl:5",
        "warning: train: 1 row with a prompt that came before: train.jsonl:4 = train.jsonl:1",
        "warning: 1 held-out row with a prompt that is trained on: val.jsonl:2 = more.parquet:1",
    ]
    assert out.splitlines() == [
        "train: 6 good rows, 0 bad", "held out: 2 good rows, 0 bad"
    ]  # fmt: skip
    assert ask("check", "--strict")[0] == 2


def test_check_names_every_bad_row_and_goes_on_behind_it(ask: Ask) -> None:
    good = Path("train.jsonl").read_text()
    bad = ["{", "[]", '{"prompt": null}', '{"prompt": "x"}', '{"prompt": "", "answer": "1"}']
    Path("train.jsonl").write_text("\n".join(bad) + "\n" + good)
    Path("val.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    code, out, err = ask("check", "data.filter_overlong_prompts=false")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in errors[:-1]] == [
        *(f"train.jsonl:{number}" for number in (1, 2, 3, 4, 5, 10)), "val.jsonl:1"
    ]  # fmt: skip
    assert "47 tokens > data.max_prompt_length 32" in errors[5]
    assert (
        code == 2
        and errors[-1] == "error: held out: no prompts in val.jsonl: want rows with a prompt"
    )
    Path("val.jsonl").write_text(json.dumps(row("q=9")) + "\n")
    code, out, err = ask("check", "--limit", "2", "--json")
    assert code == 2 and json.loads(out)["train"]["bad"] == 5
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3 and errors[2] == "error: … and 3 more (--limit 0 names all)"


def test_a_file_that_is_none_and_weights_that_fit_nothing_are_one_line(ask: Ask) -> None:
    code, _, err = ask("check", "data.weights={sums: 1}")
    assert code == 2 and "more.parquet:0: data.weights has neither" in err
    code, _, err = ask("check", "data.weights={sums: 1, more: 1, none: 1}")
    assert code == 2 and err == (
        "error: data.weights: no prompt is of 'none'; want files as in data.train_files or data sources of rows\n"
    )
    Path("more.parquet").write_bytes(b"PAR1 broken")
    code, out, err = ask("check")
    assert code == 2 and "more.parquet: not a readable parquet file" in err
    assert "train: 4 good rows, 1 bad" in out


def test_stats_count_tokens_sources_and_what_an_epoch_asks(ask: Ask) -> None:
    code, out, _ = ask("stats", "data.weights={sums: 4, more: 1}")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "train: 6 rows, 87 tokens of prompts"
    assert lines[1] == "  a row: mean 14, median 8, 95 % up to 47, longest 47 (train.jsonl:5)"
    assert lines[2].split() == ["0-4", "0"] or "█" in lines[2]
    assert "  sums: 3 rows" in lines and "  more: 2 rows" in lines
    assert "  an epoch asks 4 of sums: each of its 3 rows 1.33 times" in lines
    facts = json.loads(ask("stats", "--json")[1])
    assert facts["train"]["sources"] == {"sums": 3, "more": 2} and facts["train"]["max"] == 47
    assert sum(rows for *_, rows in facts["train"]["histogram"]) == 6
    assert facts["leaked"] == {"rows": 1, "examples": [["val.jsonl:2", "more.parquet:1"]]}


def test_show_prints_the_prompt_as_the_model_reads_it(ask: Ask) -> None:
    few = 'data.few_shot=[{prompt: "q=0", answer: "0"}]'
    code, out, _ = ask("show", "--limit", "1", "data.system_prompt=think", few)
    assert code == 0 and "S:think<eos>U:q=0<eos>A:0<eos>U:q=1<eos>A:" in out
    assert '── answer "1"' in out
    shown = json.loads(ask("show", "--at", "more.parquet:1", "--json")[1])
    assert shown["text"] == "U:q=5<eos>A:" and shown["data_source"] == "more"
    assert (
        json.loads(ask("show", "--held-out", "--limit", "1", "--json")[1])["where"] == "val.jsonl:1"
    )
    assert ask("show", "--at", "train.jsonl:2")[::2] == (2, "error: no row train.jsonl:2\n")


def test_rows_that_the_reward_cannot_score_are_named(ask: Ask) -> None:
    code, _, err = ask("check", "reward.functions=[{name: verl}]", "--limit", "1")
    assert code == 2
    assert err.splitlines()[0].startswith(
        "error: train.jsonl:1: no scorer for data_source 'sums' (known: "
    )
