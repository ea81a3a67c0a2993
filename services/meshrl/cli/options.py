"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from typing_extensions import override

from meshrl.common.plain_text import counted
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, newest_run_dir

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
LIMIT = click.IntRange(0, 10**9)
"""A number of rows; 0: all."""


RUNS = Path("runs")
MARKS = (ADDRESS_BOOK_NAME, "metrics.jsonl", "recipe.yaml", "trajectories")
"""A directory with one of these is a run's."""


def run_at(word: Path) -> Path | None:
    """The directory of the run that is there, or has this name in runs/; None where there is none."""
    for directory in (word, RUNS / word):
        if any((directory / mark).exists() for mark in MARKS):
            return directory
    return None


class _Run(click.Path):
    """A run's directory, or its name in runs/."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        return run_at(path) or path


RUN = _Run(path_type=Path)


def _known() -> Iterator[str]:
    """The names of the runs in runs/."""
    if RUNS.is_dir():
        yield from sorted(path.name for path in RUNS.iterdir() if run_at(path) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """The run that a command is about, as it was named."""

    path: Path | None = None
    """Its directory; None: the newest one here."""
    queue: str | None = None
    """Address of the queue that is asked for the run by its name."""
    name: str | None = None
    """Its name at that queue, or at the directory's queue; None: the name that the directory says."""

    @property
    def directory(self) -> Path:
        """The directory. Raises UserError: it is none of a run. NotFoundError: no run was started here."""
        if self.path is None:
            return newest_run_dir()
        return checked_run(self.path)


def checked_run(path: Path) -> Path:
    """Return `path`. Raises UserError unless it is a run's directory."""
    if run_at(path) == path:
        return path
    if path.is_dir():
        raise UserError(f"{path}: no run's directory: it holds none of {', '.join(MARKS)}")
    known = list(_known())
    some = f" ({counted(len(known), 'run')}: {', '.join(known[:8])}{', …' * (len(known) > 8)})"
    raise UserError(
        f"no run {str(path)!r}: want a run's directory, or its name in {RUNS}/{some if known else ''}"
    )


def names_run(*, queue: bool = False, behind: str = "", word: bool = True) -> Callable[[F], F]:
    """`[RUN]`: which run a command is about. Its function gets it as `named`.

    Args:
        queue: It may be asked for at a queue, too.
        behind: The name of an argument behind it that is not to be left out: `[RUN] TARGET`.
        word: False: no word of its own names it; a `RunGroup` makes an option of the word.
    """

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def command(*context: Any, **given: Any) -> Any:
            if behind:
                *before, given[behind] = _words(given.pop("words"), behind)
                given["run"] = before[0] if before else None
            given["named"] = _named(
                given.pop("run", None),
                given.pop("run_dir"),
                given.pop("run_name", None),
                given.pop("queue", None),
            )
            return function(*context, **given)

        made: Any = command
        if behind:
            metavar = f"[RUN] {behind.upper()}"
            made = click.argument("words", nargs=-1, metavar=metavar)(made)
        elif word:
            made = click.argument("run", type=RUN, required=False)(made)
        if queue:
            name = click.option(
                "--run", "run_name", envvar="MESHRL_RUN", hidden=True, help="RUN at --queue."
            )
            asked = "Ask this queue, which may serve several runs: needs RUN."
            where = click.option("--queue", metavar="HOST:PORT", envvar="MESHRL_QUEUE", help=asked)
            made = where(name(made))
        folder = click.option(
            "--run-dir", type=RUN, envvar="MESHRL_RUN_DIR", hidden=True, help="As RUN."
        )
        return folder(made)  # type: ignore[no-any-return]

    return decorated


def _words(words: tuple[str, ...], behind: str) -> tuple[Any, ...]:
    """A run, if there is one, and the argument behind it."""
    if not 0 < len(words) < 3:
        raise click.UsageError(f"want [RUN] {behind.upper()}, got {' '.join(words) or 'nothing'}")
    run = [RUN.convert(word, None, None) for word in words[:-1]]
    return (*run, words[-1])


def _named(run: Path | None, run_dir: Path | None, name: str | None, queue: str | None) -> NamedRun:
    """The run that a word, `--run-dir` and `--run` name; an option counts before the environment."""
    source = click.get_current_context().get_parameter_source
    if run is not None and source("run_dir") is ParameterSource.COMMANDLINE:
        raise UserError(f"RUN and --run-dir are two names of a run: {run} and {run_dir}; give one")
    path = run if run is not None else run_dir
    if source("run_name") is not ParameterSource.COMMANDLINE and run is not None:
        name = None
    if queue is not None:
        return NamedRun(queue=queue, name=name if name or path is None else path.name)
    if path is None and name is not None and (path := run_at(Path(name))) is not None:
        name = None
    return NamedRun(path=path, name=name)


class Finite(click.FloatRange):
    """A number in a range; `nan`, which compares with nothing, and `inf` are none."""

    name = "number"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number

    @override
    def _describe_range(self) -> str:
        return "" if self.min is self.max is None else super()._describe_range()


def recipe_argument(function: F) -> F:
    """`RECIPE [KEY=VALUE ...]`."""
    recipe = click.argument("recipe", type=PATH, envvar="MESHRL_RECIPE")
    return recipe(overrides_argument(function))


class RunGroup(click.Group):
    """`[RUN] COMMAND`, with the group's options behind the command as well: a person does not know whose they are."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("subcommand_metavar", "[RUN] [COMMAND] [ARGS]...")
        super().__init__(*arguments, **options)

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Bring the group's options that have a value to the front; a first word that is no command becomes one."""
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
        named = next((word for word in rest if not word.startswith("-")), None)
        if named is not None and named not in self.commands:
            asked = {word.partition("=")[0] for word in front}
            if "--queue" not in asked and run_at(Path(named)) is None:
                ctx.fail(f"{named!r} is not a run here, and no command: {', '.join(self.commands)}")
            if "--run-dir" in asked:
                ctx.fail(f"{named} and --run-dir both name a run: give one")
            rest.remove(named)
            front += ["--run-dir", named]
        return super().parse_args(ctx, front + rest)


def overrides_argument(function: F) -> F:
    """`[KEY=VALUE ...]`."""
    return click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)


def json_option(function: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(
        function
    )


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
        help="Continue with other data, another model, reward, program or seed than the run began with.",
    )(function)
