from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.offline import sft
from meshrl.trainer.offline.config import SftConfig
from meshrl.trainer.offline.loop import OfflineProgress, shuffled


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def doubling() -> list[dict[str, str]]:
    return [{"prompt": f"{a}{b}", "response": f"{a}{a}{b}{b}"} for a in "abcdef" for b in "ghijkl"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fine_tuning_learns_a_rule_and_writes_a_model_that_knows_it(
    text_model: Path, tmp_path: Path, optimizer: str
) -> None:
    config = SftConfig(
        model=ModelConfig(path=text_model),
        train_files=[write(tmp_path / "train.jsonl", doubling())],
        val_files=[write(tmp_path / "val.jsonl", doubling())],
        output_dir=tmp_path / "out",
        steps=150,
        batch_rows=12,
        test_freq=25,
        target_exact_match=0.95,
        optim=OptimConfig(name=optimizer, lr=2e-2, weight_decay=0.0),  # type: ignore[arg-type]
        device="cpu",
    )
    seen: list[OfflineProgress] = []
    done = sft.run(config, seen.append)
    assert done.exact_match is not None and done.exact_match >= 0.95
    assert done.loss < seen[0].loss / 2
    assert done.step < 150  # the target stops it
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize(("known", "ends"), [(None, [36, 35]), ([36, 35], [36, 35]), (7, [7, 35])])
def test_engines_are_told_the_end_that_was_learned(
    text_model: Path, tmp_path: Path, known: object, ends: list[int]
) -> None:
    """The template ends a turn with 9; the tokenizer, and the checkpoint of a base model, with $."""
    model = shutil.copytree(text_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["9"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}9\n{% endfor %}"
    tokenizer.save_pretrained(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "eos_token_id": 36}))
    (model / "generation_config.json").unlink(missing_ok=True)
    if known is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": known}))
    config = SftConfig(
        model=ModelConfig(path=model),
        train_files=[write(tmp_path / "train.jsonl", doubling())],
        output_dir=tmp_path / "out",
        steps=1,
        device="cpu",
    )
    sft.run(config)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == ends


def test_equal_seeds_give_bit_identical_weights(text_model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "train.jsonl", doubling())
    weights = []
    for name in ("one", "two"):
        config = SftConfig(
            model=ModelConfig(path=text_model),
            train_files=[data],
            output_dir=tmp_path / name,
            steps=5,
            max_tokens_per_pack=64,
            device="cpu",
        )
        sft.run(config)
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_run_goes_on_from_its_checkpoint_to_the_same_weights(
    text_model: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "train.jsonl", doubling())

    def train(name: str, steps: int, save_freq: int) -> int:
        config = SftConfig(
            model=ModelConfig(path=text_model),
            train_files=[data],
            output_dir=tmp_path / name,
            steps=steps,
            save_freq=save_freq,
            device="cpu",
        )
        seen: list[OfflineProgress] = []
        sft.run(config, seen.append)
        return len(seen)

    train("parts", 6, 3)
    train("parts", 12, 3)
    train("whole", 12, -1)
    one, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("parts", "whole")
    )
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert train("parts", 12, 3) == 0  # there is nothing left to do


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "ab"}, r"train\.jsonl:2: no 'response' \(the row has prompt\)"),
        ({"prompt": "", "response": "a"}, r"train\.jsonl:2: empty prompt"),
        ({"prompt": "a" * 60, "response": "b"}, r"train\.jsonl:2: 62 tokens > max_length 50"),
        ({"prompt": "a", "response": None}, r"train\.jsonl:2: 'response' is null, want text"),
        ({"prompt": "\ud83d", "response": "b"}, r"train\.jsonl:2: 'prompt' has .* half of a"),
        ({"prompt": "a", "response": "\ud83d"}, r"train\.jsonl:2: 'response' has .* half of a"),
        ({"prompt": None, "response": "b"}, r"train\.jsonl:2: 'prompt' is null, want text or"),
        (
            {"prompt": "a", "response": [{"role": "assistant", "content": "b"}]},
            r"train\.jsonl:2: 'response' holds \{'role': .*\}, want text or parts of type text",
        ),
        (
            {"prompt": [{"role": "user", "content": None}], "response": "b"},
            r"train\.jsonl:2: 'prompt\.content' is null, want text",
        ),
        (
            {"prompt": "a", "response": "b", "images": ["x.png"]},
            r"train\.jsonl:2: 'images' cannot be used",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    text_model: Path, tmp_path: Path, row: dict[str, object], complaint: str
) -> None:
    data = write(tmp_path / "train.jsonl", [{"prompt": "a", "response": "b"}, row])
    config = SftConfig(
        model=ModelConfig(path=text_model),
        train_files=[data],
        output_dir=tmp_path / "out",
        max_length=50,
        device="cpu",
    )
    with pytest.raises(UserError, match=complaint):
        sft.run(config)


def test_every_row_comes_once_an_epoch() -> None:
    batches = shuffled(10, 4, seed=0)
    rows = [row for _ in range(5) for row in next(batches)]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
