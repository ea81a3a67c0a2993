"""The tokens that end a response, by everything that a checkpoint says of them; vLLM and SGLang end at the same.

`eos_token_id` of generation_config.json and of config.json, each one id or a list, and the tokenizer's `eos_token`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError
from meshrl.rollout.tokenizer import EndingTokenizer, Tokenizer


def eos_token_ids(checkpoint: Path) -> tuple[int, ...]:
    """The ids that the files of a checkpoint directory name, in order; none where none does.

    Raises:
        UserError: a file is no JSON object, or an id is no number.
    """
    configs = [_object(checkpoint / f"{name}.json") for name in ("generation_config", "config")]
    # Multimodal models keep the decoder's part there.
    configs.append(configs[-1].get("text_config") or {})
    found: set[int] = set()
    for config in configs:
        ids = config.get("eos_token_id")
        if ids is None:
            continue
        try:
            found.update(map(int, ids if isinstance(ids, list) else [ids]))
        except (TypeError, ValueError) as error:
            raise UserError(f"{checkpoint}: eos_token_id is {ids!r:.40}, want numbers") from error
    found.update(_of_tokenizer(checkpoint))
    return tuple(sorted(found))


def with_end_of(tokenizer: Tokenizer | None, ids: tuple[int, ...]) -> tuple[int, ...]:
    """`ids` with the end of the tokenizer that the run uses: its files may stand elsewhere than the checkpoint's."""
    own = tokenizer.eos_token_id if isinstance(tokenizer, EndingTokenizer) else None
    return ids if own is None else tuple(sorted({*ids, own}))


def _of_tokenizer(checkpoint: Path) -> Iterator[int]:
    """The id of the tokenizer's `eos_token`, where its files have one."""
    settings = _object(checkpoint / "tokenizer_config.json")
    token = settings.get("eos_token") or _object(checkpoint / "special_tokens_map.json").get(
        "eos_token"
    )
    text = token.get("content") if isinstance(token, Mapping) else token
    if not text:
        return
    for number, added in (settings.get("added_tokens_decoder") or {}).items():
        if added.get("content") == text:
            yield int(number)
            return
    tokenizer = _object(checkpoint / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or ():
        if added.get("content") == text:
            yield int(added["id"])
            return
    words = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(words, dict) and text in words:
        yield int(words[text])
    elif isinstance(words, list):  # of pieces and their scores
        yield from (number for number, (piece, _) in enumerate(words) if piece == text)


def _object(path: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content
