"""Refuses docstrings that do not begin as a noun phrase or an order does; part of `make check`.

`python .ci/plain_english.py` prints each with its place, and ends with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OPENINGS = {"By", "Of", "So", "What", "Where", "Whoever", "Whom", "With"}


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of fields included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                text = each.value.value
                if isinstance(text, str):
                    yield each.lineno, text


def found() -> Iterator[tuple[str, int, str]]:
    """File, line and first line of each docstring that begins with one of OPENINGS."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        path = Path(name)
        if "_pb2" in name or not path.is_file():
            continue
        for line, text in docstrings(ast.parse(path.read_text())):
            opening = re.match(r"\W*(\w+)", text)
            if opening and opening[1] in OPENINGS:
                yield name, line, text.strip().splitlines()[0]


def main() -> int:
    """The exit code."""
    wrong = list(found())
    for name, line, text in wrong:
        print(f"{name}:{line}: write a noun phrase or an order: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
