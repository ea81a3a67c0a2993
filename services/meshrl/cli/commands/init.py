"""`meshrl init`: a recipe to begin with, a copy of one of meshrl's, or one for a model, data and a reward."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from meshrl.cli.options import PATH
from meshrl.common import plugins
from meshrl.common.files import replace_file
from meshrl.common.plain_text import say
from meshrl.config.explain import walk
from meshrl.config.loading import Written, in_yaml, load_recipe, recipe_yaml
from meshrl.config.machine import ThisMachine
from meshrl.config.recipe import Recipe
from meshrl.contract.errors import MeshError, UserError
from meshrl.rewardd.pool.rule import REWARDS

FOLDER = Path("recipes")
"""The recipes' folder: beside the packages in a wheel, at the root of a checkout."""
DEMO = Path("demo") / "recipe.yaml"
ELSEWHERE = ("openai_agent",)
"""Recipes that name files outside of their folders."""


def recipes() -> Path:
    """The folder of the recipes."""
    here = Path(__file__).resolve()
    packaged = here.parents[2] / FOLDER
    return packaged if packaged.is_dir() else here.parents[4] / FOLDER


def templates() -> list[str]:
    """The folders of recipes that can be copied."""
    found = sorted({path.parent.name for path in recipes().glob("*/*.yaml")})
    return [name for name in found if name not in ELSEWHERE]


def copy_template(name: str, target: Path) -> list[Path]:
    """Copy a folder of recipes to `target`. Returns the files.

    Raises:
        UserError: there is no such folder, or a file is in the way.
    """
    if name not in templates():
        raise UserError(
            f"no recipe {name!r} comes with meshrl; there are: {', '.join(templates())}"
        )
    sources = [path for path in sorted((recipes() / name).iterdir()) if path.is_file()]
    copies = [target / source.name for source in sources]
    for copy in copies:
        if copy.exists():
            raise UserError(f"{copy} already exists")
    target.mkdir(parents=True, exist_ok=True)
    for source, copy in zip(sources, copies, strict=True):
        replace_file(copy, source.read_bytes())
    return copies


SKELETON = r'''"""How good a response is."""

from __future__ import annotations

import re
from typing import Any

WORD = re.compile(r"[-+]?(?:[\d.][\d.,/^*]*)?\d(?!\w)|[\w']+")
"""A number with its sign and all that belongs to it, or a word."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float | dict[str, float]:
    """1 where the last words of the response are the answer, else 0. Change it to what you want to see more of.

    Whole words and numbers count: neither `12` nor `not 2` is `2`, and `It is 2.` is.

    Args:
        data_source: Of the row, where it names one.
        solution_str: What the policy said, special tokens left out.
        ground_truth: The row's answer.
        extra_info: Whatever else the row brings.

    Returns:
        The reward; a dictionary has it as `score`, and its other numbers become metrics.
    """
    wanted, said = words(str(ground_truth)), words(solution_str)
    if ground_truth is None or not wanted or wanted == ["nan"]:
        raise ValueError(f"this row has no answer: {ground_truth!r}")
    before = said[: -len(wanted)][-1:]
    right = said[-len(wanted) :] == wanted and before not in (["not"], ["isn't"], ["or"])
    return {"score": float(right), "length": float(len(solution_str))}


def words(text: str) -> list[str]:
    """The words and numbers of a text in lower case, thousands without commas."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.casefold().replace("\u2212", "-"))
    return WORD.findall(text)
'''
LONGEST = 512
"""Tokens of a prompt, and of a response, where the model takes that many."""
HEADING = """\
# meshrl config check {path}            does it start? (it did when `meshrl init` wrote it)
# meshrl up {path} rollout.n=16         train; any key can be overridden; Ctrl-C saves, the same command continues
# meshrl config explain KEY             what a key means; without one: all of them
"""


@click.command()
@click.argument(
    "words",
    nargs=-1,
    metavar="[TEMPLATE] [KEY=VALUE]...",
)
@click.option("--to", type=PATH, help="The recipe's file (my.yaml); with TEMPLATE: a folder.")
@click.option("--model", type=PATH, help="A Hugging Face directory.")
@click.option("--train", type=PATH, multiple=True, help="Prompts; may be given several times.")
@click.option("--val", type=PATH, multiple=True, help="Held-out prompts.")
@click.option("--reward", help="A Python file, written if it does not exist; or a built-in name.")
@click.option("--check/--no-check", default=True, help="--no-check: what it names is elsewhere.")
def init(
    words: tuple[str, ...],
    to: Path | None,
    model: Path | None,
    train: tuple[Path, ...],
    val: tuple[Path, ...],
    reward: str | None,
    check: bool,
) -> None:
    """Write a recipe for your model, data and reward that starts as it is, or copy TEMPLATE, a recipe of meshrl's.

    On a terminal it asks for what the options leave open. KEY=VALUE goes into the recipe.
    """
    names = [word for word in words if "=" not in word]
    if names:
        if len(names) > 1 or len(words) > 1 or model or train or val or reward:
            raise UserError(
                f"{' '.join(words)}: a template is copied as it is: want one name and at most --to"
            )
        _copy(names[0], to)
        return
    to = to or Path("my.yaml")
    if to.exists():
        raise UserError(f"{to} already exists; --to names another file")
    model, train, val = _asked(model, train, val)
    reward = reward or _ask("Reward (a Python file, or a built-in name)", f"{to.stem}_reward.py")
    texts = _texts(to, model, train, val, reward, words)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    try:
        if check:
            load_recipe(to)
    except MeshError:
        for path in texts:
            path.unlink()
        say("nothing is written, for it would not start:", err=True)
        raise
    for path in texts:
        say(f"{path} is written")
    say(f"next: meshrl up {to}")


def _copy(name: str, to: Path | None) -> None:
    copies = copy_template(name, to or FOLDER / name)
    for path in copies:
        say(f"{path} is written")
    first = min(copies, key=lambda path: (path.suffix != ".md", path.suffix != ".yaml"))
    say(f"next: {first} says what it needs")


def _asked(
    model: Path | None, train: tuple[Path, ...], val: tuple[Path, ...]
) -> tuple[Path, tuple[Path, ...], tuple[Path, ...]]:
    """The answer of an option, or of a person. Raises UserError: neither answers."""
    if (model is None or not train) and not sys.stdin.isatty():
        raise UserError(
            "want --model DIRECTORY and --train FILE, or a template that comes with meshrl:"
            f" {', '.join(templates())}"
        )
    if model is None:
        model = Path(click.prompt("Model (a Hugging Face directory)"))
    if not train:
        train = tuple(map(Path, click.prompt("Prompts (.jsonl or .parquet)").split()))
        val = val or tuple(map(Path, _ask("Held-out prompts (none: no evaluation)", "").split()))
    return model, train, val


def _ask(question: str, default: str) -> str:
    if not sys.stdin.isatty():
        return default
    return str(click.prompt(question, default=default, show_default=bool(default)))


def _texts(
    to: Path,
    model: Path,
    train: tuple[Path, ...],
    val: tuple[Path, ...],
    reward: str,
    overrides: tuple[str, ...],
) -> dict[Path, str]:
    """The files to write. Raises UserError."""
    texts: dict[Path, str] = {}
    known = list(plugins.known(REWARDS))
    scored: dict[str, Any] = {"functions": [{"name": reward}]}
    if reward not in known:
        file = Path(reward)
        if file.suffix != ".py":
            raise UserError(
                f"--reward {reward}: want a Python file (.py) or one of {', '.join(known)}"
            )
        scored = {"custom_reward_function": {"path": reward}}
        if not file.exists():
            texts[file] = SKELETON
    data: dict[str, Any] = {"train_files": [str(path) for path in train]}
    if val:
        data["val_files"] = [str(path) for path in val]
    positions = ThisMachine().json(model / "config.json").get("max_position_embeddings")
    half = min(LONGEST, positions // 2) if isinstance(positions, int) else LONGEST
    data |= {"train_batch_size": 16, "max_prompt_length": half, "max_response_length": half}
    recipe = {
        "model": {"path": str(model)},
        "data": data,
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"optim": {"lr": 1e-6}},
        "rollout": {"name": "torch", "n": 8, "workers": 1},
        "reward": scored,
        "queue": {"max_staleness": 1},
        "trainer": {"total_training_steps": 100, "save_freq": 20}
        | ({"test_freq": 10, "val_before_train": True} if val else {}),
    }
    with TemporaryDirectory() as folder:
        draft = Path(folder) / "recipe.yaml"
        draft.write_text(recipe_yaml(recipe))
        tree = Written.read(draft, overrides).tree
    docs = {key.path: key.doc for key in walk(Recipe)}
    return texts | {to: "\n".join([HEADING.format(path=to), *_lines(tree, docs)]) + "\n"}


def _lines(
    tree: Mapping[str, Any], docs: Mapping[tuple[str, ...], str], at: tuple[str, ...] = ()
) -> Iterator[str]:
    """YAML with what each key means behind it."""
    for name, value in tree.items():
        path = (*at, name)
        indent = "  " * len(at)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, docs, path)
            continue
        meaning = docs.get(path, "").partition(". ")[0].rstrip(".")
        yield f"{indent}{name}: {in_yaml(value)}" + (f"  # {meaning}" if meaning else "")
