"""Tables in text files: what is given, and what is said of it."""

from __future__ import annotations

import re
from pathlib import Path


def pairs(file: Path) -> list[tuple[list[str], str]]:
    """Lines, and what is said of them: a line that begins with `=>`. `# ` begins a comment."""
    found: list[tuple[list[str], str]] = []
    given: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("=> "):
            found.append((given, line.removeprefix("=> ")))
            given = []
        elif not line.startswith("# "):
            given.append(line)
    assert not given, f"nothing is said of {given}"
    return found


def fits(text: str, line: str) -> bool:
    """Whether it is this line, in which … stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, line.split("…"))), text) is not None
