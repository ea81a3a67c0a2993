"""Rows of a parquet file, counted from 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet

from meshrl.contract.errors import UserError


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its number.

    Raises:
        UserError: not a readable parquet file.
    """
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (arrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {error}") from error
