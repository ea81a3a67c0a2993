"""Rows of parquet and jsonl files, one dict each, every mistake with its file and row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError


@dataclass(frozen=True, slots=True)
class Located:
    """A row and where it stands."""

    where: str
    """`file:row`, rows counted from 0 in parquet and lines from 1 in jsonl."""
    row: dict[str, Any]


def read_rows(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The rows of all files in order. Raises UserError as `located_rows` does."""
    return (located.row for located in located_rows(paths))


def located_rows(paths: Sequence[Path]) -> Iterator[Located]:
    """The rows of all files in order.

    Raises:
        UserError: a file is missing, unreadable or neither parquet nor jsonl, or a line is not a JSON object.
    """
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        match path.suffix:
            case ".parquet":
                yield from _parquet(path)
            case ".jsonl" | ".json":
                yield from _jsonl(path)
            case suffix:
                raise UserError(f"{path}: cannot read {suffix or 'this'} (want .parquet or .jsonl)")


def _parquet(path: Path) -> Iterator[Located]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield Located(f"{path}:{number}", row)
                    number += 1
    except (arrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {error}") from error


def _jsonl(path: Path) -> Iterator[Located]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{where}: a row is an object, not {type(row).__name__}")
            yield Located(where, row)
