"""Prompts with pictures: verl's column, content parts, and what is wrong with a row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshrl.contract.errors import UserError
from meshrl.contract.types import Media, SamplingParams
from meshrl.images import ImageProcessor
from meshrl.trainer.config import DataConfig
from meshrl.trainer.data.prompts import Prompt, load_prompts, task_maker

from ...pictures import PLACEHOLDER, make_model, picture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    make_model(path)
    return path


def read(folder: Path, model: Path, row: dict[str, Any], **config: Any) -> Prompt:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"answer": "red", **row}]), file)
    found = load_prompts([file], DataConfig(**config), tokenizer, (), ImageProcessor(model))
    return found.prompts[0]


def asks(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


A, B = picture(0), picture(1, 128, 64)


def test_verls_row_becomes_a_task_with_its_pictures_once(tmp_path: Path, model: Path) -> None:
    row = {
        "prompt": asks("<image> which <image> colour ?"),
        "images": [{"bytes": A.data, "path": None}, {"bytes": B.data, "path": "x.png"}],
    }
    prompt = read(tmp_path, model, row)
    assert prompt.media == (A, B)
    assert (prompt.prompt_ids == PLACEHOLDER).sum() == 4 + 8
    make = task_maker(
        "run", group_size=8, sampling=SamplingParams(), program="single_turn", deadline_s=1.0
    )
    assert make(prompt, "t").media == (A, B)


def test_a_picture_may_be_a_file_beside_the_data(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.png").write_bytes(A.data)
    content = [{"type": "image", "text": None}, {"type": "text", "text": " which"}]
    row = {"prompt": [{"role": "user", "content": content}], "images": ["a.png"]}
    assert read(tmp_path, model, row).media == (Media.of(A.data),)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": asks("which"), "images": [A.data]}, "has 0 places for pictures .* has 1"),
        ({"prompt": asks("<image> <image>"), "images": [A.data]}, "has 2 places for pictures"),
        ({"prompt": asks("<image>"), "images": ["gone.png"]}, r"images\[0\].*No such file"),
        ({"prompt": asks("<image>"), "images": [b"no"]}, r"images\[0\]: no picture"),
        ({"prompt": asks("<image>"), "images": ["https://x/a.png"]}, "pictures are not fetched"),
        ({"prompt": "<image>", "images": [A.data]}, "wants a prompt of messages"),
    ],
)
def test_a_row_whose_pictures_cannot_be_used_is_one_line(
    tmp_path: Path, model: Path, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        read(tmp_path, model, row)
    assert "rows.parquet:0" in str(caught.value)


def test_more_bytes_than_a_message_carries_are_one_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": asks("<image><image>"), "images": [A.data, A.data]}
    monkeypatch.setattr("meshrl.trainer.data.messages.MOST_OF_ROW", 2 * len(A.data))
    assert read(tmp_path, model, row).media == (A, A)
    monkeypatch.setattr("meshrl.trainer.data.messages.MOST_OF_ROW", 2 * len(A.data) - 1)
    with pytest.raises(
        UserError,
        match=r"rows\.parquet:0: 'images' has [\d,]+ bytes of pictures, want 33,554,432 at most: smaller",
    ):
        read(tmp_path, model, row)


def test_a_prompt_with_pictures_is_never_cut(tmp_path: Path, model: Path) -> None:
    row = {"prompt": asks("<image> which colour ?"), "images": [A.data]}
    options = {"max_prompt_length": 4, "filter_overlong_prompts": False, "truncation": "left"}
    with pytest.raises(UserError, match=r"tokens > data.max_prompt_length 4"):
        read(tmp_path, model, row, **options)


def test_a_video_is_refused_with_what_to_write_instead(tmp_path: Path, model: Path) -> None:
    row = {"prompt": asks("<video> what happens?"), "videos": [{"bytes": b"frames"}]}
    with pytest.raises(
        UserError, match=r"rows.parquet:0: 'videos' cannot be used .*frames as"
    ) as caught:
        read(tmp_path, model, row)
    assert "with <image> for each" in str(caught.value)


def test_geometry3ks_files_become_rows_that_are_read(tmp_path: Path, model: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    given = {
        "images": [{"bytes": A.data, "path": None}],
        "problem": "<image> colour ?",
        "answer": "3",
    }
    for split in ("train", "test"):
        table = pyarrow.Table.from_pylist([given])
        pyarrow.parquet.write_table(table, source / f"{split}-00000-of-00001.parquet")
    script = Path(__file__).parents[3] / "recipes/geo3k/prepare.py"
    subprocess.run([sys.executable, script, source, target], check=True, capture_output=True)
    (row,) = pyarrow.parquet.read_table(target / "train.parquet").to_pylist()
    prompt = read(tmp_path, model, row)
    assert prompt.media == (A,) and prompt.ground_truth == "3"
    assert "\\boxed{}" in prompt.messages[0].content
