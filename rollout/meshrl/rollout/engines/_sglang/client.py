"""The routes of an SGLang server that the mesh uses.

What is said of the server here was read in the sources of 0.5.23.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshrl.contract.errors import InfraError, MeshError, UserError
from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.engines._server.http import Http, message_of
from meshrl.rollout.engines._server.request import Ask
from meshrl.rollout.engines._server.response import Chunk
from meshrl.rollout.engines._sglang.payload import named_empty_tensor

LOADER = "meshrl_sglang.load"
"""What the server was started with: `plugin/meshrl_sglang.py`."""
BAD_REQUEST = 400
ABORT_S = 5.0
"""Deadline of an abort on the way out of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How a server was started, as far as it matters to a client."""

    ranks: int
    """Tensor-parallel ranks: each wants its own copy of a payload."""
    overlaps: bool
    """It computes a step while it books the one before, and so has an unbooked step in hand when it is paused."""
    increments: bool
    """Each event of a stream has only what is new."""
    eos_token_ids: Collection[int]
    """What ends a response by the checkpoint's own account."""
    vocab_size: int
    mask_tokens: int
    """Tokens that a returned sampling mask may have."""


class Sender(Protocol):
    """Broadcasts a version to the server's ranks while the server is told to receive it."""

    async def send(self, client: Client, directory: Path, version: Version) -> None:
        """Raises MeshError."""
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


class Client(Http):
    """Satisfies `meshrl.rollout.engines._server.server.Client`."""

    def __init__(
        self,
        url: str,
        *,
        update: str,
        silence_s: float,
        update_s: float,
        sender: Sender | None = None,
    ) -> None:
        key = os.environ.get("SGLANG_API_KEY")
        super().__init__("SGLang", url, key=key, silence_s=silence_s, update_s=update_s)
        self._update = update
        self._sender = sender
        self.facts = Facts(
            ranks=1, overlaps=True, increments=False, eos_token_ids=(), vocab_size=1, mask_tokens=1
        )
        """Set by the check at the start."""

    async def close(self) -> None:
        """Leave a weight-update group, free the connections."""
        if self._sender is not None:
            await self._sender.close()
        await super().close()

    async def label(self) -> str:
        """The version's label that the server stamps on tokens now. Raises what `call` does."""
        return str((await self.call("GET", "/model_info"))["weight_version"])

    async def cache_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 where the server does not say."""
        info = await self.call("GET", "/server_info")
        return int(info.get("max_total_num_tokens") or 0)

    async def load(self, directory: Path, version: Version, on_update: OnUpdate) -> None:
        """Pause, replace the weights by those in `directory`, label them, go on.

        Raises:
            MeshError: at any point; the server must then be taken for half loaded.
        """
        await self.call("POST", "/pause_generation", json={"mode": self._pause_mode(on_update)})
        if self._update == "disk":
            await self._load_from_disk(directory, version)
        else:
            await self.call("POST", "/begin_weight_update", json={})
            if self._sender is not None:
                await self._sender.send(self, directory, version)
            else:
                await self._load_staged(directory, version)
            await self.call("POST", "/end_weight_update", json={})
        if on_update is OnUpdate.INTERRUPT:
            await self.call("POST", "/flush_cache")
        label = await self.label()
        if label != str(version):
            raise InfraError(f"{self.who} says its weights are {label!r}, not {version}")
        await self.call("POST", "/continue_generation", json={"torch_empty_cache": False})

    def _pause_mode(self, on_update: OnUpdate) -> str:
        """`retract` puts what runs back into the waiting queue; `in_place` holds it where it is.

        With overlap, `in_place` leaves a step in hand that was sampled and is not booked: after the update its token
        would be labelled with weights that did not sample it. `retract` books it first.
        """
        keeps = on_update is not OnUpdate.INTERRUPT and not self.facts.overlaps
        return "in_place" if keeps else "retract"

    async def _load_staged(self, directory: Path, version: Version) -> None:
        payload = named_empty_tensor(str(directory))
        await self.call(
            "POST",
            "/update_weights_from_tensor",
            json={
                "serialized_named_tensors": [payload] * self.facts.ranks,
                "load_format": LOADER,
                "weight_version": str(version),
                "flush_cache": False,  # refused, with the weights already in, where requests are in hand
            },
        )

    async def _load_from_disk(self, directory: Path, version: Version) -> None:
        await self.call(
            "POST",
            "/update_weights_from_disk",
            json={
                "model_path": str(directory),
                "load_format": "auto",  # else that of the start, which may be `dummy`
                "weight_version": str(version),
                "flush_cache": False,
            },
        )

    async def generate(self, request_id: str, ask: Ask, salt: str) -> AsyncGenerator[Chunk, None]:
        """Stream one response. Closing the iterator aborts the request.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, went away or kept silent.
        """
        body = request_body(request_id, ask, salt, self.facts)
        reader = _Reader(increments=self.facts.increments, cut=body["return_sampling_mask"])
        ended = False
        try:
            async with contextlib.aclosing(self.stream("/generate", body)) as events:
                async for event in events:
                    chunk = reader.read(event)
                    ended = bool(chunk.finish_reason)
                    yield chunk
        finally:
            if not ended:
                # The server notices a closed connection seconds later, or with the next token.
                with contextlib.suppress(MeshError):
                    await self.abort(request_id, wait_s=ABORT_S)

    async def abort(self, request_id: str, *, wait_s: float | None = None) -> None:
        """End a request, and every other whose id begins with its; its stream gets a last chunk."""
        await self.call("POST", "/abort_request", json={"rid": request_id}, wait_s=wait_s)


def request_body(request_id: str, ask: Ask, salt: str, facts: Facts) -> dict[str, Any]:
    """The body of `/generate`. Raises UserError for a distribution whose log-probs the server cannot give."""
    # Its log-probs are those of the tempered distribution, before top-k and top-p; what is cut off comes as a mask.
    cut = bool(ask.temperature) and (ask.top_p < 1 or ask.top_k > 0)
    top_k = min(ask.top_k, facts.vocab_size) if ask.top_k > 0 else facts.vocab_size
    if cut and top_k > facts.mask_tokens:
        raise UserError(
            f"top_p {ask.top_p} with top_k {ask.top_k}: SGLang says whole log-probs of up to {facts.mask_tokens} "
            "tokens; set a smaller top_k, or start it with a larger --sampling-mask-max-tokens"
        )
    # `ignore_eos` switches stop tokens off, too, and without it the checkpoint's own end of sequence stops. So the
    # server looks for stops only where its own are among those asked for; else the engine does.
    ignore = not ask.stop_token_ids or not set(facts.eos_token_ids) <= set(ask.stop_token_ids)
    return {
        "rid": request_id,
        "input_ids": list(ask.token_ids),
        "sampling_params": {
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": top_k if cut else -1,
            "max_new_tokens": ask.max_tokens,
            "stop_token_ids": None if ignore else list(ask.stop_token_ids),
            "ignore_eos": ignore,
            "no_stop_trim": True,
            "stream_interval": ask.stream_interval,
            "sampling_seed": ask.seed,
        },
        "return_logprob": True,
        "return_sampling_mask": cut,
        "cache_salt": salt,
        "stream": True,
    }


class _Reader:
    """Turns the events of one stream into chunks, whether each has all tokens so far or only new ones."""

    def __init__(self, *, increments: bool, cut: bool) -> None:
        self._increments = increments
        self._cut = cut
        self._seen = 0

    def read(self, event: Mapping[str, Any]) -> Chunk:
        if "meta_info" not in event:
            raise InfraError(f"SGLang failed a request: {message_of(event)}")
        meta = event["meta_info"]
        finish = meta.get("finish_reason") or {}
        reason = str(finish.get("type", ""))
        if reason == "abort":
            if finish.get("status_code") == BAD_REQUEST:
                raise UserError(f"SGLang refuses a request: {finish.get('message')}")
            # What comes with it is said in as many ways as there are places to be aborted in; nobody wants it.
            return Chunk(
                tokens=(),
                logprobs=(),
                finish_reason=f"abort ({finish.get('message')})",
                spans=_spans(meta),
            )
        start = 0 if self._increments else self._seen
        tokens = event["output_ids"][start:]
        logprobs = self._logprobs(meta)[start:]
        if len(logprobs) != len(tokens):
            raise InfraError(f"SGLang gave {len(logprobs)} log-probs for {len(tokens)} tokens")
        self._seen += len(tokens)
        return Chunk(tokens=tokens, logprobs=logprobs, finish_reason=reason, spans=_spans(meta))

    def _logprobs(self, meta: Mapping[str, Any]) -> Sequence[float]:
        if self._cut:
            found: Sequence[float] = meta.get("output_token_sampling_logprobs") or ()
            return found
        return [entry[0] for entry in meta.get("output_token_logprobs") or ()]


def _spans(meta: Mapping[str, Any]) -> Sequence[tuple[str, int, int]] | None:
    """With the last event only: the `weight_version` of the others is of when they were sent, not sampled."""
    spans = meta.get("weight_versions")
    return None if spans is None else [(s["version"], s["start"], s["end"]) for s in spans]
