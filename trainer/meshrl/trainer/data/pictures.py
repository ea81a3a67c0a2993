"""Pictures of data rows: verl's column `images`, and where they stand in the prompt.

    {"prompt": [{"role": "user", "content": "<image>How many?"}], "images": [{"bytes": …}], …}

A picture is the bytes of its file, alone or as `{bytes, path}` (what datasets writes), or a path, which is looked for
beside the data file. In the prompt it stands where the text says `<image>`, or as a content part of type image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError
from meshrl.contract.types import Media
from meshrl.images import MOST_BYTES, open_image
from meshrl.images.messages import MARK, MOST_OF_ROW, too_many


def read_pictures(value: object, where: str, key: str) -> tuple[Media, ...]:
    """The pictures in column `key` of the row at `where` (`file:row`), in order.

    Raises:
        UserError: a picture that is missing, too large or cannot be read; names file and row.
    """
    if value is None:
        return ()
    many = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    items: Sequence[Any] = value if many else [value]  # type: ignore[assignment]
    folder = Path(where.rpartition(":")[0]).parent
    found = []
    for number, item in enumerate(items):
        at = f"{where}: {key}[{number}]"
        data = _bytes(item, folder, at)
        open_image(data, at)
        found.append(Media.of(data))
    if (size := sum(len(each.data) for each in found)) > MOST_OF_ROW:
        raise UserError(f"{where}: {key!r} has {too_many(size)}")
    return tuple(found)


def _bytes(item: object, folder: Path, at: str) -> bytes:
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if isinstance(item, bytes | bytearray):
        return bytes(item)
    if not isinstance(item, str) or not item:
        raise UserError(f"{at} is {item!r:.40}, want the bytes of a picture or its path")
    if "://" in item or item.startswith("data:"):
        raise UserError(
            f"{at} is at {item:.80}: pictures are not fetched; name a file, or give its bytes"
        )
    path = folder / item
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{at}: {path}: {error.strerror}") from error


def pictures_of(
    row: Mapping[str, Any], texts: str | Sequence[str], where: str, key: str
) -> tuple[Media, ...]:
    """The pictures of a row, which has a conversation of `texts` with a place for each.

    Raises:
        UserError: as `read_pictures` does; there are other places than pictures, or `texts` are no conversation.
    """
    media = read_pictures(row.get(key), where, key)
    if isinstance(texts, str):
        if media:
            raise UserError(
                f"{where}: {key!r} wants a prompt of messages, with {MARK} at their places"
            )
        return ()
    places = sum(text.count(MARK) for text in texts)
    if places != len(media):
        raise UserError(
            f"{where}: the prompt has {places} places for pictures ({MARK}, or a part of type image), and {key!r} has"
            f" {len(media)}"
        )
    return media
