"""Reads logged rows back, as dictionaries: for commands and pages that show them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.contract.errors import UserError
from meshrl.trainer.trajectories.table import FLOATS

PER_TOKEN = ("prompt_ids", "response_ids", "token_texts", "loss_mask", "trained_mask", *FLOATS)
"""Columns with a value for each token: most of a file."""


def read_rows(
    path: Path, *, per_token: bool = False, uids: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """The rows of a file; none where the file is gone, which a run may do at any time.

    Args:
        path: One of `logged_files`.
        per_token: Also the columns of `PER_TOKEN`.
        uids: Only these rows.

    Raises:
        UserError: the file cannot be read, or pyarrow is missing.
    """
    try:
        import pyarrow
        import pyarrow.compute as compute
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(
            "logged rows are Parquet files, and pyarrow is missing: pip install pyarrow"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            names = [n for n in file.schema_arrow.names if per_token or n not in PER_TOKEN]
            table = file.read(columns=names)
        if uids is not None:
            wanted = pyarrow.array(list(uids), pyarrow.string())
            table = table.filter(compute.is_in(table["uid"], value_set=wanted))
        rows: list[dict[str, Any]] = table.to_pylist()
    except FileNotFoundError:
        return []
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{path}: no logged rows can be read there: {str(error).splitlines()[0]}"
        ) from error
    for row in rows:
        make_plain(row)
    return rows


def make_plain(row: dict[str, Any]) -> None:
    """Turn the values of one row, as pyarrow gives it, into those that people and conditions compare."""
    for name in ("reward_components", "reward_texts"):  # an earlier file has no texts
        row[name] = dict(row.get(name) or ())
    for name in ("reward", "advantage", "mismatch"):
        if row.get(name) is not None:  # 0.4 of 32 bits is 0.4, not 0.4000000059604645
            row[name] = float(str(np.float32(row[name])))
