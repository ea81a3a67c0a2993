"""A migrated recipe as YAML with a comment where a number was converted, and the report of every key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from meshrl.common.plain_text import harmless
from meshrl.config.explain import value_text
from meshrl.config.loading import in_yaml
from meshrl.verl.migrate import Finding, Migration
from meshrl.verl.rules import KeyStatus

HEADINGS = {
    KeyStatus.MAPPED: "mapped",
    KeyStatus.IGNORED: "ignored: no meaning here, or only speed and memory",
    KeyStatus.REFUSED: "refused: the recipe was made without these",
}


def recipe_text(migration: Migration) -> str:
    """The recipe's YAML, sections in the order of a recipe."""
    lines = [
        "# From a verl configuration: `meshrl config from-verl`. Where verl's default is another than ours, it is",
        "# written down; `conventions: verl` keeps verl's numbers where ours differ.",
    ]
    for found in migration.of(KeyStatus.REFUSED):
        lines.append(harmless(f"# REFUSED {found.key}={value_text(found.value)}: {found.note}"))
    sections = {
        name: migration.tree[name]
        for name in migration.config.model_fields
        if name in migration.tree
    }
    lines += _lines(sections, (), migration)
    return "\n".join(lines) + "\n"


def _lines(tree: Mapping[str, Any], at: tuple[str, ...], migration: Migration) -> Iterator[str]:
    indent = "  " * len(at)
    for key, value in tree.items():
        where = (*at, key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{in_yaml(key)}:"
            yield from _lines(value, where, migration)
            continue
        note = migration.comments.get(where)
        comment = f"  # {harmless(note)}" if note else ""
        yield f"{indent}{in_yaml(key)}: {in_yaml(value)}{comment}"


def report(migration: Migration) -> Iterator[str]:
    """One line per key that was given, by what became of it."""
    for status, heading in HEADINGS.items():
        found = migration.of(status)
        if found:
            yield f"{heading} ({len(found)})"
            yield from (f"  {_line(one)}" for one in found)
    if migration.to_do:
        yield f"before it starts here ({len(migration.to_do)})"
        yield from (f"  {said}" for said in migration.to_do)


def _line(found: Finding) -> str:
    ours = ", ".join(f"{key}={value_text(value)}" for key, value in found.settings.items())
    value = value_text(found.value)
    said = f"{found.key}={value if len(value) <= 60 else value[:57] + '...'}"
    parts = [f" -> {ours}" if ours else "", f": {found.note}" if found.note else ""]
    return said + "".join(parts)


def as_json(migration: Migration) -> str:
    """The report for programs."""
    fields = [
        {
            "key": found.key,
            "value": found.value,
            "status": found.status.value,
            "settings": dict(found.settings),
            "note": found.note,
        }
        for found in migration.findings
    ]
    return json.dumps({"keys": fields, "to_do": list(migration.to_do)}, indent=2, default=str)
