"""Chat messages, texts and pictures of data rows: what is none of them is refused with its row.

A prompt that lost its image or its tool calls on the way would be trained as another prompt, unseen.
Pictures are verl's column `images`:

    {"prompt": [{"role": "user", "content": "<image>How many?"}], "images": [{"bytes": …}], …}

A picture is the bytes of its file, alone or as `{bytes, path}` (what datasets writes), or a path, which is looked for
beside the data file. In the prompt it is where the text says `<image>`, or as a content part of type image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError
from meshrl.contract.types import Media, Message
from meshrl.images import MOST_BYTES, open_image
from meshrl.images.messages import MARK, MOST_OF_ROW, too_many

MEDIA = ("images", "videos", "audios")
HINTS = {
    "tools": "name tools in rollout.program_options",
    "videos": "no model reads videos here: write frames as a list of pictures in 'images', with <image> for each",
}
WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""The beginning of JSON or of Python's own form, which a csv file has for a list."""
UNUSABLE = (*MEDIA, "tools")
"""Columns of a row that belong to its prompt in other data sets, and that a text prompt cannot hold."""


def refuse_unusable(
    row: Mapping[str, object], where: str, keys: Sequence[str] = UNUSABLE, what: str = "prompts"
) -> None:
    """Raises UserError when a row has one of `keys` (images, videos, audios, tools) beside `what` it is."""
    for key in keys:
        if not is_empty(row.get(key)):
            hint = HINTS.get(key, f"{what} are text")
            if key == "images" and what == "prompts":
                hint = "want a vision-language model, and an engine for it"
            raise UserError(f"{where}: {key!r} cannot be used ({hint}); leave the column out")


def refuse_what_json_lacks(value: object, where: str, key: str) -> None:
    """Raises UserError when JSON, the form of tasks, cannot express the value of column `key`."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        if isinstance(value, Mapping | list | tuple):
            named = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name, part in named:
                refuse_what_json_lacks(part, where, f"{key}.{name}")
        raise UserError(
            f"{where}: {key!r} is {value!r:.60} ({type(value).__name__}), want text, a number, true, false, a list or"
            " an object"
        ) from error


def read_text(value: object, where: str, key: str, *, pictures: bool = False) -> str:
    """A text, or the text of content parts that are all of type text; with `pictures` some may be of type image.

    Raises:
        UserError: anything else; names file and row.
    """
    if isinstance(value, str):
        return _whole(value, where, key)
    if value is None:
        raise UserError(f"{where}: {key!r} is null, want text")
    if not isinstance(value, Sequence) or not value:
        raise UserError(f"{where}: {key!r} is {value!r:.80}, want text")
    return _whole("".join(_part(part, where, key, pictures) for part in value), where, key)


def _whole(text: str, where: str, key: str) -> str:
    """The text. Raises UserError for half of a surrogate pair, which JSON may hold and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UserError(
            f"{where}: {key!r} has {half} at character {error.start}, half of a character, want text"
        ) from error
    return text


def _part(part: object, where: str, key: str, pictures: bool) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if pictures and isinstance(part, Mapping) and kind == "image":
        if all(is_empty(value) for name, value in part.items() if name != "type"):
            return MARK
        raise UserError(f"{where}: {key!r} has a picture in it, want it in the column of pictures")
    if not isinstance(part, Mapping) or kind is None:
        raise UserError(f"{where}: {key!r} holds {part!r:.80}, want text or parts of type text")
    text = part.get("text")
    if kind != "text" or not isinstance(text, str):
        raise UserError(f"{where}: {key!r} has a part of type {kind!r}, want text")
    return text


def read_messages(
    value: object, where: str, key: str, *, pictures: bool = False
) -> tuple[Message, ...]:
    """A conversation; with `pictures` one that may have some.

    Raises:
        UserError: no list of messages, or a message with more than a role and text; names file and row.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        given = type(value).__name__
        if value is None:
            given = "null"
        elif value == []:
            given = "empty"
        raise UserError(f"{where}: {key!r} is {given}, want text or a list of messages")
    return tuple(_message(message, where, key, pictures) for message in value)


def read_prompt(
    value: object, where: str, key: str, *, pictures: bool = False
) -> str | tuple[Message, ...]:
    """A prompt: text, or a conversation, which may have `pictures`.

    Raises:
        UserError: as `read_text` and `read_messages` do.
    """
    if isinstance(value, str):
        if WRITTEN_MESSAGES.match(value):
            raise UserError(
                f"{where}: {key!r} is a list of messages written as text, want the list itself (parquet or jsonl)"
            )
        return read_text(value, where, key)
    return read_messages(value, where, key, pictures=pictures)


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as a chat template reads them."""
    return [{"role": message.role, "content": message.content} for message in messages]


def _message(message: object, where: str, key: str, pictures: bool) -> Message:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise UserError(
            f"{where}: {key!r} holds {message!r:.80}, want an object with role and content"
        )
    for name, value in message.items():
        if name not in ("role", "content") and not is_empty(value):
            raise UserError(
                f"{where}: {name!r} of a message in {key!r} cannot be used, only role and content; leave it out"
            )
    role = message["role"]
    if not isinstance(role, str):
        raise UserError(f"{where}: the role of a message in {key!r} is {role!r:.40}, want text")
    return Message(
        role=_whole(role, where, f"{key}.role"),
        content=read_text(message["content"], where, f"{key}.content", pictures=pictures),
    )


def is_empty(value: object) -> bool:
    """True for what parquet writes into a column or a field that a row does not have."""
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def is_blank(value: object) -> bool:
    """True for what says nothing: an empty value, or text of white space alone."""
    return is_empty(value) or (isinstance(value, str) and not value.strip())


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
