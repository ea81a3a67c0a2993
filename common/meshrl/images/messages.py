"""Pictures in messages: taken out of content parts, while a mark or a part without data keeps their places.

    {"role": "user", "content": [{"type": "image", "image": b"..."}, {"type": "text", "text": "Where next?"}]}
        └──▶ Media, and {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where next?"}]}

A picture is a `Media`, the bytes of its file, a picture of Pillow, or OpenAI's `image_url` with a `data:` URL.
Nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json, Media, Message
from meshrl.images import media_type

MARK = "<image>"
"""A picture's place in a text."""
MOST_OF_ROW = 32 << 20
"""Bytes of all pictures of one prompt, and of all that a row observes: both are one message, of 64 MiB at most."""
PICTURES = ("image", "image_url")


def too_many(size: int) -> str:
    """The words about a prompt, or a row, whose pictures have `size` bytes."""
    return f"{size:,} bytes of pictures, want {MOST_OF_ROW:,} at most: smaller or fewer ones"


def parts_of(text: str) -> list[dict[str, Any]]:
    """Content parts of a text with marks."""
    first, *others = text.split(MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
    for other in others:
        parts.append({"type": "image"})
        if other:
            parts.append({"type": "text", "text": other})
    return parts


def with_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the chat template of a vision-language model wants them: content parts where there are some."""
    return [
        {
            "role": message.role,
            "content": parts_of(message.content) if MARK in message.content else message.content,
        }
        for message in messages
    ]


def content_with(text: str, pictures: Sequence[object]) -> list[dict[str, Any]]:
    """Content parts of a text and its pictures, which are at its marks, or before a text without any.

    Raises:
        UserError: another number of marks than pictures.
    """
    marks = text.count(MARK)
    if not marks:
        text, marks = MARK * len(pictures) + text, len(pictures)
    if marks != len(pictures):
        raise UserError(
            f"the text has {marks} places {MARK}, and {len(pictures)} pictures come with it"
        )
    left = iter(pictures)
    return [
        {**part, "image": next(left)} if part["type"] == "image" else part
        for part in parts_of(text)
    ]


def as_openai(messages: Sequence[Message], media: Sequence[Media]) -> list[dict[str, Any]]:
    """Messages of a prompt with the pictures `media` as OpenAI's API has them: content parts with `data:` URLs."""
    if not media:
        return [{"role": each.role, "content": each.content} for each in messages]
    left = iter(media)
    found = with_parts(messages)
    for message in found:
        if not isinstance(message["content"], str):
            message["content"] = [
                {"type": "image_url", "image_url": {"url": _url(next(left))}}
                if part["type"] == "image"
                else part
                for part in message["content"]
            ]
    return found


def _url(media: Media) -> str:
    return f"data:{media_type(media.data)};base64,{base64.b64encode(media.data).decode()}"


def taken_out(
    messages: Iterable[Mapping[str, Json]],
) -> tuple[list[Mapping[str, Json]], tuple[Media, ...]]:
    """Messages whose pictures are parts without data, and the pictures in order; texts stay as they are.

    Raises:
        UserError: a part that is neither text nor a picture here, or a picture that is somewhere else.
    """
    found: list[Media] = []
    kept = [_message(message, found) for message in messages]
    return kept, tuple(found)


def has_pictures(messages: Iterable[Mapping[str, Json]]) -> bool:
    """Whether a message has parts of pictures."""
    return any(_kind(part) in PICTURES for each in messages for part in _parts(each))


def marked(message: Mapping[str, Json]) -> Mapping[str, Json]:
    """A message of `taken_out` for people: its content is one text, with a mark for each picture."""
    texts = [MARK if _kind(part) == "image" else part.get("text", "") for part in _parts(message)]
    return {**message, "content": "".join(texts)} if texts else message


def _parts(message: Mapping[str, Json]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return ()
    return [part for part in content if isinstance(part, Mapping)]


def _kind(part: Mapping[str, Any]) -> object:
    return part.get("type")


def _message(message: Mapping[str, Json], found: list[Media]) -> Mapping[str, Json]:
    if not has_pictures([message]):
        return message
    kept: list[Mapping[str, Any]] = []
    for part in _parts(message):
        match _kind(part):
            case "image" | "image_url" as kind:
                found.append(Media.of(_data(part, f"picture {len(found) + 1}", str(kind))))
                kept.append({"type": "image"})
            case "text":
                kept.append(part)
            case other:
                raise UserError(f"a message has a part of type {other!r:.40}, want text or image")
    return {**message, "content": kept}


def _data(part: Mapping[str, Any], where: str, kind: str) -> bytes:
    value = part.get(kind)
    if kind == "image_url":
        value = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(value, Media):
        return value.data
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str):
        return _of_url(value, where)
    if callable(save := getattr(value, "save", None)):  # a picture of Pillow
        file = io.BytesIO()
        save(file, "PNG")
        return file.getvalue()
    raise UserError(
        f"{where} is {type(value).__name__}, want bytes, a picture of Pillow or a data: URL"
    )


def _of_url(url: str, where: str) -> bytes:
    head, comma, body = url.partition(",")
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        raise UserError(
            f"{where} is at {url:.60}: pictures are not fetched; want data:image/...;base64,..."
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{where} is not base64: {error}") from error
