"""A tiny tokenizer with a chat template that shows tools, a checkpoint with it, and a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.contract.errors import MeshError
from meshrl.contract.types import GenerateDelta, GenerateRequest, Version
from meshrl.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>"
    "{% else %}{{ m.role[0] | upper }}:{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
FIRST, SECOND = Version(1, 0), Version(1, 1)


def write_chat_model(path: Path, **options: Any) -> None:
    """The demo's model, with a chat template."""
    write_tiny_model(path, **options)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def chat_tokenizer(path: Path) -> HuggingFaceTokenizer:
    write_chat_model(path)
    return load_tokenizer(path)


class Scripted:
    """A `Generator` with scripted responses: texts, or the error that ends one. The last token is <eos>.

    Each token has a log-prob of its own; from `swap_at` on tokens are of the second version. It stalls at `pause`
    until `go` is set.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        *responses: str | MeshError,
        swap_at: int = 1 << 30,
        end: str = "<eos>",
    ) -> None:
        self.version = FIRST
        self.requests: list[GenerateRequest] = []
        self.sampled: list[tuple[list[int], list[float]]] = []
        self.aborted = 0
        self.go = asyncio.Event()
        self.go.set()
        self._tokenizer = tokenizer
        self._responses = list(responses)
        self._swap_at = swap_at
        self._end = tokenizer.encode(end)[0]
        self._count = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        self.requests.append(request)
        response = self._responses.pop(0)
        if isinstance(response, MeshError):
            raise response
        ids = [*self._tokenizer.encode(response), self._end]
        returned = ids[: request.sampling.max_tokens]
        for stop in request.sampling.stop:
            for count in range(1, len(returned)):
                if stop in self._tokenizer.decode(returned[:count]):
                    returned = returned[:count]
                    break
        logprobs = [-0.01 * (self._count + i + 1) for i in range(len(returned))]
        self._count += len(returned)
        self.sampled.append((returned, logprobs))
        cut = len(returned) < len(ids) and not any(
            stop in self._tokenizer.decode(returned) for stop in request.sampling.stop
        )
        try:
            for start in range(0, len(returned), 3):
                if start:
                    await self.go.wait()
                await asyncio.sleep(0)
                part = returned[start : start + 3]
                last = start + 3 >= len(returned)
                self.version = FIRST if self._count < self._swap_at else SECOND
                yield delta(
                    part,
                    logprobs[start : start + 3],
                    self.version,
                    ("length" if cut else "stop") if last else "",
                )
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted += 1
            raise


def delta(
    tokens: Sequence[int], logprobs: Sequence[float], version: Version, reason: str
) -> GenerateDelta:
    return GenerateDelta(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        version=version,
        finish_reason=reason,
    )
