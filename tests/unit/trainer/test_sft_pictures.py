"""Fine-tuning on rows with pictures: what is learned of them, and what is wrong with a row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from meshrl.contract.errors import UserError
from meshrl.testing.vision import VOCABULARY
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.offline import sft
from meshrl.trainer.offline.config import SftConfig
from meshrl.trainer.offline.examples import Example, read_examples
from meshrl.trainer.offline.sft import SftLesson, exact_match
from meshrl.trainer.ranks.world import World
from tests.doubles.vision_rows import logprobs_alone

from ...pictures import make_model, picture
from .test_vision import load_theirs, row

A, B, C = picture(1, 96, 64), picture(2, 70, 130), picture(3)
TALK = [
    {"role": "user", "content": "<image> which colour ?"},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": "<image> which <image> ?"},
    {"role": "assistant", "content": "green blue"},
]


@pytest.fixture(scope="module", params=["Qwen3VL", "SmolVLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, request.param)
    return path


def write(path: Path, *rows: Mapping[str, object]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def config(model: Path, data: Path, **changes: Any) -> SftConfig:
    given = {"model": {"path": model}, "train_files": [data], "output_dir": data.parent / "out"}
    return SftConfig.model_validate({**given, "device": "cpu", **changes})


def words(example: Example) -> list[str]:
    return [VOCABULARY[token] for token in example.tokens[example.learned]]


def talk(*media: Any) -> dict[str, Any]:
    return {"messages": TALK, "images": [each.data for each in media]}


def ask(*media: Any) -> dict[str, Any]:
    content = "<image>" * len(media) + " which colour ?"
    return {
        "prompt": [{"role": "user", "content": content}],
        "response": "white",
        "images": [{"bytes": each.data, "path": None} for each in media],
    }


def test_what_the_assistant_says_of_pictures_is_learned(
    model: Path, tmp_path: Path, world: World
) -> None:
    asked = [
        write(tmp_path / "a.parquet", ask(A, B), ask()),
        write(tmp_path / "b.parquet", talk(A, B, C)),
    ]
    made = config(model, asked[0], train_files=asked, max_tokens_per_pack=256)
    examples = read_examples(made, asked, model)
    assert [words(each) for each in examples] == [
        ["white", "<|im_end|>"],
        ["white", "<|im_end|>"],
        ["red", "<|im_end|>", "green", "blue", "<|im_end|>"],
    ]
    assert [each.media for each in examples] == [(A, B), (), (A, B, C)]
    policy = build_policy(open_hf(model), world, ModelConfig(path=model))
    reader = VisionReader(model, policy.hf)
    lesson = SftLesson(policy, Optimizers(policy, made.optim), made, world, examples, [], reader)
    found = lesson.step([0, 1, 2], 0.0)["loss"]
    assert found == pytest.approx(alone(model, examples, reader), rel=1e-5)


@torch.no_grad()
def alone(model: Path, examples: list[Example], reader: VisionReader) -> float:
    """Loss by transformers, each row by itself."""
    hf, total, count = load_theirs(model), 0.0, 0
    for each in examples:
        like = row(model, [], 2, 0)
        object.__setattr__(like, "tokens", each.tokens)
        object.__setattr__(like, "media", each.media)
        mask = each.learned.astype(np.uint8)
        object.__setattr__(like, "loss_mask", mask)
        logprobs = logprobs_alone(hf, like, reader)
        total -= float(logprobs[torch.from_numpy(each.learned[like.prompt_length :])].sum())
        count += each.num_learned
    return total / count


def test_rows_that_differ_in_their_pictures_alone_are_told_apart(
    model: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "a.parquet", ask(A), ask(picture(9, 96, 64)))
    one, other = read_examples(config(model, data), [data], model)
    assert np.array_equal(one.tokens, other.tokens)
    assert not np.array_equal(one.fingerprint, other.fingerprint)


def test_answers_to_pictures_are_learned_and_exported(
    model: Path, tmp_path: Path, world: World
) -> None:
    rows = [
        {**ask(picture(n)), "response": word}
        for n, word in enumerate(("red", "green", "blue", "white"))
    ]
    data = write(tmp_path / "a.parquet", *rows)
    done = sft.run(
        config(
            model, data, val_files=[data], steps=60, batch_rows=4, test_freq=20,
            optim={"lr": 5e-3, "weight_decay": 0.0}, target_exact_match=1.0,
        )
    )  # fmt: skip
    assert done.exact_match == 1.0
    out = tmp_path / "out"
    # What makes pixels is exported, too, and the frozen tower: what was learned can be learned on.
    again = read_examples(config(out, data), [data], out)
    policy = build_policy(open_hf(out), world, ModelConfig(path=out))
    assert exact_match(policy, again, 256, world, VisionReader(out, policy.hf)) == 1.0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({**ask(A), "images": []}, r"has 1 places for pictures .* has 0"),
        ({**talk(A, B)}, r"has 3 places for pictures .* has 2"),
        ({**ask(A), "images": [b"no"]}, r"images\[0\]: no picture that can be read"),
        ({**ask(A), "prompt": "<image>"}, "wants a prompt of messages"),
        (ask(A, B, C, A, B, C), r"\d+ tokens > max_length 40"),
    ],
)
def test_a_row_whose_pictures_cannot_be_used_is_one_line(
    model: Path, tmp_path: Path, given: Mapping[str, object], problem: str
) -> None:
    data = write(tmp_path / "rows.parquet", given)
    with pytest.raises(UserError, match=rf"rows\.parquet:\d.*{problem}"):
        read_examples(config(model, data, max_length=40), [data], model)
