r"""The tool `search`: over a folder of text by BM25 (bm25s), or by a service that speaks Search-R1's protocol.

POST url {"queries": [q], "topk": k, "return_scores": true}
──▶ {"result": [[{"document": {"contents": "title\ntext"}, "score": 1.5}, …]]}
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from meshrl.common.sockets import DIRECT, has_secret, keep_secret
from meshrl.contract.errors import ConfigError, InfraError
from meshrl.contract.types import Json
from meshrl.rollout.tools.ports import SearchConfig, ToolError

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
            for paragraph in path.read_text(encoding="utf-8-sig").split("\n\n"):
                if paragraph.strip():
                    yield path.stem, paragraph.strip()
            continue
        with path.open(encoding="utf-8-sig") as lines:
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
    """The passages in Search-R1's format."""
    return "\n".join(
        f"Doc {number}(Title: {title}) {text}" for number, (title, text) in enumerate(hits, start=1)
    )


MAX_BYTES = 8 << 20
"""Size limit of an answer."""


class Retriever:
    """The function `search(query)` over HTTP, with connections that last as long as the worker's tools."""

    def __init__(self, config: SearchConfig) -> None:
        """Raises UserError where its password would travel unencrypted to another machine."""
        if has_secret(config.url):
            keep_secret(config.url, "the password of a retriever")
        self._config = config
        self._client: httpx.AsyncClient | None = None

    async def search(self, query: str) -> str:
        """Search for passages that answer a question.

        Args:
            query: What to search for.
        """
        if self._client is None:
            self._client = httpx.AsyncClient(  # made by the loop that uses it
                timeout=None, mounts=DIRECT
            )
        url = self._config.url
        asked = {"queries": [query], "topk": self._config.top_k, "return_scores": True}
        try:
            async with self._client.stream("POST", url, json=asked) as response:
                body = await _bounded(response)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise InfraError(f"the retriever {url} does not answer: {reason}") from error
        said = body[:200].decode(errors="replace")
        if response.is_client_error:
            raise ToolError(f"the retriever refuses the query: {said}")
        try:
            response.raise_for_status()
            (hits,) = json.loads(body)["result"]
            hits = hits[: self._config.top_k]
            return shown([document(hit.get("document", hit)) for hit in hits])
        except (httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"HTTP {response.status_code}: {said!r}"
            raise InfraError(f"the retriever {url} failed: {problem}") from error

    async def close(self) -> None:
        """Close its connections; idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


async def _bounded(response: httpx.Response) -> bytes:
    """The body, read no further than MAX_BYTES; what is cut is no JSON."""
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_BYTES:
            return body[:MAX_BYTES]
    return body
