"""Pictures of logged rows, each once, named by its content: `trajectories/pictures/<sha256>`.

Rows name theirs in the column `pictures`. Where they hold more bytes than they may, those go that no row was
written with for longest. Imports no torch and no pyarrow; making a thumbnail needs Pillow.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError
from meshrl.contract.types import Media
from meshrl.images import MOST_BYTES, read_image

FOLDER = "pictures"
SHARE = 4
"""They may hold one part in so many of what all logged rows may."""
SHOWN = 16
"""Most thumbnails of one row."""
SIDE = 192
"""Pixels of a thumbnail's longer side."""
_NAME = re.compile(r"[0-9a-f]{64}")


class PictureFiles:
    """The folder of a run's pictures; one process writes it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`folder` is made with the first picture."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] | None = None
        """By name, those that were used longest ago first; None before the folder was looked into."""

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
        entries = [each for each in os.scandir(self._folder) if _NAME.fullmatch(each.name)]
        known = sorted((each.stat().st_mtime, each.name, each.stat().st_size) for each in entries)
        return {name: size for _, name, size in known}


def read_back(rows: Path, names: Sequence[str]) -> tuple[Media, ...]:
    """The pictures of a row in the folder of logged `rows`. Raises UserError for one that was not kept."""
    found = []
    for name in names:
        path = rows / FOLDER / name
        if not _NAME.fullmatch(name) or not path.is_file():
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
        _described(rows / FOLDER, name, thumbnails and number < SHOWN)
        for number, name in enumerate(names)
    ]


def _described(folder: Path, name: str, thumbnail: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "bytes": None, "thumbnail": None, "problem": ""}
    if not _NAME.fullmatch(name):
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
