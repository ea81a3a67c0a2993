r"""Finds the last `\boxed{…}` of a text, for all mathematics scorers."""

from __future__ import annotations


def closing(text: str, start: int) -> int:
    """The index of the brace that closes the first one at or after `start`; -1 if none does."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
            if depth < 0:
                return -1
    return -1


def last_boxed(text: str, commands: tuple[str, ...] = ("\\boxed",)) -> str | None:
    r"""The content of the last `\boxed{…}` (the first of `commands` that occurs), or None."""
    for command in commands:
        start = text.rfind(command)
        if start >= 0:
            end = closing(text, start)
            opening = text.find("{", start)
            return text[opening + 1 : end] if end >= 0 else None
    return None
