"""Long results are cut before they are tokenised whole, and once more to the exact number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshrl.rollout.tokenizer import ChatTokenizer

CHARACTERS = 16
"""No more of a result is looked at than so many characters for each token that it may have."""
GAP = "...(truncated)..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How much of a result the policy sees."""

    tokens: int
    side: Literal["left", "middle", "right"] = "middle"
    """Which part goes."""

    def __call__(self, text: str, tokenizer: ChatTokenizer) -> str:
        """`text`, or its beginning and end around a mark: never more than `tokens` tokens."""
        kept = min(len(text), self.tokens * CHARACTERS)
        found = self._around(text, kept)
        while kept and (count := len(tokenizer.encode(found))) > self.tokens:
            # Tokens are of unequal length: what is kept of the characters is measured again until it fits.
            kept = min(kept - 1, int(kept * self.tokens / count))
            found = self._around(text, kept)
        return found if kept else ""

    def _around(self, text: str, kept: int) -> str:
        """So many characters of `text`, and the mark where the others were."""
        if kept >= len(text):
            return text
        match self.side:
            case "left":
                return GAP + text[len(text) - kept :]
            case "right":
                return text[:kept] + GAP
            case "middle":
                half = kept // 2
                return text[:half] + GAP + text[len(text) - half :]
