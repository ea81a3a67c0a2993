"""The folder of a run's logged rows: names of its files, and which of them stay. Imports no torch and no pyarrow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

FOLDER = "trajectories"
Split: TypeAlias = Literal["train", "eval"]
"""Rows of training, or of an evaluation."""
PREFIX: dict[Split, str] = {"train": "step", "eval": "eval"}
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
