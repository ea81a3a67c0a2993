"""The little that rollout asks of a tokenizer, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from meshrl.contract.errors import UserError


class Tokenizer(Protocol):
    """Turns token ids back into text. Called from the event loop and from an engine's thread."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens, nothing cleaned up."""
        ...


class HuggingFaceTokenizer:
    """A checkpoint's own tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def load_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer in a checkpoint directory; imports transformers here, not before.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoTokenizer

    if not path.is_dir():
        raise UserError(f"{path} is not a directory with a tokenizer")
    try:
        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer in {path}: {reason}") from error
