"""Which characters of a response each of its tokens ends with: how a step of text becomes a place among tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Int32


def token_ends(directory: Path) -> Callable[[Int32], Sequence[int]]:
    """A function of response tokens, int32[R]: R counts of characters, special tokens being none.

    A character of several tokens ends with the last of them.

    Raises:
        ConfigError: `directory` has no tokenizer.json, or the package tokenizers is missing.
    """
    file = directory / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream
    except ImportError as error:
        raise ConfigError(
            "reward.token_rewards needs the package tokenizers: pip install tokenizers"
        ) from error
    if not file.is_file():
        raise ConfigError(f"reward.token_rewards needs {file}, which does not exist")
    tokenizer = Tokenizer.from_file(str(file))

    def ends(tokens: Int32) -> Sequence[int]:
        stream = DecodeStream(skip_special_tokens=True)
        return list(accumulate(len(stream.step(tokenizer, int(t)) or "") for t in tokens))

    return ends
