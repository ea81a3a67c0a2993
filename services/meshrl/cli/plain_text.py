"""What a model or a file says, made safe to print."""

from __future__ import annotations

from typing import IO

from rich.console import Console

MOST = 500
"""Characters of a text that is shown on one line."""


def printable(text: str) -> str:
    """A model may say what moves the cursor of a terminal: such characters are shown by their numbers."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """The beginning of a text, without line breaks."""
    return printable(" ".join(text[:MOST].split()))


def text_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that shows texts as they are: `[low]` is no style and `:smile:` no picture."""
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)
