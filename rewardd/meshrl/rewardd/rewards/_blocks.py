"""Finds the blocks of a sampled text between two marks, looking at each character a bounded number of times."""

from __future__ import annotations

from collections.abc import Iterator


def blocks(text: str, opening: str, closing: str) -> Iterator[str]:
    """What stands between each `opening` and the next `closing`, from left to right.

    As `re.findall` of `opening(.*?)closing`, which looks to the end of the text again for each mark that nothing
    closes: a policy that only ever opens would take it the square of its length.
    """
    at = 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            return
        yield text[start:end]
        at = end + len(closing)
