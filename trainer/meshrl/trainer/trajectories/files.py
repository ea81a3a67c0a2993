"""The folder of a run's logged rows: names of its files, which of them stay, and their rows for who shows them.

Imports no torch, and pyarrow when a file is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from meshrl.contract.errors import UserError

FOLDER = "trajectories"
Split: TypeAlias = Literal["train", "eval"]
"""Rows of training, or of an evaluation."""
PREFIX: dict[Split, str] = {"train": "step", "eval": "eval"}
FLOATS = (
    "rollout_logprobs",
    "trainer_logprobs",
    "ref_logprobs",
    "advantages",
    "returns",
    "token_rewards",
    "values",
    "importance_weights",
)
"""float32 per response token."""
PER_TOKEN = ("prompt_ids", "response_ids", "token_texts", "loss_mask", "trained_mask", *FLOATS)
"""Columns with a value for each token: most of a file."""
_NAME = re.compile(r"(step|eval)-(\d+)\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class LoggedFile:
    """One file: the rows of a training step, or of an evaluation. Ordered by step."""

    step: int
    split: Split
    path: Path
    size: int
    """Bytes."""


def file_of(folder: Path, split: Split, step: int) -> Path:
    """Where the rows of a step are."""
    return folder / f"{PREFIX[split]}-{step}.parquet"


def draft_of(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.writing")


def logged_files(folder: Path, split: Split | None = None) -> list[LoggedFile]:
    """The files of a folder, by step; none where there is no folder. Files that are being written are left out."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        kind: Split = "train" if name[1] == "step" else "eval"
        if split in (None, kind):
            try:
                size = path.stat().st_size
            except FileNotFoundError:  # the trainer made room meanwhile
                continue
            found.append(LoggedFile(int(name[2]), kind, path, size))
    return sorted(found)


def beyond(files: Iterable[LoggedFile], max_bytes: int) -> list[LoggedFile]:
    """The oldest of `files`, as many as must go for the others to have at most `max_bytes`; never the newest one."""
    ordered = sorted(files)
    total, leaving = sum(file.size for file in ordered), []
    for file in ordered[:-1]:
        if total <= max_bytes:
            break
        leaving.append(file)
        total -= file.size
    return leaving


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
