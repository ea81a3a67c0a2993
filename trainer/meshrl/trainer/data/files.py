"""Rows of data files, each with the place where it stands; a reader is found by the file's suffix.

A cell that pandas has nothing for is NaN in a column of numbers or objects: it is read as null, as parquet's own is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeAlias

from meshrl.common import plugins
from meshrl.contract.errors import UserError

READERS = "meshrl.trainer.data.readers"
Read: TypeAlias = Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]
"""What a reader defines as `read`: the rows of a file in order, each with its number. Raises UserError."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """A row and where it stands."""

    where: str
    """`file:number`, as the reader counts: rows from 0 in parquet, lines from 1 in jsonl."""
    values: dict[str, Any]
    made: bool = False
    """By code, whose empty answer is one."""


def file_rows(paths: Sequence[Path], reader: str | None = None) -> Iterator[FileRow]:
    """The rows of all files in order.

    Args:
        paths: Files.
        reader: A module of `meshrl.trainer.data.readers` or a dotted path; None: the one named like a file's suffix.

    Raises:
        UserError: a file is missing or unreadable, or no reader has the name of its suffix.
    """
    for path in paths:
        yield from rows_of(path, reader)


def rows_of(path: Path, reader: str | None = None) -> Iterator[FileRow]:
    """The rows of one file, as `file_rows` gives them.

    After a line that is no row, the iterator of a jsonl file may be asked for the next one; others have ended.

    Raises:
        UserError: as `file_rows`.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if not has_reader(path, reader):
        raise UserError(f"{path}: cannot read {path.suffix or 'this'} (want {readable_files()})")
    read: Read = plugins.load(READERS, reader or path.suffix[1:], "read")
    return map(lambda row: _file_row(f"{path}:{row[0]}", row[1]), read(path))


def _file_row(where: str, values: dict[str, Any]) -> FileRow:
    try:
        return FileRow(where, _without_nan(values))
    except RecursionError as error:
        raise UserError(f"{where}: the row is nested too deeply; want fewer levels") from error


def _without_nan(value: Any) -> Any:
    """The value with null for each NaN in it."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return value


def has_reader(path: Path, reader: str | None) -> bool:
    """True when `reader` is given or one is named like the suffix of `path`."""
    return reader is not None or path.suffix[1:] in plugins.known(READERS)


def readable_files() -> str:
    """The suffixes that can be read, for a message."""
    *most, last = (f".{name}" for name in plugins.known(READERS))
    return f"{', '.join(most)} or {last}, or name a reader of your own"


_NAMED: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt": ("prompt", "question", "problem", "query", "instruction", "input", "messages"),
    "answer": ("answer", "ground_truth", "solution", "final_answer", "target", "label", "output"),
    "response": ("response", "completion", "output", "answer"),
    "chosen": ("chosen", "preferred", "accepted", "winner"),
    "rejected": ("rejected", "dispreferred", "loser"),
}
"""Columns of public data sets by what they hold."""


def row_lacks(key: str, option: str, row: Mapping[str, Any]) -> str:
    """Which columns a row without `key` has, and the `option`, such as `data.prompt_key`, that cures it."""
    has = f"the row has {', '.join(map(str, row))}"
    usual = _NAMED[option.rpartition(".")[2].removesuffix("_key")]
    near = [name for name in usual if name in row] or get_close_matches(key, map(str, row), n=1)
    return f"{has}: set {option}={near[0]}" if near else has
