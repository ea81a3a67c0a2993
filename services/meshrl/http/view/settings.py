"""The configuration of a run: its keys, their meaning, where they differ from defaults and from another run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import PydanticUndefined, to_jsonable_python

from meshrl.common import bounded_yaml
from meshrl.common.config import Config
from meshrl.config.explain import config_of, walk
from meshrl.config.recipe import RECIPE_NAME, Recipe
from meshrl.contract.errors import UserError

PASSWORD = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
"""User and password in a URL."""


def compared(run_dir: Path, other_dir: Path | None) -> list[dict[str, Any]]:
    """The keys of a run in the order of its recipe, and of `other_dir` if there is one; `null` where one has none.

    Raises:
        UserError: a recipe cannot be read.
    """
    own = _settings(run_dir)
    other = _settings(other_dir) if other_dir is not None else {}
    documented = {key.dotted: key for key in walk(Recipe)}
    defaults = dict(_flat(_defaults(Recipe), ""))
    entries = []
    for name in dict.fromkeys((*own, *other)):
        key = documented.get(name)
        value, default = own.get(name), defaults.get(name)
        entries.append(
            {
                "key": name,
                "value": value,
                "default": default,
                "changed": value is not None and value != default,
                "other": other.get(name),
                "differs": other_dir is not None and value != other.get(name),
                "doc": key.doc if key else "",
            }
        )
    return entries


def _settings(run_dir: Path) -> Mapping[str, str]:
    """Dotted key to its value as JSON. Raises UserError."""
    path = run_dir / RECIPE_NAME
    try:
        tree = bounded_yaml.load(path.read_text())
        if not isinstance(tree, dict):
            raise UserError(f"{path} is not a recipe: want a mapping of sections")
        return dict(_flat(tree, ""))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        # An alias of YAML may contain itself: ValueError of json, or RecursionError.
        raise UserError(f"{path} is not a recipe: {' '.join(str(error).split())[:200]}") from error


def _defaults(section: type[Config]) -> dict[str, Any]:
    """The defaults of a section, without the keys that must be written."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        default, inner = field.get_default(call_default_factory=True), config_of(field.annotation)
        if default is not PydanticUndefined:
            found[name] = to_jsonable_python(default, fallback=str)
        elif inner is not None:
            found[name] = _defaults(inner)
    return found


def _flat(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return PASSWORD.sub("***", text)
