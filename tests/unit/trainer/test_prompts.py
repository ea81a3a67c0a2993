"""Reading data sets: schemas, mistakes, lengths."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow as arrow
import pyarrow.parquet
import pyarrow.parquet as parquet
import pytest

from meshrl.contract.errors import UserError
from meshrl.contract.types import Media, Message, SamplingParams
from meshrl.images import ImageProcessor
from meshrl.trainer.config import DataConfig, FewShotExample
from meshrl.trainer.data.files import FileRow, file_rows, row_lacks
from meshrl.trainer.data.prompts import Prompt, load_prompts, task_maker
from meshrl.trainer.data.readers import parquet as parquet_reader

from ...pairs import fits, pairs
from ...pictures import PLACEHOLDER, make_model, picture

WRONG_ROWS = pairs(Path(__file__).with_name("wrong_rows.txt"))


class Characters:
    """A tokenizer whose tokens are characters; with a chat template that shows the roles."""

    chat_template: Any = "{role}:{content}"

    def __init__(self, begin: str = "", end: str = "") -> None:
        self._begin, self._end = begin, end

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = f"{self._begin}{text}{self._end}" if add_special_tokens else text
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        thinks: bool = True,
    ) -> str:
        assert add_generation_prompt and not tokenize
        turns = "".join(f"{m['role'][0]}:{m['content']};" for m in conversation)
        return turns + ("a:" if thinks else "a:-")


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_plain_rows_give_their_answer_as_ground_truth(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "1+1?", "answer": "2"})
    (prompt,) = load_prompts([file], DataConfig(), Characters()).prompts
    assert "".join(map(chr, prompt.prompt_ids)) == "1+1?"
    assert prompt.ground_truth == "2" and prompt.prompt_ids.dtype == "int32"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("1+1?", "^1+1?"),
        ("^1+1?", "^1+1?"),  # once
        ([{"role": "user", "content": "1+1?"}], "u:1+1?;a:"),  # a template has its own
    ],
)
def test_text_begins_as_the_tokenizer_begins_it(tmp_path: Path, prompt: object, read: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": prompt, "answer": "2"})
    (found,) = load_prompts([file], DataConfig(), Characters("^", "$")).prompts
    assert "".join(map(chr, found.prompt_ids)) == read


def test_verls_parquet_rows_are_read_as_they_are(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 7},
    }
    file = tmp_path / "train.parquet"
    parquet.write_table(arrow.Table.from_pylist([row]), file)
    (prompt,) = load_prompts([file], DataConfig(), Characters()).prompts
    assert "".join(map(chr, prompt.prompt_ids)) == "u:2+2?;a:"
    assert prompt.messages == (Message(role="user", content="2+2?"),)
    assert (prompt.data_source, prompt.ground_truth) == ("openai/gsm8k", "4")
    assert prompt.extra_info == {"split": "train", "index": 7}


def test_too_long_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "a.jsonl", {"prompt": "x" * 9, "answer": "1"}, {"prompt": "y", "answer": "1"}
    )
    read = load_prompts([file], DataConfig(max_prompt_length=8), Characters())
    assert read.skipped == 1
    assert [prompt.index for prompt in read.prompts] == [1]


@pytest.mark.parametrize(
    ("truncation", "remaining"), [("left", "fghij"), ("right", "abcde"), ("middle", "abhij")]
)
def test_too_long_prompts_are_cut_on_request(
    tmp_path: Path, truncation: str, remaining: str
) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "abcdefghij", "answer": "k"})
    config = DataConfig.model_validate(
        {"max_prompt_length": 5, "filter_overlong_prompts": False, "truncation": truncation}
    )
    (prompt,) = load_prompts([file], config, Characters()).prompts
    assert "".join(map(chr, prompt.prompt_ids)) == remaining


def options(**more: object) -> dict[str, object]:
    """A row of a question, with an answer unless it says otherwise."""
    return {"prompt": "?", "answer": "1", **more}


def user(content: object, **more: object) -> list[object]:
    """A conversation of one message."""
    return [{"role": "user", "content": content, **more}]


@pytest.mark.parametrize(("row", "said"), WRONG_ROWS)
def test_a_malformed_row_is_named_with_file_and_line(
    tmp_path: Path, row: list[str], said: str
) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "fine", "answer": "1"}, *map(json.loads, row))
    with pytest.raises(UserError) as caught:
        load_prompts([file], DataConfig(), Characters())
    assert fits(str(caught.value), f"{file}:2: {said}")


def test_parts_of_text_are_read_as_their_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    file = jsonl(tmp_path / "a.jsonl", options(prompt=user(parts)))
    (prompt,) = load_prompts([file], DataConfig(), Characters()).prompts
    assert prompt.messages == (Message(role="user", content="1+1?"),)


def test_columns_that_parquet_fills_with_nothing_are_no_fault(tmp_path: Path) -> None:
    with_call = {"role": "tool", "content": "4", "tool_calls": None, "name": None}
    rows = [options(prompt=[with_call], images=[], tools=None)]
    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    (prompt,) = load_prompts([file], DataConfig(), Characters()).prompts
    assert prompt.messages == (Message(role="tool", content="4"),)


def test_pictures_in_the_column_that_the_recipe_names_are_not_left_out_silently(
    tmp_path: Path,
) -> None:
    file = jsonl(tmp_path / "a.jsonl", options(prompt="<image>Find x.", photos=["a.png"]))
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: 'photos' cannot be used \(prompts are text\)"
    ):
        load_prompts([file], DataConfig(image_key="photos"), Characters())


def test_cells_that_pandas_has_nothing_for_are_null(tmp_path: Path) -> None:
    """Columns of numbers, in parquet and in jsonl, and what is nested in them."""
    nothing = math.nan
    row = {
        "prompt": "2?", "answer": 4.0, "images": nothing, "tools": nothing, "data_source": nothing,
        "reward_model": nothing, "extra_info": {"level": nothing, "of": [1.0, nothing]},
    }  # fmt: skip
    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.Table.from_pylist([row]), file)
    for path in (file, jsonl(tmp_path / "a.jsonl", row)):
        (prompt,) = load_prompts([path], DataConfig(), Characters()).prompts
        assert (prompt.ground_truth, prompt.data_source) == (4.0, "")
        assert prompt.extra_info == {"level": None, "of": [1.0, None]}
    unanswered = tmp_path / "b.parquet"
    parquet.write_table(arrow.table({"prompt": ["a", "b"], "answer": [1.0, nothing]}), unanswered)
    with pytest.raises(UserError, match=r"b\.parquet:1: no 'answer'; it is null or NaN; say where"):
        load_prompts([unanswered], DataConfig(), Characters())
    optional = DataConfig(answer_required=False)
    assert load_prompts([unanswered], optional, Characters()).prompts[1].ground_truth is None


def test_the_empty_answer_of_a_task_that_code_has_made_is_one(tmp_path: Path) -> None:
    made = [FileRow("data.reasoning_gym:0", {"prompt": "?", "answer": ""}, made=True)]
    (prompt,) = load_prompts([], DataConfig(), Characters(), made).prompts
    assert prompt.ground_truth == ""


def test_the_answer_is_found_in_the_column_that_the_recipe_names(tmp_path: Path) -> None:
    row = {"prompt": "?", "solution": "7", "reward_model": {"ground_truth": "8"}}
    file = jsonl(tmp_path / "a.jsonl", row)
    (prompt,) = load_prompts([file], DataConfig(answer_key="solution"), Characters()).prompts
    assert prompt.ground_truth == "7"


def test_tasks_without_answers_are_read_where_the_recipe_says_so(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "write a poem"})
    (prompt,) = load_prompts([file], DataConfig(answer_required=False), Characters()).prompts
    assert prompt.ground_truth is None


def test_a_system_prompt_and_solved_examples_come_before_each_prompt(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "2?"}]
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("1?", own[1:], own)]
    file = jsonl(tmp_path / "a.jsonl", *rows)
    shot = {"prompt": "0?", "answer": "0"}
    config = DataConfig(
        system_prompt="be short",
        few_shot=[FewShotExample(**shot)],
        apply_chat_template_kwargs={"thinks": False},
    )
    read = load_prompts([file], config, Characters()).prompts
    assert ["".join(map(chr, prompt.prompt_ids)) for prompt in read] == [
        "s:be short;u:0?;a:0;u:1?;a:-",
        "s:be short;u:0?;a:0;u:2?;a:-",
        "s:own;u:0?;a:0;u:2?;a:-",
    ]
    assert [message.role for message in read[0].messages] == ["system", "user", "assistant", "user"]
    without = DataConfig(few_shot=[FewShotExample(**shot)])
    first = load_prompts([file], without, Characters()).prompts[0]
    assert "".join(map(chr, first.prompt_ids)) == "u:0?;a:0;u:1?;a:"


def test_too_long_and_not_to_be_skipped_is_an_error(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "abc", "answer": "d"})
    config = DataConfig(max_prompt_length=2, filter_overlong_prompts=False)
    with pytest.raises(UserError, match=r"a\.jsonl:1: 3 tokens > data\.max_prompt_length 2"):
        load_prompts([file], config, Characters())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{not json\n", "a.jsonl:1: not JSON"),
        ("a.jsonl", b"[1]\n", "a row is an object, not list"),
        ("a.jsonl", b"[" * 200_000 + b"\n", "a.jsonl:1: not JSON"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "a.jsonl:1: not JSON"),
        ("a.parquet", b"PAR0", "not a readable parquet file"),
        ("a.tsv", b"prompt\n", "cannot read .tsv (want .csv, .json, .jsonl or .parquet, or"),
    ],
)
def test_an_unreadable_file_is_one_clear_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(file_rows([file]))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_small_file_that_unpacks_to_gigabytes_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dictionary: bool
) -> None:
    monkeypatch.setattr(parquet_reader, "CHUNK_BYTES", 1 << 20)
    file = tmp_path / "bomb.parquet"
    rows = arrow.Table.from_pylist([{"prompt": "2+2?" * (1 << 20), "answer": "4"}])
    parquet.write_table(rows, file, compression="zstd", use_dictionary=dictionary)
    assert file.stat().st_size < 20_000
    with pytest.raises(UserError, match=r"column 'prompt' of row group 0 has .* would unpack to 4"):
        next(file_rows([file]))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.parquet: no such file"):
        list(file_rows([tmp_path / "gone.parquet"]))


def test_a_reader_from_outside_the_tree_reads_the_files_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_readers").mkdir()
    (tmp_path / "my_readers" / "colon.py").write_text(
        "def read(path):\n"
        "    for number, line in enumerate(path.read_text().splitlines()):\n"
        "        prompt, answer = line.split(':')\n"
        "        yield number, {'prompt': prompt, 'answer': answer}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "a.txt"
    file.write_text("1+1?:2\n2+2?:4\n")
    config = DataConfig(reader="my_readers.colon")
    prompts = load_prompts([file], config, Characters()).prompts
    assert [prompt.ground_truth for prompt in prompts] == ["2", "4"]
    with pytest.raises(UserError, match=r"a\.txt:0: 4 tokens"):
        config = DataConfig(reader="my_readers.colon", max_prompt_length=2)
        strict = config.model_copy(update={"filter_overlong_prompts": False})
        load_prompts([file], strict, Characters())


def test_an_unknown_reader_is_one_line_with_the_known_ones(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "?"})
    with pytest.raises(UserError, match=r"no readers named 'jsonp'; did you mean 'json"):
        load_prompts([file], DataConfig(reader="jsonp"), Characters())


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


@pytest.mark.parametrize(
    ("key", "option", "columns", "cure"),
    [
        ("prompt", "data.prompt_key", ["question", "answer"], "data.prompt_key=question"),
        ("prompt", "data.prompt_key", ["id", "problem", "solution"], "data.prompt_key=problem"),
        ("prompt", "data.prompt_key", ["Prompt", "x"], "data.prompt_key=Prompt"),
        ("prompt", "data.prompt_key", ["id", "x"], None),
        ("qestion", "data.prompt_key", ["question", "answer"], "data.prompt_key=question"),
        ("answer", "data.answer_key", ["problem", "solution"], "data.answer_key=solution"),
        ("answer", "data.answer_key", ["prompt", "anwser"], "data.answer_key=anwser"),
        ("response", "response_key", ["prompt", "completion"], "response_key=completion"),
        ("chosen", "chosen_key", ["prompt", "preferred", "rejected"], "chosen_key=preferred"),
    ],
)
def test_a_missing_column_is_told_with_the_option_that_names_the_right_one(
    key: str, option: str, columns: list[str], cure: str | None
) -> None:
    said = row_lacks(key, option, dict.fromkeys(columns, "1"))
    has = f"the row has {', '.join(columns)}"
    assert said == (has if cure is None else f"{has}: set {cure}")
