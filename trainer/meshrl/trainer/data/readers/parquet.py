"""Rows of a parquet file, counted from 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet

from meshrl.contract.errors import UserError

CHUNK_BYTES = 256 << 20
"""A column of a row group may grow to this when it is unpacked, however small it is in the file."""
CHUNK_GROWTH = 100
"""Times its bytes in the file to which a longer one may grow: text grows to 3 to 20 times."""


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its number.

    Raises:
        UserError: not a readable parquet file, or one that would unpack to much more than it is.
    """
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            _check_growth(path, file.metadata)
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable parquet file: {reason}") from error


def _check_growth(path: Path, metadata: Any) -> None:
    """Refuse, before anything is unpacked, a column that would fill the memory. Raises UserError."""
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            size, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
            if size > CHUNK_BYTES and size > CHUNK_GROWTH * stored:
                raise UserError(
                    f"{path}: column {chunk.path_in_schema!r} of row group {group} has {stored} bytes and would"
                    f" unpack to {size}, more than {CHUNK_GROWTH} times as many: write it with smaller row groups"
                )
