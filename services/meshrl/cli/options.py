"""Arguments and options that several commands share."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

F = TypeVar("F", bound=Callable[..., Any])
Completion: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem[Any]]]
PATH = click.Path(path_type=Path)


class _Run(click.Path):
    """A run's directory, or its name in runs/."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        named = Path("runs") / path
        return named if not path.exists() and named.is_dir() else path


RUN = _Run(path_type=Path)


class Finite(click.FloatRange):
    """A number in a range; `nan`, which compares with nothing, and `inf` are none."""

    name = "number"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


def recipe_argument(function: F) -> F:
    """`RECIPE [KEY=VALUE ...]`."""
    recipe = click.argument("recipe", type=PATH, envvar="MESHRL_RECIPE")
    return recipe(overrides_argument(function))


class OptionsAnywhere(click.Group):
    """Takes its options behind the name of a command as well: a person does not know whose they are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Bring the group's options that have a value to the front."""
        own = {
            name
            for parameter in self.params
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for name in parameter.opts
        }
        front, rest, words = list[str](), list[str](), iter(args)
        for word in words:
            if word == "--":
                rest += [word, *words]
            elif word.partition("=")[0] not in own:
                rest.append(word)
            else:
                front += [word] if "=" in word else [word, *islice(words, 1)]
        return super().parse_args(ctx, front + rest)


def overrides_argument(function: F) -> F:
    """`[KEY=VALUE ...]`."""
    return click.argument(
        "overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=completed("overrides")
    )(function)


def completed(name: str) -> Completion:
    """The function of `meshrl.cli.completion`, which is imported when the tab key is pressed."""

    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem[Any]]:
        function: Completion = getattr(importlib.import_module("meshrl.cli.completion"), name)
        return function(context, parameter, incomplete)

    return complete


def json_option(function: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(
        function
    )


def queue_options(function: F, help: str = "Ask this queue.") -> F:
    """How to find the queue of a mesh."""
    run_dir = click.option(
        "--run-dir",
        type=RUN,
        envvar="MESHRL_RUN_DIR",
        help="The run's directory; the newest runs/*/mesh.json if not given.",
    )
    return run_dir(
        click.option("--queue", metavar="HOST:PORT", envvar="MESHRL_QUEUE", help=help)(function)
    )


def mesh_options(function: F) -> F:
    """How to find a running mesh."""
    run = click.option("--run", metavar="NAME", envvar="MESHRL_RUN", help="The run's name.")
    return queue_options(run(function), "Ask this queue; needs --run.")


def preload_option(function: F) -> F:
    """`--preload / --no-preload`."""
    return click.option(
        "--preload/--no-preload",
        default=True,
        envvar="MESHRL_PRELOAD",
        show_default=True,
        help="Fork services from a process that has imported what they do; --no-preload starts each afresh.",
    )(function)


def accept_changes_option(function: F) -> F:
    """`--accept-changes`."""
    return click.option(
        "--accept-changes",
        is_flag=True,
        envvar="MESHRL_ACCEPT_CHANGES",
        help="Go on with other data, another model, reward, program or seed than the run began with.",
    )(function)
