"""A recipe to begin with: copied, or made for a model, data and a reward, and then it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.config import load_recipe

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """In a directory with what a recipe names."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "max_position_embeddings": 512,
            }
        )
    )
    for name in ("model.safetensors", "tokenizer.json"):
        Path("model", name).write_text("{}")
    Path("train.jsonl").write_text('{"prompt": "2+3?", "answer": "5"}\n' * 32)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["init", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


MINE = ("--model", "model", "--train", "train.jsonl")


def test_a_recipe_for_a_model_data_and_a_reward_starts_as_it_is(init: Command) -> None:
    code, said, _ = init(*MINE, "--val", "train.jsonl", "rollout.n=4")
    assert (code, said.splitlines()[-1]) == (0, "next: meshrl up my.yaml")
    recipe = load_recipe(Path("my.yaml"))
    assert recipe.rollout.n == 4
    assert recipe.data.max_response_length == 256  # half of what the model takes
    assert recipe.reward.custom_reward_function.path == Path("my_reward.py")
    assert "n: 4  # " in Path("my.yaml").read_text()


def test_a_built_in_reward_needs_no_file(init: Command) -> None:
    assert init(*MINE, "--reward", "gsm8k", "--to", "sums.yaml")[0] == 0
    assert [one.name for one in load_recipe(Path("sums.yaml")).reward.functions] == ["gsm8k"]
    assert not list(Path().glob("*.py"))


def test_a_recipe_that_would_not_start_is_not_written(init: Command) -> None:
    code, _, said = init(*MINE, "data.prompt_key=question")
    assert code == 2
    assert "no 'question' (data.prompt_key); the row has prompt, answer" in said
    assert not Path("my.yaml").exists() and not Path("my_reward.py").exists()


def test_an_override_that_is_none_leaves_nothing_behind(init: Command) -> None:
    assert init(*MINE, "rollout..n=4")[0] == 2
    assert not Path("my.yaml").exists() and not Path("my_reward.py").exists()


def test_a_recipe_for_another_machine_is_written_unchecked(init: Command) -> None:
    assert init("--model", "/big", "--train", "/far.jsonl", "--no-check")[0] == 0
    assert load_recipe(Path("my.yaml"), check=False).model.path == Path("/big")


def test_a_file_of_somebody_is_not_overwritten(init: Command) -> None:
    Path("my.yaml").write_text("mine")
    Path("my_reward.py").write_text("mine too")
    assert "my.yaml is there already" in init(*MINE)[2]
    init(*MINE, "--to", "my2.yaml", "--reward", "my_reward.py", "--no-check")
    assert Path("my.yaml").read_text() == "mine"
    assert Path("my_reward.py").read_text() == "mine too"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "want --model DIRECTORY and --train FILE, or a template that comes with meshrl: alg"),
        (("nosuch",), "no recipe 'nosuch' comes with meshrl; there are: algorithms, demo, "),
        (("gsm8k", "rollout.n=2"), "a template is copied as it is"),
        ((*MINE, "--reward", "nosuch"), "--reward nosuch: want a Python file (.py) or one of code"),
    ],
)
def test_what_is_missing_or_unknown_is_one_line(
    init: Command, arguments: tuple[str, ...], said: str
) -> None:
    code, _, error = init(*arguments)
    assert code == 2 and len(error.splitlines()) == 1
    assert said in error


def test_a_recipe_that_comes_with_meshrl_is_copied_to_where_its_paths_hold(init: Command) -> None:
    code, said, _ = init("gsm8k")
    assert code == 0
    assert load_recipe(Path("recipes/gsm8k/recipe.yaml"), check=False).run.name == "gsm8k"
    assert "recipes/gsm8k/prepare.py is written" in said
    assert "is there already" in init("gsm8k")[2]


def test_on_a_terminal_it_asks(init: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["model", "train.jsonl", "", "sums.py"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.prompt", lambda *_, **__: next(answers))
    assert init()[0] == 0
    assert Path("sums.py").read_text().startswith('"""How good')
    assert not load_recipe(Path("my.yaml")).data.val_files
