"""Rows of a csv file with a line of column names; rows are counted by the line on which they end, from 1."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its number; every value is text.

    Raises:
        UserError: no text of UTF-8, or a row with more or fewer fields than there are names; names the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            names = rows.fieldnames or ()
            if twice := [name for name in names if names.count(name) > 1]:
                raise UserError(
                    f"{path}:1: two columns are called {twice[0]!r}; want one of each name"
                )
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    raise UserError(f"{where}: want one field for each of {', '.join(names)}")
                yield rows.line_num, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable csv file: {error}") from error
