"""Files of a checkpoint as far as a recipe's check reads them: a tokenizer of characters, headers of weights."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

CHARACTERS = ("<unk>", *(letter for letter in string.printable if letter.isprintable()))


def write_tokenizer(
    path: Path,
    added: Sequence[str] = (),
    vocabulary: Sequence[str] = CHARACTERS,
    **settings: Any,
) -> None:
    """Write tokenizer.json with `added` special tokens behind the characters, and tokenizer_config.json."""
    numbered = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    tokenizer.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind | settings))


def write_weights(
    file: Path, tensors: Iterable[str] | Mapping[str, Sequence[int]] = ("w",)
) -> None:
    """Write a safetensors file of tensors, of shape 1 x 0 where none is named: they have no bytes."""
    shapes = tensors if isinstance(tensors, Mapping) else dict.fromkeys(tensors, (1, 0))
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}
            for name, shape in shapes.items()
        }
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
