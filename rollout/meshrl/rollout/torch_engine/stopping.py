"""Finds stop strings in sampled tokens, also across token boundaries."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from meshrl.rollout.tokenizer import Tokenizer

BROKEN = "�"
"""A tokenizer decodes a part of a character to this."""
SLACK_TOKENS = 8
"""Tokens that may decode to nothing (special ones) inside a stop string's window."""


class StopStrings:
    """Watches one request.

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
