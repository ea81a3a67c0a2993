"""Learning from preferences that are there already: a policy (DPO, IPO) and a reward model."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from meshrl.contract.codec import pack_task, unpack_task
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.rows import text_column
from meshrl.contract.types import LeasedRow, Outcome, Sample, SamplingParams, Uid
from meshrl.rewardd.config import JudgeConfig
from meshrl.rewardd.judge import build_part
from meshrl.rewardd.reward_stage import sample_of
from meshrl.trainer.config import DataConfig, ModelConfig, PolicyLossConfig, RewardModelJudgeConfig
from meshrl.trainer.data.prompts import load_prompts, task_maker
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.model.reward_model import ModelJudge
from meshrl.trainer.offline import dpo, reward_training
from meshrl.trainer.offline.config import DpoConfig, RewardModelConfig
from meshrl.trainer.offline.loop import OfflineProgress
from meshrl.trainer.offline.pairs import read_pairs
from meshrl.trainer.offline.reward_training import bradley_terry, load_classifier, scoring_pack

from ...pictures import make_model
from .ranks import Ranks

Row = dict[str, Any]


def preferences(count: int = 24) -> list[Row]:
    """Letters are better than digits."""
    draw = np.random.default_rng(3)
    letters, digits = "abcdefghij", "0123456789"

    def some(alphabet: str) -> str:
        return "".join(alphabet[i] for i in draw.integers(0, 10, int(draw.integers(2, 7))))

    return [
        {"prompt": some(letters + digits), "chosen": some(letters), "rejected": some(digits)}
        for _ in range(count)
    ]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(model: Path, tmp_path: Path, **changes: Any) -> Row:
    rows = preferences()
    fields: Row = {
        "model": ModelConfig(path=model),
        "train_files": [write(tmp_path / "train.jsonl", rows[:18])],
        "val_files": [write(tmp_path / "val.jsonl", rows[18:])],
        "output_dir": tmp_path / "out",
        "steps": 20,
        "batch_rows": 6,
        "test_freq": 10,
        "max_tokens_per_pack": 48,
        "optim": OptimConfig(lr=5e-3, weight_decay=0.0),
        "device": "cpu",
    }
    return fields | changes


def learnt(config: DpoConfig) -> list[OfflineProgress]:
    seen: list[OfflineProgress] = []
    dpo.run(config, seen.append)
    return seen


@pytest.mark.parametrize(("loss", "begin"), [("dpo", np.log(2)), ("ipo", 25.0)])
def test_the_margin_grows_also_on_pairs_that_were_never_trained_on(
    text_model: Path, tmp_path: Path, loss: str, begin: float
) -> None:
    config = DpoConfig(
        **settings(text_model, tmp_path), policy_loss=PolicyLossConfig(loss_mode=loss)
    )
    seen = learnt(config)
    last = seen[-1].numbers
    assert last["loss"] < begin / 2  # where h is 0
    assert last["val/margin"] > 1
    assert last["val/accuracy"] == 1.0
    assert last["chosen"] > last["rejected"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_adapters_learn_too_and_are_merged_into_what_is_written(
    text_model: Path, tmp_path: Path
) -> None:
    fields = settings(text_model, tmp_path)
    fields["model"] = ModelConfig(path=text_model, lora_rank=4)
    seen = learnt(DpoConfig(**fields))
    assert seen[-1].numbers["val/margin"] > 0.5
    before = AutoModelForCausalLM.from_pretrained(text_model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_the_first_loss_is_that_of_a_policy_that_is_its_own_reference(
    text_model: Path, tmp_path: Path
) -> None:
    (first,) = learnt(DpoConfig(**settings(text_model, tmp_path, steps=1)))
    assert first.numbers["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first.numbers["margin"] == pytest.approx(0, abs=1e-4)


def test_the_loss_is_the_formula_on_a_batch_however_it_is_packed(
    text_model: Path, tmp_path: Path
) -> None:
    """Against log-probs that transformers computes row by row, without packs."""
    rows = preferences(4)
    data = write(tmp_path / "four.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(text_model)
    hf = AutoModelForCausalLM.from_pretrained(text_model)

    def logprob(prompt: str, response: str) -> torch.Tensor:
        ids = tokenizer(prompt + response + "$", return_tensors="pt").input_ids
        log_p = hf(ids).logits[0, :-1].log_softmax(-1)
        return log_p.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()

    with torch.no_grad():
        h = torch.stack(
            [logprob(r["prompt"], r["chosen"]) - logprob(r["prompt"], r["rejected"]) for r in rows]
        )
    wanted = -torch.nn.functional.logsigmoid(0.3 * h).mean()
    for budget in (16, 4096):
        config = DpoConfig(
            **settings(
                text_model,
                tmp_path,
                steps=1,
                batch_rows=4,
                train_files=[data],
                val_files=[],
                max_tokens_per_pack=budget,
            ),
            policy_loss=PolicyLossConfig(loss_mode="dpo", dpo_beta=0.3, dpo_reference_free=True),
        )
        (only,) = learnt(config)
        assert only.numbers["loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_a_loss_that_compares_nothing_is_refused(text_model: Path, tmp_path: Path) -> None:
    config = DpoConfig(
        **settings(text_model, tmp_path), policy_loss=PolicyLossConfig(loss_mode="vanilla")
    )
    with pytest.raises(ConfigError, match="vanilla is not a loss over pairs; want dpo or ipo"):
        dpo.run(config)


def ask(question: str, *answer: str) -> list[dict[str, str]]:
    """A question, and its answer if there is one."""
    asked = [{"role": "user", "content": question}]
    return [*asked, *({"role": "assistant", "content": text} for text in answer)]


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        # TRL: standard and conversational, each with an explicit and an implicit prompt.
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("a", "b", "c")),
        ({"chosen": "sky is blue", "rejected": "sky is black"}, ("sky is", " blue", " black")),
        (
            {"chosen": "H: a\n\nA: b c", "rejected": "H: a\n\nA: d"},
            ("H: a\n\nA:", " b c", " d"),
        ),
        (
            {"prompt": ask("a"), "chosen": ask("a", "b")[1:], "rejected": ask("a", "c")[1:]},
            (ask("a"), "b", "c"),
        ),
        ({"chosen": ask("a", "b"), "rejected": ask("a", "c")}, (ask("a"), "b", "c")),
        # A text beside conversations that hold it, as in UltraFeedback.
        ({"prompt": "a", "chosen": ask("a", "b"), "rejected": ask("a", "c")}, (ask("a"), "b", "c")),
        (
            {"prompt": ask("a"), "chosen": ask("a", "b"), "rejected": ask("a", "c")},
            (ask("a"), "b", "c"),
        ),
        # verl: prompts as in its reinforcement learning, or as text, responses as text; other columns stay unread.
        (
            {"prompt": ask("a"), "chosen": "b", "rejected": "c", "data_source": "x", "score": 1},
            (ask("a"), "b", "c"),
        ),
    ],
)
def test_pairs_come_in_the_forms_of_trl_and_verl(tmp_path: Path, row: Row, pair: object) -> None:
    file = tmp_path / "train.jsonl"
    write(file, [row])
    config = DpoConfig.model_validate(
        {"model": {"path": tmp_path}, "train_files": [file], "output_dir": tmp_path}
    )
    (found,) = read_pairs(config, [file])
    assert (found.prompt, found.chosen, found.rejected) == pair


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            r"train\.jsonl:1: no 'rejected' \(the row has prompt, chosen\)",
        ),
        ({"chosen": "b", "rejected": "c"}, "no 'prompt', and 'chosen' and 'rejected' do not begin"),
        (
            {"prompt": "a", "chosen": [{"role": "user"}], "rejected": "c"},
            "'chosen' holds .* want an object with role and content",
        ),
        ({"prompt": "\ud83d", "chosen": "b", "rejected": "c"}, "'prompt' has .* half of a"),
        ({"prompt": "a", "chosen": "\ud83d", "rejected": "c"}, "'chosen' has .* half of a"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, r"train\.jsonl:1: empty prompt"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, r"train\.jsonl:1: 'chosen' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, "'rejected' is empty, want a response"),
        ({"prompt": ask("a"), "chosen": "b", "rejected": ask("a", "")}, "'rejected' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": float("nan")}, r"1: no 'rejected' \(the row"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a.png"]},
            r"train\.jsonl:1: 'images' cannot be used \(preferences are text\)",
        ),
        (
            {"chosen": ask("a", "b"), "rejected": ask("z", "c")},
            "do not begin with the same messages",
        ),
        (
            {"prompt": "z", "chosen": ask("a", "b"), "rejected": ask("a", "c")},
            "'prompt' is another conversation than 'chosen' begins with",
        ),
        (
            {"prompt": ask("z"), "chosen": ask("a", "b"), "rejected": ask("a", "c")},
            "'prompt' is another conversation than 'chosen' begins with",
        ),
        (
            {"prompt": "a", "chosen": ask("a", "b")[1:], "rejected": "c"},
            "'prompt' is text and a response is messages",
        ),
        (
            {"prompt": ask("a"), "chosen": ask("b"), "rejected": "c"},
            "last message of 'chosen' is of 'user', want one of the assistant",
        ),
        (
            {"chosen": "the same", "rejected": "other"},
            "no 'prompt', and 'chosen' and 'rejected' do",
        ),
    ],
)
def test_a_bad_pair_is_named_by_file_and_line(
    text_model: Path, tmp_path: Path, row: Row, said: str
) -> None:
    fields = settings(text_model, tmp_path)
    write(tmp_path / "train.jsonl", [row])
    with pytest.raises(UserError, match=said):
        dpo.run(DpoConfig(**fields))


def test_a_run_that_was_killed_goes_on_to_the_same_weights_and_numbers(
    text_model: Path, tmp_path: Path, ranks: Ranks
) -> None:
    fields = settings(text_model, tmp_path, steps=12, test_freq=5)
    whole = learnt(DpoConfig(**(fields | {"output_dir": tmp_path / "whole"})))
    killed = DpoConfig(**fields, save_freq=7)
    recipe = tmp_path / "dpo.yaml"
    recipe.write_text(yaml.safe_dump(killed.model_dump(mode="json")))
    ranks.run("dpo_that_is_killed", recipe, 10, output=tmp_path / "output")
    assert not (tmp_path / "out").exists()
    again = learnt(killed)
    assert [progress.step for progress in again] == [10, 12]  # from 7, the newest checkpoint
    assert [dict(p.numbers) for p in again] == [dict(p.numbers) for p in whole[-2:]]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("out", "whole")
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_reward_model_of_one_that_reads_pictures_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    config = RewardModelConfig.model_validate(settings(tmp_path / "model", tmp_path))
    with pytest.raises(UserError, match=r"model\.path: cannot load .* as a classifier"):
        reward_training.run(config)


async def test_a_tokenizer_without_padding_and_end_is_one_line_when_learning_and_judging(
    text_model: Path, tmp_path: Path
) -> None:
    reward_training.run(
        RewardModelConfig.model_validate(settings(text_model, tmp_path, steps=1, batch_rows=2))
    )
    bare = AutoTokenizer.from_pretrained(text_model)
    bare.eos_token = bare.pad_token = None
    bare.save_pretrained(tmp_path / "bare")
    fields = settings(text_model, tmp_path) | {
        "model": ModelConfig(path=text_model, tokenizer_path=tmp_path / "bare")
    }
    with pytest.raises(UserError, match="bare: the tokenizer has no pad_token and no eos_token"):
        reward_training.run(RewardModelConfig.model_validate(fields))
    bare.save_pretrained(tmp_path / "out")
    judge = ModelJudge(RewardModelJudgeConfig(path=tmp_path / "out", device="cpu"))
    with pytest.raises(ConfigError, match="out: the tokenizer has no pad_token and no eos_token"):
        await judge.start()
    await judge.close()


def test_a_checkpoint_of_other_rows_is_refused(text_model: Path, tmp_path: Path) -> None:
    fields = settings(text_model, tmp_path, steps=2, save_freq=1)
    dpo.run(DpoConfig(**fields))
    write(tmp_path / "train.jsonl", preferences(20))
    with pytest.raises(UserError, match=r"is of another training .* resume_mode=disable"):
        dpo.run(DpoConfig(**fields))


def test_bradley_terry_is_the_formula() -> None:
    better, worse = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0])
    wanted = -torch.log(torch.sigmoid(better - worse)) + 0.1 * (better + worse) ** 2
    torch.testing.assert_close(bradley_terry(better, worse, center=0.1), wanted)


def test_scores_of_a_pack_are_those_of_transformers(text_model: Path, world: Any) -> None:
    """Also where a conversation ends with the padding token, which transformers looks through."""
    hf = load_classifier(text_model, pad=36)
    torch.nn.init.normal_(hf.score.weight)
    rows = [np.array(ids, dtype=np.int32) for ids in ([1, 2, 3], [4, 5, 36], [7, 8, 9, 10, 11])]
    plain = AutoModelForSequenceClassification.from_config(
        copy.deepcopy(hf.config), attn_implementation="eager"
    )
    plain.load_state_dict(hf.state_dict())
    with torch.no_grad():
        wanted = [float(plain(torch.tensor(row[None].astype(np.int64))).logits) for row in rows]
        scores = reward_training.Classifier(hf)(scoring_pack(rows, pad=36))
    assert scores.tolist() == pytest.approx(wanted, abs=1e-5)


def samples_of_a_run(rows: list[Row], answer: str, model: Path, folder: Path) -> list[Sample]:
    """Judge inputs for the data rows' prompts in a run, answered by the column `answer`."""
    file = write(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
    tokenizer = AutoTokenizer.from_pretrained(model)
    read = load_prompts([file], DataConfig(answer_required=False), tokenizer)
    make = task_maker(
        "run", group_size=1, sampling=SamplingParams(), program="single_turn", deadline_s=9.0
    )
    tasks = [unpack_task(pack_task(make(p, str(p.index))).data) for p in read.prompts]
    return [
        sample_of(
            LeasedRow(
                uid=Uid("run", task.task_id, 0),
                token=1,
                task=task,
                columns={"response_text": text_column(row[answer])},
                delivery=1,
            )
        )
        for task, row in zip(tasks, rows, strict=True)
    ]


def judged(path: Path, samples: list[Sample]) -> list[float]:
    part = build_part(JudgeConfig(kind="model", options={"path": str(path), "device": "cpu"}))

    async def ask() -> list[float]:
        try:
            scores = await part.judge.score(samples)
        finally:
            await part.judge.close()
        assert all(score.outcome is Outcome.OK for score in scores), scores
        return [score.score for score in scores]

    return asyncio.run(ask())


def test_a_reward_model_is_trained_and_the_judge_prefers_what_was_preferred(
    text_model: Path, tmp_path: Path
) -> None:
    seen: list[OfflineProgress] = []
    config = RewardModelConfig(**settings(text_model, tmp_path), center_rewards_coef=0.01)
    reward_training.run(config, seen.append)
    assert seen[-1].numbers["val/accuracy"] == 1.0
    assert seen[-1].numbers["loss"] < seen[0].numbers["loss"]
    held_out = preferences()[18:]
    better, worse = (
        judged(tmp_path / "out", samples_of_a_run(held_out, answer, text_model, tmp_path))
        for answer in ("chosen", "rejected")
    )
    assert all(a > b for a, b in zip(better, worse, strict=True))
    margin = np.mean(better) - np.mean(worse)
    # What the trainer measured is what the judge says.
    assert margin == pytest.approx(seen[-1].numbers["val/margin"], rel=1e-4)


def test_a_reward_model_starts_at_zero_and_resumes(text_model: Path, tmp_path: Path) -> None:
    fields = settings(text_model, tmp_path, save_freq=4)
    seen: list[OfflineProgress] = []
    first = RewardModelConfig(**(fields | {"steps": 8, "output_dir": tmp_path / "whole"}))
    reward_training.run(first, seen.append)
    reward_training.run(RewardModelConfig(**(fields | {"steps": 4})))
    reward_training.run(RewardModelConfig(**(fields | {"steps": 8})), seen.append)
    assert seen[0].numbers == seen[-1].numbers
    changes = {"steps": 1, "save_freq": -1, "output_dir": tmp_path / "one"}
    reward_training.run(RewardModelConfig(**(fields | changes)), seen.append)
    assert seen[-1].numbers["loss"] == pytest.approx(np.log(2), abs=1e-6)
