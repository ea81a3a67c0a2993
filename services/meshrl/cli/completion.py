"""Tab completion: `meshrl completion SHELL`, and what keys, values and metrics may follow what is typed."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem, get_completion_class

from meshrl.cli.commands.init import templates
from meshrl.common.plain_text import say
from meshrl.config.checks import names_at
from meshrl.config.explain import Key, config_of, walk
from meshrl.config.recipe import METRICS_NAME, Recipe
from meshrl.http.view.metrics import MetricsFile

VARIABLE = "_MESHRL_COMPLETE"
"""Under which click completes instead of running a command."""
WHERE = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/meshrl.fish",
}
PLAIN = "COMPREPLY+=($value)"
NO_SPACE = f"{PLAIN}\n            [[ $value == *= ]] && compopt -o nospace"
"""A key goes on with its value."""
ZSH_SHOWN = '    if [ -n "$completions_with_descriptions" ]; then'
ZSH_NO_SPACE = (
    '    local -a keys=("${(@M)completions:#*=}" "${(@M)completions_with_descriptions:#*=:*}")\n'
    '    local suffix=" "; [[ -n "${keys[*]}" ]] && suffix=""\n'
)
ZSH_ADDS = ("completions_with_descriptions -U", "compadd -U")


@click.command()
@click.argument("shell", type=click.Choice(list(WHERE)))
def completion(shell: str) -> None:
    """Print what makes the tab key complete commands, options, recipe keys, plug-in names and metrics in SHELL.

    In ~/.bashrc: eval "$(meshrl completion bash)"; zsh likewise, fish: meshrl completion fish | source
    """
    from meshrl.cli.root import cli

    kind = get_completion_class(shell)
    assert kind is not None
    text = kind(cli, {}, "meshrl", VARIABLE).source()
    say(_key_without_space(shell, text), lines=True)


def _key_without_space(shell: str, text: str) -> str:
    """The script, such that no space follows a `KEY=`. Fish does so by itself."""
    if shell == "bash":
        return text.replace(PLAIN, NO_SPACE)
    if shell == "zsh":
        text = text.replace(ZSH_SHOWN, ZSH_NO_SPACE + ZSH_SHOWN)
        for command in ZSH_ADDS:
            text = text.replace(command, f'{command} -S "$suffix"')
    return text


def overrides(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[Any]]:
    """`KEY=`, and after that the values that a key may have.

    Bash gives what stands around a `=` as words of their own, other shells as one.
    """
    before: Sequence[str] = context.params.get(parameter.name or "") or ()
    key, equals, value = incomplete.partition("=")
    if equals:
        return list(_values(key, value, f"{key}="))
    if len(before) > 1 and before[-1] == "=":
        return list(_values(before[-2], incomplete, ""))
    if before and not incomplete and before[-1] in _keys():  # click takes the `=` after it away
        return list(_values(before[-1], "", ""))
    return [
        CompletionItem(f"{name}=", help=one.doc.partition(". ")[0] or None)
        for name, one in _keys().items()
        if name.startswith(incomplete)
    ]


def templates_or_overrides(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[Any]]:
    """Recipes that come with meshrl, as the first word, and keys."""
    found = overrides(context, parameter, incomplete)
    if context.params.get(parameter.name or ""):
        return found
    return [CompletionItem(name) for name in templates() if name.startswith(incomplete)] + found


def keys(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[Any]]:
    """Keys of a recipe, sections included."""
    return [CompletionItem(key.dotted) for key in walk(Recipe) if key.dotted.startswith(incomplete)]


def metrics(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[Any]]:
    """Metrics of the run that is named before."""
    file = MetricsFile(Path(context.params.get("run") or ".") / METRICS_NAME)
    file.refresh()
    return [CompletionItem(name) for name in file.names if name.startswith(incomplete)]


def _keys() -> dict[str, Key]:
    """The keys that take a value."""
    return {key.dotted: key for key in walk(Recipe) if config_of(key.field.annotation) is None}


def _values(key: str, typed: str, prefix: str) -> Iterator[CompletionItem[Any]]:
    found = _keys().get(key)
    if found is None:
        return
    known = [*names_at(key), *allowed(found.field.annotation)]
    yield from (CompletionItem(prefix + one) for one in known if one.startswith(typed))
    if not known and Path in (found.field.annotation, *get_args(found.field.annotation)):
        yield CompletionItem("", type="file")


def allowed(annotation: Any) -> list[str]:
    """The values that a type lists, in the words of a recipe; empty where it lists none."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [str(member.value) for member in annotation]
    return [value for part in get_args(annotation) for value in allowed(part)]
