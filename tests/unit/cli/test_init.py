"""A recipe to begin with: copied, or made for a model, data and a reward, and then it starts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.cli import main
from meshrl.cli.commands.init import SKELETON
from meshrl.config import load_recipe

from ...small_checkpoint import write_tokenizer, write_weights

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
    write_weights(Path("model/model.safetensors"))
    write_tokenizer(Path("model"))
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


JUDGED = [
    ("It is 2.", "2", 1.0),
    ("#2", "2", 1.0),
    ("**2**", "2", 1.0),
    ("$\\boxed{2}$", "2", 1.0),
    ("-2", "-2", 1.0),
    ("It is 3.14.", "3.14", 1.0),
    ("…#12", "2", 0.0),
    ("not 2", "2", 0.0),
    ("1 or 2", "2", 0.0),
    ("-2", "2", 0.0),
    ("\u22122", "2", 0.0),
    ("1.2", "2", 0.0),
    ("1/2", "2", 0.0),
    ("10^2", "2", 0.0),
    ("H2", "2", 0.0),
    ("2 apples", "2", 0.0),
    ("", "2", 0.0),
]


def of_tutorial() -> str:
    text = (Path(__file__).parents[3] / "docs/tutorial/first-run.md").read_text()
    return text[text.index("import re\n") :].partition("```")[0]


@pytest.mark.parametrize("source", [SKELETON, of_tutorial()], ids=["init", "tutorial"])
def test_the_reward_to_begin_with_compares_whole_words(source: str) -> None:
    module: dict[str, Any] = {}
    exec(source, module)
    for response, truth, score in JUDGED:
        found = module["compute_score"]("", response, truth)
        assert (found["score"] if isinstance(found, dict) else found) == score, response
    for truth in (None, "", float("nan")):
        for response in ("", "x"):
            with contextlib.suppress(ValueError):
                assert module["compute_score"]("", response, truth) == 0.0


def test_the_reward_of_init_reads_several_words_and_thousands() -> None:
    module: dict[str, Any] = {}
    exec(SKELETON, module)
    judged = {"It is new york!": "New York", "so 1,234": "1234", "Yes.": "yes"}
    for response, truth in judged.items():
        assert module["compute_score"]("", response, truth)["score"] == 1.0
    with pytest.raises(ValueError, match="this row has no answer: None"):
        module["compute_score"]("", "x", None)


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
    assert "my.yaml already exists" in init(*MINE)[2]
    init(*MINE, "--to", "my2.yaml", "--reward", "my_reward.py", "--no-check")
    assert Path("my.yaml").read_text() == "mine"
    assert Path("my_reward.py").read_text() == "mine too"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "want --model DIRECTORY and --train FILE, or a template that comes with meshrl: alg"),
        (
            ("nosuch",),
            "no recipe 'nosuch' comes with meshrl; there are: algorithms, containers, demo, ",
        ),
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
    assert "already exists" in init("gsm8k")[2]


def test_on_a_terminal_it_asks(init: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["model", "train.jsonl", "", "sums.py"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.prompt", lambda *_, **__: next(answers))
    assert init()[0] == 0
    assert Path("sums.py").read_text().startswith('"""How good')
    assert not load_recipe(Path("my.yaml")).data.val_files
