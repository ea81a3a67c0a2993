"""The tokens and strings that end a response; by the files of a checkpoint, as vLLM and SGLang read them.

`eos_token_id` of generation_config.json and of config.json, each one id or a list, and the tokenizer's `eos_token`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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
    """`ids` with the end of the tokenizer that the run uses: its files may be elsewhere than the checkpoint's."""
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


BROKEN = "�"
"""A tokenizer decodes a part of a character to this."""
SLACK_TOKENS = 8
"""Tokens that may decode to nothing (special ones) inside a stop string's window."""


class StopStrings:
    """Finds the stop strings of one request, also across token boundaries.

    A token can only complete a stop string if its text has the string's last character; most tokens are dismissed by
    that, one dictionary look-up each. The rest decode a window of the last tokens.
    """

    def __init__(
        self,
        stops: Sequence[str],
        tokenizer: Tokenizer,
        texts: MutableMapping[int, str],
    ) -> None:
        """`texts` caches the text of single tokens and may be shared by all requests."""
        self._stops = tuple(stops)
        self._tokenizer = tokenizer
        self._texts = texts
        self._lasts = {stop[-1] for stop in self._stops}
        # A character is one to four tokens of a byte-level vocabulary.
        self._window = 4 * max(len(stop) for stop in self._stops) + SLACK_TOKENS

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """True when the last of the response's `tokens` completes a stop string."""
        if not self._may_complete(tokens[-1]):
            return False
        text = self._tokenizer.decode(tokens[-self._window :])
        return any(stop in text for stop in self._stops)

    def _may_complete(self, token: int) -> bool:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._tokenizer.decode([token])
        # Decoded alone, a token may lose a leading blank or be a part of a character: then the text is not certain.
        unsure = BROKEN in text or any(last.isspace() for last in self._lasts)
        return unsure or any(last in text for last in self._lasts)
