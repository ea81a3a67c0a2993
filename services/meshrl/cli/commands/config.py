"""`meshrl config`: check, show and explain recipes. Imports no torch."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from meshrl.cli.options import (
    PATH,
    accept_changes_option,
    json_option,
    recipe_argument,
)
from meshrl.cli.root import uncollected
from meshrl.common import plugins
from meshrl.common.files import replace_file
from meshrl.common.plain_text import counted, say, say_error, say_json
from meshrl.config import Recipe, load_recipe
from meshrl.config.checks import imported, names_at
from meshrl.config.explain import Key, config_of, defined_at, nearest, walk
from meshrl.config.loading import Written, recipe_yaml
from meshrl.config.machine import AssumedMachine, Assumptions, ThisMachine
from meshrl.config.placement import place
from meshrl.config.run_record import begin
from meshrl.config.stages import options_class
from meshrl.contract.errors import ConfigError, UserError
from meshrl.rpc.exit_codes import Exit


@click.command("from-verl", context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, metavar="[-- VERL_COMMAND...]")
@click.option(
    "--script",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A launch script or a pasted command; - is stdin. It runs in a sandbox, and what it starts is not started.",
)
@click.option(
    "--yaml", "files", type=PATH, multiple=True, help="A YAML of verl; may be given several times."
)
@click.option(
    "--env",
    "passed",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable that the script may see, besides HOME, LANG, PWD and USER; may be given several times.",
)
@click.option("-o", "--output", type=PATH, help="Write the recipe here; stdout if not given.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option(
    "--strict", is_flag=True, help="Write nothing and exit with 2 when any key is refused."
)
@json_option
def from_verl(
    command: tuple[str, ...],
    script: Path | None,
    files: tuple[Path, ...],
    passed: tuple[str, ...],
    output: Path | None,
    force: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Translate a verl run into a recipe, and say what became of every key.

    The command stands after `--`, as in `meshrl config from-verl -o my.yaml -- python3 -m verl.trainer.main_ppo
    algorithm.adv_estimator=grpo ...`, in a --script (then its arguments stand after `--`), or its keys in a --yaml;
    overrides win over YAML.
    """
    if not command and script is None and not files:
        raise UserError(
            "nothing to translate: give a verl command after --, a --script or a --yaml"
        )
    if output is not None and output.exists() and not force:
        raise UserError(f"{output} already exists; choose another, or give --force")
    from meshrl.verl import written
    from meshrl.verl.migrate import migrate
    from meshrl.verl.programs import VerlCommand, VerlProgram, command_of
    from meshrl.verl.rules import KeyStatus
    from meshrl.verl.scripts import external_modules, seen, started

    others: list[str] = []
    environment = seen(os.environ, passed)
    text = " ".join(command) if script is None else _text(script)
    environment |= external_modules(text)
    if script is not None:
        path = None if str(script) == "-" else script
        ours, others = started(text, environment, path, command)
    else:
        ours = command_of(command) or VerlCommand(name="", arguments=command, program=VerlProgram())
        named = files or ours.program.instead or any("=" in word for word in ours.arguments)
        if not named:
            raise UserError(
                f"{' '.join(command)} names no key of verl's: want its command after --, or --script FILE (-: stdin)"
            )
    name = output.stem if output is not None else "migrated"
    migration = migrate(ours.arguments, files, name=name, started=ours, environment=environment)
    for other in others:
        say(f"the script also starts {other}: not translated", err=True)
    refused = len(migration.of(KeyStatus.REFUSED))
    # The recipe owns stdout where it has no file.
    if as_json:
        say_json(written.as_json(migration), err=output is None)
    else:
        for line in written.report(migration):
            say(line, err=output is None)
    if refused and strict:
        say_error(f"{counted(refused, 'key is', 'keys are')} refused; nothing was written")
        sys.exit(Exit.USER_ERROR)
    if output is None:
        say(written.recipe_text(migration).rstrip("\n"), lines=True)
        return
    replace_file(output, written.recipe_text(migration))
    if not as_json:
        check = f"check it with `meshrl config check {output}`, run it with `meshrl up {output}`"
        tune = f"run it with `meshrl sft {output}`"
        say(f"{output}: {tune if ours.program.sft else check}")


def _text(script: Path) -> str:
    if str(script) == "-":
        return sys.stdin.read()
    try:
        return script.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{script}: cannot be read: {reason}") from error


@click.group()
def config() -> None:
    """Check, show and explain recipes; make one from a verl run."""


config.add_command(from_verl)


@config.command()
@recipe_argument
@click.option(
    "--assume",
    type=click.Path(path_type=Path),
    help="A YAML file of what another machine has: gpus, gpu_memory_gib, packages, programs, models, rows, files.",
)
@accept_changes_option
def check(
    recipe: Path, overrides: tuple[str, ...], assume: Path | None, accept_changes: bool
) -> None:
    """Say whether a recipe would start: keys, files and what stands in them, options, packages, sizes that must fit.

    Of a run that has begun: also whether it would continue, and what was changed since.

    `meshrl up` checks the same before it starts anything.
    """
    machine = ThisMachine()
    if assume is not None:
        assumed = Written.read(assume, ()).as_config(Assumptions)
        for line in assumed.lines():
            say(f"assumed: {line}")
        machine = AssumedMachine(assumed)
    _say_imports(recipe, overrides)
    with uncollected():
        loaded = load_recipe(recipe, overrides, machine=machine)
    placement = place(loaded, machine)
    lines = list(placement.lines())
    if assume is None:
        lines += begin(placement.recipe, accept_changes=accept_changes, writes=False)
    for line in lines:
        say(line)
    say(f"{recipe} is good: run {loaded.run.name!r}, files under {loaded.run.path}")


@config.command()
@recipe_argument
@json_option
def show(recipe: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print a recipe with every default and override filled in."""
    _say_imports(recipe, overrides)
    fields = load_recipe(recipe, overrides, check=False, hub=False).model_dump(mode="json")
    text = json.dumps(fields, indent=2) if as_json else recipe_yaml(fields)
    say(text.rstrip(), lines=True)


@config.command()
@click.argument("key", required=False)
@json_option
def explain(key: str | None, as_json: bool) -> None:
    """Say what a key means, its type, its default and where it is defined; all keys if none is given.

    Of a word that is no key: the keys that have it in their names or their explanations.
    """
    keys = {found.dotted: found for found in walk(Recipe)}
    if key is not None and key not in keys and key.startswith("stages."):
        keys |= _options(key)
    if key is not None and key not in keys and (speaking := _search(keys.values(), key)):
        if as_json:
            say_json(json.dumps([_facts(one) for one in speaking], indent=2))
        else:
            for one in speaking:
                say(_short(one))
        return
    if key is not None and key not in keys:
        near = _misspelt(keys, key) or nearest(Recipe, tuple(key.split(".")))
        raise ConfigError(
            f"no such key {key[:80]!r}"
            + (f"; did you mean {near!r}?" if near else f"; known: {_sections()}")
        )
    if as_json:
        chosen = [found for dotted, found in keys.items() if key in (None, dotted)]
        say_json(json.dumps([_facts(found) for found in chosen], indent=2))
    elif key is None:
        for found in keys.values():
            say(_short(found))
    else:
        say(_long(keys[key]), lines=True)
        for dotted, found in keys.items():
            if dotted.rpartition(".")[0] == key:
                say(f"  {_short(found, dotted)}")


def _say_imports(recipe: Path, overrides: Sequence[str]) -> None:
    """Name the modules of the user's whose code a check runs, before it does."""
    found = {name: plugins.find(name) for name in imported(Written.read(recipe, overrides).tree)}
    if found:
        places = (
            f"{name} ({spec.origin if spec else 'not found'})" for name, spec in found.items()
        )
        say(f"this imports {', '.join(places)}", err=True)


def _search(keys: Iterable[Key], word: str) -> list[Key]:
    """Keys with a word in their names, then those whose explanation has it.

    Of a dotted path, such as another framework's, only explanations are searched, for its last part.
    """
    section, _, word = word.lower().rpartition(".")
    if not word.replace("_", "").isalnum():
        return []
    named = [] if section else [key for key in keys if word in key.dotted.lower()]
    spoken = word.replace("_", " ")
    if section and " " not in spoken:
        return []
    texts = {key.dotted: key.doc.lower().replace("-", " ").replace("_", " ") for key in keys}
    return named + [key for key in keys if key not in named and spoken in texts[key.dotted]]


def _misspelt(keys: Iterable[str], word: str) -> str | None:
    """The first key with a part that is spelt nearly as this word."""
    parts = {part: key for key in reversed(list(keys)) for part in re.split(r"[._]", key)}
    close = difflib.get_close_matches(word.lower(), list(parts), n=1, cutoff=0.85)
    return parts[close[0]] if close else None


def _options(key: str) -> dict[str, Key]:
    """The options of the stage whose module follows `stages.`, as in `stages.my_package.my_stage`."""
    try:
        options = options_class(key.removeprefix("stages."))
    except ConfigError:
        return {}
    at = ("stages", "<name>", "options")
    found = {".".join((key, one.path[-1])): one for one in walk(options, at)} if options else {}
    (section,) = [one for one in walk(Recipe) if one.path == at]
    return {key: section, **found}


def _sections() -> str:
    return ", ".join(Recipe.model_fields)


def _short(key: Key, name: str | None = None) -> str:
    doc = f"  {key.doc}" if key.doc else ""
    if config_of(key.field.annotation) is not None and key.default_text in ("{}", "required"):
        return f"{name or key.dotted}:{doc}"
    return f"{name or key.dotted} = {key.default_text}{doc}"


def _long(key: Key) -> str:
    lines = [key.dotted, f"  {key.doc}" if key.doc else None]
    lines += [f"  type: {key.type_text}", f"  default: {key.default_text}"]
    if names := names_at(key.dotted):
        lines += [f"  names: {', '.join(names)}, or a dotted path"]
    lines += [f"  defined in: {defined_at(key)}"]
    return "\n".join(line for line in lines if line)


def _facts(key: Key) -> dict[str, str | tuple[str, ...]]:
    return {
        "key": key.dotted,
        "doc": key.doc,
        "type": key.type_text,
        "default": key.default_text,
        "names": names_at(key.dotted),
        "defined_in": defined_at(key),
    }
