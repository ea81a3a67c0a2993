"""The ports of a tokenizer, and the tokenizer of a Hugging Face checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from typing_extensions import override

from meshrl.common.chat_templates import rendered
from meshrl.common.plain_text import whole
from meshrl.contract.errors import UserError
from meshrl.contract.types import Int32, Json, Media
from meshrl.images import ImageProcessor

NO_PICTURES = "there are pictures, and the model reads text only"


class Tokenizer(Protocol):
    """Turns token ids back into text. Called from the event loop and from an engine's thread."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens and without clean-up of spaces."""
        ...


@runtime_checkable
class EndingTokenizer(Tokenizer, Protocol):
    """In addition, one that knows what ends a text."""

    @property
    def eos_token_id(self) -> int | None:
        """Its end; None: it has none."""
        ...


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """In addition, for programs of several turns: text to tokens, messages to text."""

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of `ids` with special tokens, for parsers of tool calls."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; no special token is added."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Json] = (),
        generation: bool,
    ) -> str:
        """The chat template's text for `messages`; `generation`: up to the start of the assistant's next turn.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        ...

    def is_special(self, token: int) -> bool:
        """Whether `token` is a special token, not text."""
        ...


@runtime_checkable
class PictureTokenizer(ChatTokenizer, Protocol):
    """In addition, for a vision-language model."""

    @property
    def reads_pictures(self) -> bool:
        """Whether the model does."""
        ...

    def look_at(self, media: Sequence[Media]) -> None:
        """Read pictures, in a thread, so that `with_places` and the engine need not; says nothing of damaged ones."""
        ...

    def with_places(
        self, ids: Sequence[int], media: tuple[Media, ...]
    ) -> tuple[Int32, tuple[int, ...]]:
        """int32[k]: `ids` with as many places for each picture as it has tokens; where each picture begins in them.

        Raises:
            UserError: not as many placeholders as pictures, or a picture that the model cannot read.
        """
        ...


def reads_pictures(tokenizer: Tokenizer) -> bool:
    """Whether it is of a vision-language model."""
    return isinstance(tokenizer, PictureTokenizer) and tokenizer.reads_pictures


def picture_tokenizer(tokenizer: Tokenizer) -> PictureTokenizer:
    """The tokenizer of a vision-language model. Raises UserError for another one."""
    if isinstance(tokenizer, PictureTokenizer) and tokenizer.reads_pictures:
        return tokenizer
    raise UserError(NO_PICTURES)


async def look_at(tokenizer: Tokenizer, media: Sequence[Media]) -> None:
    """Have pictures read beside the event loop before they become part of a conversation."""
    if media and reads_pictures(tokenizer):
        await asyncio.to_thread(picture_tokenizer(tokenizer).look_at, media)


class HuggingFaceTokenizer(PictureTokenizer, EndingTokenizer):
    """A checkpoint's own tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        variables: Mapping[str, Any] = MappingProxyType({}),
        images: ImageProcessor | None = None,
    ) -> None:
        """Wrap a tokenizer of transformers; `variables` are given to its chat template.

        `images` reads the pictures of messages; None: the model reads text only.
        """
        self._images = images
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._special = frozenset(tokenizer.all_special_ids)

    @override
    def decode(self, ids: Sequence[int]) -> str:
        return self._text(ids, skip_special_tokens=True)

    @override
    def decode_all(self, ids: Sequence[int]) -> str:
        return self._text(ids, skip_special_tokens=False)

    def _text(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    @override
    def encode(self, text: str) -> list[int]:
        # Only text with half a surrogate pair is refused: in a tool's description, or what an environment says.
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        except TypeError:
            ids = self._tokenizer.encode(whole(text), add_special_tokens=False)
        return ids

    @override
    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Json] = (),
        generation: bool,
    ) -> str:
        if not self._tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template, and this program uses messages")
        return rendered(
            self._tokenizer,
            messages,
            tools=list(tools) or None,
            add_generation_prompt=generation,
            **self._variables,
        )

    @override
    def is_special(self, token: int) -> bool:
        return token in self._special

    @property
    @override
    def eos_token_id(self) -> int | None:
        own: int | None = self._tokenizer.eos_token_id
        return own

    @property
    @override
    def reads_pictures(self) -> bool:
        return self._images is not None

    @override
    def look_at(self, media: Sequence[Media]) -> None:
        for each in media:
            with suppress(UserError):
                if self._images is not None:
                    self._images.features(each, "a picture")

    @override
    def with_places(
        self, ids: Sequence[int], media: tuple[Media, ...]
    ) -> tuple[Int32, tuple[int, ...]]:
        if self._images is None:
            raise UserError(NO_PICTURES)
        for number, each in enumerate(media, 1):
            self._images.check(each, f"picture {number}")  # what is damaged is no part of a row
        expanded = self._images.expanded(np.array(ids, dtype=np.int32), media, "a message")
        places = self._images.places(expanded, media, "a message")
        return expanded, tuple(start for start, _ in places)


def load_tokenizer(
    path: Path,
    variables: Mapping[str, Any] = MappingProxyType({}),
    images: ImageProcessor | None = None,
) -> HuggingFaceTokenizer:
    """The tokenizer in a checkpoint directory; transformers is imported with the first call.

    Args:
        path: The directory.
        variables: Variables of the chat template (`data.apply_chat_template_kwargs`).
        images: Image processor of a vision-language model.

    Raises:
        UserError: the directory has no tokenizer.
    """
    from transformers import AutoTokenizer

    if not path.is_dir():
        raise UserError(f"{path} is not a directory with a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return HuggingFaceTokenizer(tokenizer, variables, images)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer in {path}: {reason}") from error
