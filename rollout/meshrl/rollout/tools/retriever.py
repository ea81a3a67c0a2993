r"""The tool `search` by a service over HTTP that speaks Search-R1's protocol, as verl's retrievers do.

POST url {"queries": [q], "topk": k, "return_scores": true}
──▶ {"result": [[{"document": {"contents": "title\ntext"}, "score": 1.5}, …]]}
"""

from __future__ import annotations

import json

import httpx

from meshrl.common.sockets import DIRECT
from meshrl.contract.errors import InfraError
from meshrl.rollout.tools.config import SearchConfig
from meshrl.rollout.tools.ports import ToolError
from meshrl.rollout.tools.search import document, shown

MAX_BYTES = 8 << 20
"""Of an answer."""


class Retriever:
    """The function `search(query)` over HTTP, with connections that last as long as the worker's tools."""

    def __init__(self, config: SearchConfig) -> None:
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
