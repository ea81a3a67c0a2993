"""The routes of a vLLM server that the mesh uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from meshrl.contract.errors import InfraError
from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.engines._server.http import Http, message_of
from meshrl.rollout.engines._server.request import Ask
from meshrl.rollout.engines._server.response import Chunk
from meshrl.rollout.engines._vllm.native import NativeSender

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the ids of token-in/token-out requests."""
METRICS_S = 10.0
PAUSE = {
    OnUpdate.DRAIN: {"mode": "wait", "clear_cache": "true"},
    OnUpdate.INTERRUPT: {"mode": "keep", "clear_cache": "true"},
    OnUpdate.IN_FLIGHT: {"mode": "keep", "clear_cache": "false"},
}
"""`keep` with `clear_cache` preempts what runs: its cache is computed anew under the weights it resumes with."""


class Client(Http):
    """Satisfies `meshrl.rollout.engines._server.server.Client`."""

    def __init__(
        self, url: str, *, silence_s: float, update_s: float, sender: NativeSender | None = None
    ) -> None:
        """With a `sender` versions are broadcast, without one the server's plugin reads them."""
        key = os.environ.get("VLLM_API_KEY")  # the name by which the server itself reads it
        super().__init__("vLLM", url, key=key, silence_s=silence_s, update_s=update_s)
        self._sender = sender

    async def close(self) -> None:
        """Leave the communicator, free the connections."""
        if self._sender is not None:
            await self._sender.close()
        await super().close()

    async def ready_for_weights(self) -> None:
        """Have the server's workers ready for an update. Raises MeshError."""
        if self._sender is not None:
            await self._sender.join(self)
        else:
            await self.call("POST", "/init_weight_transfer_engine", json={"init_info": {}})

    async def label(self) -> str:
        """The version's label that the server stamps on tokens now. Raises what `call` does."""
        return str((await self.call("GET", "/weight_info"))["weight_version"])

    async def cache_tokens(self) -> int:
        """Tokens that the KV cache holds, over all engine cores, by the labels of its metrics; 0 without metrics."""
        return cache_tokens(await self.text("/metrics", wait_s=METRICS_S))

    async def load(self, directory: Path, version: Version, on_update: OnUpdate) -> None:
        """Pause, replace the weights by those in `directory`, label them, resume.

        Raises:
            MeshError: at any point; the server must then be taken for half loaded.
        """
        if self._sender is not None:
            await self._sender.join(self)  # again, if rank 0 died since
        await self.call("POST", "/pause", params=PAUSE[on_update])
        await self.call("POST", "/start_weight_update")
        if self._sender is not None:
            await self._sender.send(self, directory)
        else:
            info = {"path": str(directory)}
            await self.call("POST", "/update_weights", json={"update_info": info})
        await self.call("POST", "/finish_weight_update", json={"weight_version": str(version)})
        label = await self.label()
        if label != str(version):
            raise InfraError(f"vLLM at {self.url} says its weights are {label!r}, not {version}")
        await self.call("POST", "/resume")

    async def generate(self, request_id: str, ask: Ask, salt: str) -> AsyncGenerator[Chunk, None]:
        """Stream one response. Closing the iterator closes the connection, which aborts the request.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, went away or kept silent.
        """
        body = {
            "request_id": request_id,
            "token_ids": ask.token_ids,
            "cache_salt": salt,
            "sampling_params": sampling_params(ask),
            "stream": True,
        }
        async with contextlib.aclosing(self.stream(GENERATE, body)) as events:
            async for event in events:
                yield _chunk(event)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last chunk."""
        await self.call("POST", ABORT, json={"request_ids": [ID_PREFIX + request_id]})


def cache_tokens(metrics: str) -> int:
    """What `vllm:cache_config_info` says, a sample for each engine core.

    `kv_cache_size_tokens` counts groups of layers that share blocks; servers without it have one kind of layer.
    """
    total = 0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                told = sample.labels
                tokens = _whole(told.get("kv_cache_size_tokens"))
                total += tokens or _whole(told.get("num_gpu_blocks")) * _whole(
                    told.get("block_size")
                )
    return total


def _whole(text: str | None) -> int:
    """0 for what is no number: vLLM writes None."""
    return int(text) if text and text.isdigit() else 0


def sampling_params(ask: Ask) -> Mapping[str, Any]:
    """The `sampling_params` of the token-in/token-out route."""
    return {
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed if ask.temperature else None,
        "stop_token_ids": list(ask.stop_token_ids),
        "ignore_eos": True,  # those that count are named above
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": ask.stream_interval,
    }


def _chunk(event: Mapping[str, Any]) -> Chunk:
    if "choices" not in event:
        raise InfraError(f"vLLM failed a request: {message_of(event)}")
    (choice,) = event["choices"]
    content = (choice["logprobs"] or {}).get("content") or []
    spans = choice.get("weight_versions")
    tokens = choice["token_ids"] or []
    if len(content) != len(tokens):
        raise InfraError(f"vLLM gave {len(content)} log-probs for {len(tokens)} tokens")
    return Chunk(
        tokens=tokens,
        logprobs=[entry["logprob"] for entry in content],
        finish_reason=choice["finish_reason"] or "",
        spans=None
        if spans is None
        else [(span["version"], span["start"], span["end"]) for span in spans],
    )
