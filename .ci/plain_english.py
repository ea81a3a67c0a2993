"""Refuses docstrings and comments of protos that begin as no noun phrase and no order, PHRASES, long pages and lines.

Part of `make check`. `python .ci/plain_english.py` prints each with its place, and ends with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

OPENINGS = re.compile(
    r"\W*(And|Asked|Behind|Beside|By|Enough|It|Nobody|Of|Once|Or|So|That|Then|They|Those|Told|Until|What|Where|Who"
    r"|Whoever|Whom|Whose|With|Without)\b"
)
NOUNS = re.compile(r"(A|An|Each|Every|Its|No|Rows|The|This)\b")
PHRASES = re.compile(
    r"\b(arrived wrong|for good|go(?:es)? on|gone on|in vain|is told|models? that reads?|shared out|so many|somebody"
    r"|to be had|told of|went on|whoever|whom)\b",
    re.IGNORECASE,
)
"""Words with plainer ones: damaged, permanently, continue, without use, gets, another, logged, sharded."""
UNCHECKED = (".ci/", "benchmarks/", "tests/")
"""Folders in which PHRASES may stand, and methods be described by NOUNS."""

WORDS = 1200
"""The most words of a page: five minutes."""
ROOMS = ("common", "proto", "transferqueue", "rollout", "rewardd", "trainer", "services")
ROOM_WORDS = 600
"""The most words of a README below these folders."""
RECORDS = ("docs/measurements/", "docs/decisions/")
"""Pages and lines of any length, as are those with the note GENERATED."""
GENERATED = "change the code, not this page"
LONG = {
    "benchmarks/RESULTS.md",
}
"""Pages that are longer than that; no further ones, and a page that became short leaves the list."""

COLUMNS = 100
"""The most columns of a line of text."""
WHOLE = re.compile(r"!?\[(?:`[^`]*`|[^\]`])*\]\([^)]*\)|`[^`]*`")
"""Links and code, which are not broken."""
UNWRAPPED = ("docs/reference/algorithms.md", "docs/reference/models.md")
"""Pages of which a command prints long lines."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of fields included, and of each option's help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield node.value.lineno, ast.unparse(node.value)
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                text = each.value.value
                if isinstance(text, str):
                    yield each.lineno, text


def comments(proto: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment of a proto."""
    before = ""
    for number, line in enumerate(proto.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("//") and not before.startswith("//"):
            yield number, stripped.removeprefix("//")
        before = stripped


def sources(pattern: str) -> Iterator[tuple[str, str]]:
    """Name and text of each file that a person wrote."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if "_pb2" not in name and Path(name).is_file():
            yield name, Path(name).read_text()


def openings(code: Mapping[str, str]) -> Iterator[str]:
    """A line for each docstring or comment that begins with one of OPENINGS, or tells a state instead of an order."""
    for name, source in code.items():
        if name.endswith(".proto"):
            states, described = set[int](), comments(source)
        else:
            tree = ast.parse(source)
            states = set() if name.startswith(UNCHECKED) else set(stated(tree))
            described = docstrings(tree)
        for line, text in described:
            if OPENINGS.match(text) or line in states:
                first = text.strip().splitlines()[0]
                yield f"{name}:{line}: write a noun phrase or an order: {first}"


def stated(tree: ast.AST) -> Iterator[int]:
    """The lines of docstrings of functions that return nothing and yet begin as NOUNS do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
            returns = node.returns
            text = ast.get_docstring(node)
            nothing = isinstance(returns, ast.Constant) and returns.value is None
            if nothing and text and not node.name.startswith("__") and NOUNS.match(text):
                yield node.body[0].lineno


def phrases(texts: Mapping[str, str]) -> Iterator[str]:
    """A line for each of PHRASES, in code and comments of the product and on pages."""
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            if found := PHRASES.search(line):
                yield f"{name}:{number}: find a plainer word for '{found[0]}'"


def texts() -> dict[str, str]:
    """The pages that have limits, by name."""
    listed = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if Path(name).is_file()]
    found = {name: Path(name).read_text() for name in names if not name.startswith(RECORDS)}
    return {name: text for name, text in found.items() if GENERATED not in text}


def most_words(name: str) -> int:
    """The limit of a page."""
    of_room = name.endswith("/README.md") and name.partition("/")[0] in ROOMS
    return ROOM_WORDS if of_room else WORDS


def too_long(pages: Mapping[str, str]) -> Iterator[str]:
    """A line for each page that is longer than its limit, and for each of LONG that is not."""
    words = {name: len(text.split()) for name, text in pages.items()}
    for name, count in words.items():
        if count > most_words(name) and name not in LONG:
            yield f"{name}: {count} words; a page like it has {most_words(name)} at most"
    for name in sorted(LONG):
        if words.get(name, 0) <= WORDS:
            yield f"{name}: {words.get(name, 0)} words; take it from LONG in {__file__}"


def too_wide(pages: Mapping[str, str]) -> Iterator[str]:
    """A line for each line of text beyond COLUMNS, and for each of UNWRAPPED that has none."""
    wide = {name: list(wide_lines(text)) for name, text in pages.items()}
    for name, numbers in wide.items():
        if not name.startswith(UNWRAPPED):
            for number in numbers:
                yield f"{name}:{number}: wrap the page at {COLUMNS} columns"
    for prefix in UNWRAPPED:
        if not any(numbers for name, numbers in wide.items() if name.startswith(prefix)):
            yield f"{prefix}: no line is wide; take it from UNWRAPPED in {__file__}"


def wide_lines(text: str) -> Iterator[int]:
    """The numbers of lines beyond COLUMNS that could be broken: not of code, tables and headings."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif len(line) > COLUMNS and not fenced and not line.lstrip().startswith(("|", "#")):
            words = WHOLE.sub("x", line.strip().removeprefix("- "))
            if " " in words:
                yield number


def main() -> int:
    """The exit code."""
    code, pages = {**dict(sources("*.py")), **dict(sources("*.proto"))}, texts()
    worded = {name: text for name, text in code.items() if not name.startswith(UNCHECKED)}
    worded |= {name: text for name, text in pages.items() if not name.startswith(UNWRAPPED)}
    wrong = [*openings(code), *phrases(worded), *too_long(pages), *too_wide(pages)]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
