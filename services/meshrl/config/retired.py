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


def drop_retired(tree: dict[str, Any], origins: dict[Loc, str]) -> list[str]:
    """Take retired keys out of `tree` and `origins`. Returns a line for the user for each of them."""
    lines = []
    for (*path, last), instead in KEYS.items():
        section = _section(tree, path)
        if last in section:
            del section[last]
            name = ".".join(map(str, (*path, last)))
            origin = origins.pop((*path, last), name)
            lines.append(f"{origin}: {name} is no longer a key and is ignored: {instead}")
    return lines


def _section(tree: Any, path: list[str | int]) -> dict[Any, Any]:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}
