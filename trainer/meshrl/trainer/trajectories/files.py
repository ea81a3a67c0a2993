"""The folder of a run's logged rows: names of its files, which of them stay, and their rows for who shows them.

Pictures of rows are there each once, named by content: `trajectories/pictures/<sha256>`. Rows name theirs in the
column `pictures`. Where they hold more bytes than they may, those go that no row was written with for longest.

Imports no torch, and pyarrow when a file is read; making a thumbnail needs Pillow.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from meshrl.contract.errors import UserError
from meshrl.contract.types import Media
from meshrl.images import MOST_BYTES, read_image

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
PICTURES = "pictures"
SHARE = 4
"""Pictures may take a SHARE-th of the space of all logged rows."""
SHOWN = 16
"""Most thumbnails of one row."""
SIDE = 192
"""Pixels of a thumbnail's longer side."""
_PICTURE = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class LoggedFile:
    """One file: the rows of a training step, or of an evaluation. Ordered by step."""

    step: int
    split: Split
    path: Path
    size: int
    """Bytes."""


def file_of(folder: Path, split: Split, step: int) -> Path:
    """File of the rows of a step."""
    return folder / f"{PREFIX[split]}-{step}.parquet"


def draft_of(path: Path) -> Path:
    """Temporary file that is renamed to `path` once it is written."""
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


class PictureFiles:
    """The folder of a run's pictures; one process writes it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`folder` is made with the first picture."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] | None = None
        """Bytes by file name, least recently used first; None before the folder was read."""

    def keep(self, media: Iterable[Media]) -> None:
        """Write those that are not there. Raises OSError."""
        sizes = self._sizes if self._sizes is not None else self._found()
        self._sizes = sizes
        for each in media:
            if each.sha256 in sizes:
                sizes[each.sha256] = sizes.pop(each.sha256)
                continue
            path = self._folder / each.sha256
            draft = path.with_name(f".{path.name}.writing")
            draft.write_bytes(each.data)
            draft.replace(path)
            sizes[each.sha256] = len(each.data)
        total = sum(sizes.values())
        while total > self._max_bytes and len(sizes) > 1:
            oldest = next(iter(sizes))
            total -= sizes.pop(oldest)
            (self._folder / oldest).unlink(missing_ok=True)

    def _found(self) -> dict[str, int]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for draft in self._folder.glob(".*.writing"):
            draft.unlink(missing_ok=True)
        entries = [each for each in os.scandir(self._folder) if _PICTURE.fullmatch(each.name)]
        known = sorted((each.stat().st_mtime, each.name, each.stat().st_size) for each in entries)
        return {name: size for _, name, size in known}


def read_back(rows: Path, names: Sequence[str]) -> tuple[Media, ...]:
    """The pictures of a row in the folder of logged `rows`. Raises UserError for one that was not kept."""
    found = []
    for name in names:
        path = rows / PICTURES / name
        if not _PICTURE.fullmatch(name) or not path.is_file():
            raise UserError(f"{path}: this picture was not kept (trainer.log_bytes)")
        found.append(Media.of(path.read_bytes()))
        if found[-1].sha256 != name:
            raise UserError(f"{path}: the file has other data than its name says")
    return tuple(found)


def described(rows: Path, names: Sequence[str], *, thumbnails: bool) -> list[dict[str, Any]]:
    """Name and bytes of each picture in the folder of logged `rows`; with `thumbnails` those of the first `SHOWN`.

    A thumbnail is drawn anew from the pixels, so nothing else that a file may hold comes to a page. `problem` says
    why there is none.
    """
    return [
        _described(rows / PICTURES, name, thumbnails and number < SHOWN)
        for number, name in enumerate(names)
    ]


def _described(folder: Path, name: str, thumbnail: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "bytes": None, "thumbnail": None, "problem": ""}
    if not _PICTURE.fullmatch(name):
        return {**found, "name": name[:64], "problem": "no name of a picture"}
    try:
        with (folder / name).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError:
        return {**found, "problem": "not kept"}
    found["bytes"] = len(data)
    if not thumbnail:
        return found
    if Media.of(data).sha256 != name:
        return {**found, "problem": "the file has other data than its name says"}
    try:
        image = read_image(data, f"picture {name[:12]}")
    except UserError as error:
        return {**found, "problem": error.message}
    found["width"], found["height"] = image.size
    image.thumbnail((SIDE, SIDE))
    drawn = io.BytesIO()
    image.save(drawn, "PNG")
    found["thumbnail"] = "data:image/png;base64," + base64.b64encode(drawn.getvalue()).decode()
    return found
