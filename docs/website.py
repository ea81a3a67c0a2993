"""Makes a website of docs/ with zensical: `python docs/website.py FOLDER [REPOSITORY]`, as `make site` does.

The navigation is the map in README.md. Links to files outside docs/ lead to the repository, an address such as
https://host/group/meshrl/blob/main; without one, they become plain text.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def main() -> int:
    """The exit code of zensical."""
    folder = Path(sys.argv[1]).resolve()
    repository = sys.argv[2] if len(sys.argv) > 2 else ""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(DOCS, folder / "docs", ignore=ignored)
    for page in DOCS.rglob("*.md"):
        copy = folder / "docs" / page.relative_to(DOCS)
        copy.write_text(outward(page, repository))
    (folder / "docs/README.md").rename(folder / "docs/index.md")
    settings = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())
    settings["nav"] = navigation((DOCS / "README.md").read_text())
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False))
    program = Path(sys.executable).with_name("zensical")
    return subprocess.call([program, "build", "--clean", "--strict"], cwd=folder)


def outward(page: Path, repository: str) -> str:
    """The page's text, whose links out of docs/ lead to the repository or are text."""

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        path, mark, anchor = target.partition("#")
        file = (page.parent / path).resolve()
        if not path or re.match("[a-z]+:", target):
            return found[0]
        if file.is_relative_to(DOCS) and file.suffix not in ("", ".py"):
            inside = re.sub(r"README\.md$", "index.md", path) if file.parent == DOCS else path
            return f"[{label}]({inside}{mark}{anchor})"
        if not repository:
            return label
        return f"[{label}]({repository}/{file.relative_to(DOCS.parent)}{mark}{anchor})"

    return outside_fences(page.read_text(), lambda text: LINK.sub(link, text))


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with its parts outside of blocks of code changed."""
    parts = FENCE.split(text)
    return "".join(part if place % 2 else change(part) for place, part in enumerate(parts))


def navigation(text: str) -> list[dict[str, object]]:
    """The sections of the map, each with its links to pages of docs/ once."""
    sections: list[dict[str, object]] = [{"Home": "index.md"}]
    seen: set[str] = set()
    for title, body in re.findall(
        r"^\*\*(.+?)\*\*(.*?)(?=^\*\*|\Z)", text, re.MULTILINE | re.DOTALL
    ):
        pages: list[dict[str, str]] = []
        for label, target in LINK.findall(body):
            if target.endswith(".md") and not target.startswith("..") and target not in seen:
                seen.add(target)
                pages.append({" ".join(label.replace("`", "").split()): target})
        sections.append({title: pages})
    return sections


if __name__ == "__main__":
    sys.exit(main())
