"""Rows of a file with one JSON object per line; lines are counted from 1, empty ones are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with the number of its line.

    Raises:
        UserError: a line that is no JSON object; names the line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{where}: a row is an object, not {type(row).__name__}")
            yield number, row
