"""The tool `search` over a folder of text: BM25 (bm25s). A service is asked by `retriever`."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Json
from meshrl.rollout.tools.config import SearchConfig

SUFFIXES = (".jsonl", ".md", ".txt")


def search_function(config: SearchConfig, where: str) -> Callable[[str], str]:
    """The function `search(query)` over `config.folder` that the policy calls.

    Raises:
        ConfigError: with the recipe's key `where`: no such folder, nothing in it, a line that is no passage, or no
            package bm25s.
    """
    if importlib.util.find_spec("bm25s") is None:
        need = "a search over a folder needs the extra `search`: pip install meshrl[search]"
        raise ConfigError(f"{where}: {need}", key=where)
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it says each index and each query
    assert config.folder is not None
    found = list(passages(config.folder, where))
    if not found:
        kinds = ", ".join(SUFFIXES)
        problem = f"no passages in the files {kinds} of {config.folder}"
        raise ConfigError(f"{where}.folder: {problem}", key=f"{where}.folder")

    def words(texts: list[str]) -> list[list[str]]:
        split: list[list[str]] = bm25s.tokenize(
            texts, stopwords=None, return_ids=False, show_progress=False
        )
        return split

    index = bm25s.BM25()
    index.index(words([f"{title}\n{text}" for title, text in found]), show_progress=False)
    most = min(config.top_k, len(found))

    def search(query: str) -> str:
        """Search for passages that answer a question.

        Args:
            query: What to search for.
        """
        best, scores = index.retrieve(words([query]), k=most, show_progress=False)
        return shown([found[i] for i, score in zip(best[0], scores[0], strict=True) if score > 0])

    return search


def passages(folder: Path, where: str) -> Iterator[tuple[str, str]]:
    r"""Title and text of each passage, files in the order of their names.

    A line of a `.jsonl` file is `{"contents": "title\ntext"}` or `{"title", "text"}`; paragraphs of other files are
    separated by an empty line, and their title is the file's name.

    Raises:
        ConfigError: see `search_function`.
    """
    check_folder(folder, where)
    for path in sorted(each for each in folder.rglob("*") if each.suffix in SUFFIXES):
        if path.suffix != ".jsonl":
            for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
                if paragraph.strip():
                    yield path.stem, paragraph.strip()
            continue
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield document(json.loads(line))
                except (KeyError, TypeError, ValueError) as error:
                    want = 'want {"contents": "title\\ntext"} or {"title": …, "text": …}'
                    at = f"{where}.folder: {path}:{number}"
                    raise ConfigError(f"{at}: no passage: {want}", key=f"{where}.folder") from error


def check_folder(folder: Path, where: str) -> None:
    """Raises ConfigError, with the recipe's key `where`, where there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(f"{where}.folder: no such folder: {folder}", key=f"{where}.folder")


def document(document: Json) -> tuple[str, str]:
    """Title and text; raises KeyError, TypeError or ValueError for anything else."""
    if "contents" in document:
        title, _, text = document["contents"].partition("\n")
        return title.strip('"'), text.strip()
    return str(document["title"]), str(document["text"])


def shown(hits: list[tuple[str, str]]) -> str:
    """As Search-R1 shows passages."""
    return "\n".join(
        f"Doc {number}(Title: {title}) {text}" for number, (title, text) in enumerate(hits, start=1)
    )
