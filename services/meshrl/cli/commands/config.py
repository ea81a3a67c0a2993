"""`meshrl config`: check, show and explain recipes. Imports no torch."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from meshrl.cli.commands.from_verl import from_verl
from meshrl.cli.options import (
    accept_changes_option,
    completed,
    json_option,
    recipe_argument,
)
from meshrl.cli.root import uncollected
from meshrl.common import plugins
from meshrl.common.plain_text import say, say_json
from meshrl.config import Recipe, load_recipe
from meshrl.config.explain import Key, config_of, defined_at, nearest, walk
from meshrl.config.loading import Written, recipe_yaml
from meshrl.config.machine import AssumedMachine, Assumptions, ThisMachine
from meshrl.config.placement import place
from meshrl.config.plugin_checks import imported, names_at
from meshrl.config.run_record import begin
from meshrl.config.stages import options_class
from meshrl.contract.errors import ConfigError


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

    Of a run that has begun: also whether it would go on, and what was changed since.

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
@click.argument("key", required=False, shell_complete=completed("keys"))
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
            f"no such key {key!r}"
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
