"""Rows of a file with one JSON object per line; lines are counted from 1, empty ones are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with the number of its line; after a line that is no row, the next one may be asked for.

    Raises:
        UserError: a line that is no JSON object; names the line.
    """
    return map(lambda line: _row(path, *line), _lines(path))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _row(path: Path, number: int, line: bytes) -> tuple[int, dict[str, Any]]:
    begins = line.strip()
    array = begins == b"[" or begins[:2] == b"[{"
    if number == 1 and (array or begins == b"{"):
        what, each = ("array", ".[]") if array else ("object", ".")
        raise UserError(
            f"{path}:1: the file is one {what}, want one object a line: jq -c '{each}' {path} > NEW.jsonl"
        )
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: a row is an object, not {type(row).__name__}")
    return number, row
