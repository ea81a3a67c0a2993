"""Compares a run's directory with the page of the documentation that names its files and what bounds each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "run-directory.md"


def bounds() -> Mapping[str, str]:
    """The bound of each file or folder, by its path on the page."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {
        path: bound.rstrip(" |")
        for names, *_, bound in rows
        for path in re.findall("`(.+?)`", names)
    }


def unnamed(paths: Iterable[str]) -> list[str]:
    """The `paths`, relative to a run's directory, that the page does not name."""
    patterns = [
        re.sub("<\\w+>", r"[\\w-]+", name.replace(".", r"\."))
        + (".*" if name.endswith("/") else "")
        for name in bounds()
    ]
    named = re.compile("|".join(patterns))
    return sorted(path for path in paths if not named.fullmatch(path))


def unnamed_files(directory: Path) -> list[str]:
    """The files of a run's directory that the page does not name."""
    files = (path for path in directory.rglob("*") if not path.is_dir())
    return unnamed(str(path.relative_to(directory)) for path in files)
