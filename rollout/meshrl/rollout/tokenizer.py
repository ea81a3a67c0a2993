"""The ports of a tokenizer, and the tokenizer of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from meshrl.contract.chat_templates import rendered
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json


class Tokenizer(Protocol):
    """Turns token ids back into text. Called from the event loop and from an engine's thread."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens and without clean-up of spaces."""
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


class HuggingFaceTokenizer:
    """A checkpoint's own tokenizer. Satisfies `ChatTokenizer`."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Wrap a tokenizer of transformers; `variables` are given to its chat template."""
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._special = frozenset(tokenizer.all_special_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._text(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """See `ChatTokenizer.decode_all`."""
        return self._text(ids, skip_special_tokens=False)

    def _text(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def encode(self, text: str) -> list[int]:
        """See `ChatTokenizer.encode`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Json] = (),
        generation: bool,
    ) -> str:
        """See `ChatTokenizer.render`."""
        if not self._tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template, and this program uses messages")
        return rendered(
            self._tokenizer,
            messages,
            tools=list(tools) or None,
            add_generation_prompt=generation,
            **self._variables,
        )

    def is_special(self, token: int) -> bool:
        """See `ChatTokenizer.is_special`."""
        return token in self._special


def load_tokenizer(
    path: Path, variables: Mapping[str, Any] = MappingProxyType({})
) -> HuggingFaceTokenizer:
    """The tokenizer in a checkpoint directory; transformers is imported with the first call.

    Args:
        path: The directory.
        variables: Of the chat template (`data.apply_chat_template_kwargs`).

    Raises:
        UserError: the directory has no tokenizer.
    """
    from transformers import AutoTokenizer

    if not path.is_dir():
        raise UserError(f"{path} is not a directory with a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return HuggingFaceTokenizer(tokenizer, variables)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer in {path}: {reason}") from error
