"""Pages through the trajectory files of a run: filters, sorts, searches, groups; reads no more than a page needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from meshrl.contract.errors import NotFoundError, UserError
from meshrl.trainer.trajectories.files import (
    FOLDER,
    Split,
    described,
    file_of,
    logged_files,
    make_plain,
)
from meshrl.trainer.trajectories.where import COMPONENTS, NUMBERS, TEXTS, condition

SUMMARY: Final = (
    "uid",
    "task",
    "index",
    "attempt",
    "data_source",
    "turns",
    "prompt_length",
    "length",
    "reward",
    "advantage",
    "mismatch",
    "staleness",
    "outcome",
    "worker",
)
"""Columns of one value a row, by which a page is filtered and sorted."""
SEARCHED: Final = ("prompt", "response")
"""Columns that are searched, and of which a page shows the beginning."""
EXCERPT: Final = 400
"""Characters."""
SCAN_ROWS: Final = 4096
"""Rows that are in memory at once while texts are searched and conditions tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQuery:
    """Which rows of a file are asked for, in which order."""

    sort: str = ""
    """A column of SUMMARY; empty: as in the file."""
    descending: bool = False
    where: str = ""
    """A condition of `meshrl rows --where`; empty: every row."""
    search: str = ""
    """Text that the row id, the prompt or the response contains, in any case."""
    offset: int = 0
    limit: int = 50


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The files of a run by step: split, step and bytes."""
    with _reading(run_dir / FOLDER):
        files = logged_files(run_dir / FOLDER)
    return [{"split": file.split, "step": file.step, "bytes": file.size} for file in files]


def page_of(run_dir: Path, split: Split, step: int, question: RowQuery) -> dict[str, Any]:
    """Rows `offset` to `offset + limit` of those asked for, and how many there are.

    Raises:
        NotFoundError: the step has no file. UserError: it is broken, or the question makes no sense.
    """
    path = _path(run_dir, split, step)
    with _reading(path):
        table = _summary(path)
        chosen = _chosen(path, table, question)
        part = chosen[question.offset : question.offset + question.limit]
        rows = _with_texts(path, table, part)
    return _answer(table, len(chosen), rows)


def groups_of(run_dir: Path, split: Split, step: int, question: RowQuery) -> dict[str, Any]:
    """Whole groups with a row of the `question`, in the order of their first one, paged as by `page_of`."""
    path = _path(run_dir, split, step)
    with _reading(path):
        table = _summary(path)
        if "task" not in table.column_names:
            raise UserError(f"{path.name} has no column 'task': its rows have no groups")
        task_of = table["task"].combine_chunks().dictionary_encode().indices.to_numpy()
        chosen = _chosen(path, table, question)
        _, first = np.unique(task_of[chosen], return_index=True)
        tasks = task_of[chosen][np.sort(first)]
        part = tasks[question.offset : question.offset + question.limit]
        numbers = np.flatnonzero(np.isin(task_of, part))
        by_task: dict[int, list[dict[str, Any]]] = {int(task): [] for task in part}
        asked = set(chosen.tolist())
        for row in _with_texts(path, table, numbers):
            row["asked"] = row["number"] in asked
            by_task[int(task_of[row["number"]])].append(row)
    return _answer(table, len(tasks), list(by_task.values())) | {"matching_rows": len(chosen)}


def row_of(run_dir: Path, split: Split, step: int, number: int) -> dict[str, Any]:
    """Every column of one row. Raises NotFoundError, UserError."""
    path = _path(run_dir, split, step)
    with _reading(path):
        file = pq.ParquetFile(path)
        if not 0 <= number < file.metadata.num_rows:
            raise NotFoundError(f"{path.name} has rows 0 to {file.metadata.num_rows - 1}")
        ((_, table),) = _take(file, np.array([number]), file.schema_arrow.names)
        (row,) = table.to_pylist()
    plain = _plain(row)
    assert isinstance(plain, dict)
    pictures = described(run_dir / FOLDER, plain.get("pictures") or (), thumbnails=True)
    return plain | {"number": number, "split": split, "pictures": pictures}


def _path(run_dir: Path, split: Split, step: int) -> Path:
    path = file_of(run_dir / FOLDER, split, step)
    if not path.is_file():
        raise NotFoundError(
            f"{FOLDER}/{path.name}: no such file: the step was not logged, or made room for later ones"
        )
    return path


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Says which file is broken instead of how pyarrow fails at it."""
    try:
        yield
    # ValueError and TypeError: columns of other types than the trainer writes, text that is no UTF-8.
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{path.name} cannot be read: {why}") from error


def _summary(path: Path) -> pa.Table:
    stat = path.stat()
    return _read_summary(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _read_summary(path: Path, mtime_ns: int, size: int) -> pa.Table:
    file = pq.ParquetFile(path)
    names = [name for name in SUMMARY if name in file.schema_arrow.names]
    return file.read(columns=names)


def _chosen(path: Path, table: pa.Table, question: RowQuery) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of the rows asked for, in their order."""
    keep = np.ones(table.num_rows, dtype=bool)
    if question.where:
        keep &= _meets(path, question.where)
    if question.search:
        keep &= _found(path, question.search, table.num_rows)
    numbers = np.flatnonzero(keep)
    if not question.sort:
        return numbers
    values = pc.take(_column(table, question.sort), pa.array(numbers))
    order = "descending" if question.descending else "ascending"
    ranks = pc.array_sort_indices(values.combine_chunks(), order=order).to_numpy()
    return np.asarray(numbers[ranks])


def _meets(path: Path, where: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows meet the condition."""
    meets = condition(where)
    file = pq.ParquetFile(path)
    # A column whose name the condition does not hold is not asked for; one is read in any case, to count rows.
    asked = {COMPONENTS: "reward_components"} | {name: name for name in (*NUMBERS, *TEXTS)}
    names = {column for name, column in asked.items() if name in where} | {"uid"}
    columns = [name for name in file.schema_arrow.names if name in names] or [
        file.schema_arrow.names[0]
    ]
    found: list[bool] = []
    for batch in file.iter_batches(SCAN_ROWS, columns=columns):
        for row in batch.to_pylist():
            make_plain(row)
            found.append(meets(row))
    return np.array(found, dtype=bool)


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise UserError(f"no column {name!r}; there are: {', '.join(table.column_names)}")
    return table[name]


def _found(path: Path, text: str, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of `count` rows contain `text`."""
    file = pq.ParquetFile(path)
    names = [name for name in ("uid", *SEARCHED) if name in file.schema_arrow.names]
    found = np.zeros(count, dtype=bool)
    at = 0
    for batch in file.iter_batches(SCAN_ROWS, columns=names):
        here = slice(at, at + batch.num_rows)
        at += batch.num_rows
        for column in batch.columns:
            hits = pc.fill_null(pc.match_substring(column, text, ignore_case=True), False)
            found[here] |= hits.to_numpy(zero_copy_only=False)
    return found


def _with_texts(
    path: Path, table: pa.Table, numbers: np.ndarray[Any, np.dtype[np.int64]]
) -> list[dict[str, Any]]:
    """Summaries of these rows with the beginnings of their texts, in the order given."""
    file = pq.ParquetFile(path)
    names = [name for name in SEARCHED if name in file.schema_arrow.names]
    texts: dict[int, dict[str, Any]] = {}
    # Without columns a table has no rows.
    for places, part in _take(file, np.sort(numbers), names) if names else ():
        texts |= zip(places.tolist(), part.to_pylist(), strict=True)
    rows = []
    summaries = table.take(pa.array(numbers)).to_pylist()
    for number, row in zip(numbers.tolist(), summaries, strict=True):
        for name, text in texts.get(number, {}).items():
            # The end of a prompt and of a response tell more than their beginnings.
            row[name] = text if text is None or len(text) <= EXCERPT else f"… {text[-EXCERPT:]}"
        rows.append(_plain(row) | {"number": number})
    return rows


def _take(
    file: pq.ParquetFile, numbers: np.ndarray[Any, np.dtype[np.int64]], names: Iterable[str]
) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], pa.Table]]:
    """These rows (ascending) of the file, with their numbers, one row group after the other."""
    start = 0
    for group in range(file.metadata.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        here = numbers[(numbers >= start) & (numbers < end)]
        if len(here):
            yield here, file.read_row_group(group, columns=list(names)).take(pa.array(here - start))
        start = end


def _answer(table: pa.Table, matching: int, rows: list[Any]) -> dict[str, Any]:
    return {
        "rows": table.num_rows,
        "matching": matching,
        "columns": table.column_names,
        "page": rows,
    }


def _plain(value: Any) -> Any:
    """The same in JSON's types: `null` for what is not finite, maps as mappings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, str | int) else str(value)
