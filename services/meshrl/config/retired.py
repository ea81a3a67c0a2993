"""Recipe keys of earlier versions that are gone: each is dropped with one line, so that old runs stay readable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshrl.config.explain import Loc

KEYS: Final[Mapping[Loc, str]] = {
    ("queue", "compression_dictionary"): "payload is compressed without a dictionary",
    ("queue", "shared_memory_bytes"): "payload always travels over gRPC",
}
"""Keys that are ignored, and what holds instead."""
VALUES: Final[Mapping[Loc, Mapping[object, object]]] = {
    ("queue", "durability"): {"everysec": "always"},
}
"""Values that are replaced, and by what."""


def drop_retired(tree: dict[str, Any], origins: dict[Loc, str]) -> list[str]:
    """Remove retired keys and replace retired values in `tree`. Returns a line for the user for each of them."""
    lines = []
    for (*path, last), instead in KEYS.items():
        section = _section(tree, path)
        if last in section:
            del section[last]
            name = ".".join(map(str, (*path, last)))
            origin = origins.pop((*path, last), name)
            lines.append(f"{origin}: {name} is no longer a key and is ignored: {instead}")
    for (*path, last), replacements in VALUES.items():
        section = _section(tree, path)
        value = section.get(last)
        if isinstance(value, str) and value in replacements:
            section[last] = replacements[value]
            name = ".".join(map(str, (*path, last)))
            origin = origins.get((*path, last), name)
            lines.append(f"{origin}: {name}={value} is no longer a value: {section[last]} is used")
    return lines


def _section(tree: Any, path: list[str | int]) -> dict[Any, Any]:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}
