"""Requests to an SGLang server, and readers of its answers."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import InfraError, UserError
from meshrl.images import ImageFeatures
from meshrl.rollout.server_engine.http import error_message
from meshrl.rollout.server_engine.request import Picture, ServerRequest
from meshrl.rollout.server_engine.response import Chunk

Int64: TypeAlias = npt.NDArray[np.int64]

BAD_REQUEST = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """How a server was started, as far as it matters to its client."""

    ranks: int
    """Tensor-parallel ranks: each wants its own copy of a payload."""
    overlaps: bool
    """Whether it computes a step while it records the last one: when paused, one step is unrecorded."""
    increments: bool
    """Each event of a stream has only the new tokens."""
    eos_token_ids: Collection[int]
    """Tokens that end a response by the checkpoint's own configuration."""
    vocab_size: int
    mask_tokens: int
    """The most tokens that a returned sampling mask may have."""
    experts: tuple[int, int] = (0, 0)
    """Layers, and experts of a token, by the checkpoint's configuration."""


def request_body(
    request_id: str, request: ServerRequest, salt: str, facts: ServerFacts
) -> dict[str, Any]:
    """The body of `/generate`. Raises UserError for a distribution whose log-probs the server cannot give."""
    # The server's log-probs are of the distribution after temperature, before top-k and top-p; the tokens that these
    # leave come as a mask.
    narrowed = request.top_p < 1 or request.top_k > 0 or request.min_p > 0
    cut = bool(request.temperature) and narrowed
    top_k = min(request.top_k, facts.vocab_size) if request.top_k > 0 else facts.vocab_size
    if cut and top_k > facts.mask_tokens:
        raise UserError(
            f"top_p {request.top_p} with top_k {request.top_k} and min_p {request.min_p}: SGLang gives exact"
            f" log-probs for up to {facts.mask_tokens} tokens; set a smaller top_k, or start it with a larger"
            " --sampling-mask-max-tokens"
        )
    # `ignore_eos` also disables stop tokens, and without it the checkpoint's own end of sequence stops. So the server
    # looks for stop tokens only where its own are among those requested; else the engine does.
    stops = set(request.stop_token_ids)
    ignore = not stops or not set(facts.eos_token_ids) <= stops
    return {
        "rid": request_id,
        "input_ids": list(request.token_ids),
        "sampling_params": {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": top_k if cut else -1,
            "min_p": request.min_p if cut else 0.0,
            "logit_bias": {str(token): bias for token, bias in request.logit_bias.items()} or None,
            "max_new_tokens": request.max_tokens,
            "stop_token_ids": None if ignore else list(request.stop_token_ids),
            "ignore_eos": ignore,
            "no_stop_trim": True,
            "stream_interval": request.stream_interval,
            "sampling_seed": request.seed,
        },
        "return_logprob": True,
        "return_sampling_mask": cut,
        "return_routed_experts": request.experts_from is not None,
        "routed_experts_start_len": request.experts_from or 0,
        "cache_salt": salt,
        "stream": True,
    }


def prompt_body(request: ServerRequest, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body that asks for log-probs of a request's prompt instead of a response."""
    sampling = {**body["sampling_params"], "max_new_tokens": 1}
    return {
        **body,
        "rid": f"{body['rid']}-prompt",
        "input_ids": list(request.token_ids[: request.prompt_length]),
        "sampling_params": sampling,
        "return_sampling_mask": False,
        "return_routed_experts": False,
        "logprob_start_len": 0,
        "top_logprobs_num": request.prompt_top,
        "stream": False,
    }


def places(event: Mapping[str, Any]) -> list[dict[int, float]]:
    """Log-probs of tokens at each place of a prompt but the first. Raises InfraError."""
    if "meta_info" not in event:
        raise InfraError(f"SGLang failed a request: {error_message(event)}")
    meta = event["meta_info"]
    own = meta.get("input_token_logprobs") or ()
    likeliest = meta.get("input_top_logprobs") or [()] * len(own)
    return [
        {token: logprob for logprob, token, *_ in (*(top or ()), chosen)}
        for chosen, top in zip(own[1:], likeliest[1:], strict=True)
    ]


def image_data(pictures: Sequence[Picture], length: int) -> str:
    """Pictures of a prompt of `length` tokens as our plugin in the server takes them: `processor_output` of SGLang.

    Takes a processor's time: in a thread. Raises UserError.
    """
    made = [each.features() for each in pictures]
    places = positions(
        [(each.start, image) for each, image in zip(pictures, made, strict=True)], length
    )
    tensors = {
        "pixel_values": np.concatenate([each.pixels for each in made]),
        "image_grid_thw": np.stack([each.grid for each in made]),
        "mrope_positions": places,
        "mrope_position_delta": np.array([[places.max() + 1 - length]]),
    }
    offsets = [(each.start, each.start + each.num_tokens - 1) for each in pictures]
    packed = {name: _tensor(array) for name, array in tensors.items()}
    return json.dumps({"offsets": offsets, "tensors": packed})


def positions(pictures: Sequence[tuple[int, ImageFeatures]], length: int) -> Int64:
    """int64[3, length]: time, row and column of each token, as Qwen2-VL and those after it count them.

    Args:
        pictures: First token and features of each, in order.
        length: Tokens of the prompt.
    """
    parts: list[Int64] = []
    token = position = 0

    def text(until: int) -> None:
        parts.append(np.broadcast_to(np.arange(until - token), (3, until - token)) + position)

    for start, image in pictures:
        text(start)
        position += start - token
        merge = math.isqrt(int(image.grid.prod()) // image.num_tokens)
        rows, columns = (int(side) // merge for side in image.grid[1:])
        parts.append(np.indices((1, rows, columns)).reshape(3, -1) + position)
        position += max(rows, columns)
        token = start + image.num_tokens
    text(length)
    return np.concatenate(parts, axis=1)


def _tensor(array: npt.NDArray[Any]) -> tuple[str, Sequence[int], str]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return array.dtype.name, array.shape, data


class EventReader:
    """Turns the events of one stream into chunks, whether each has all tokens so far or only new ones."""

    def __init__(self, *, increments: bool, cut: bool, experts: tuple[int, int] = (0, 0)) -> None:
        """`increments`: events have only new tokens. `cut`: the request has a top-k or top-p.

        `experts`: layers, and experts of a token.
        """
        self._shape = experts
        self._increments = increments
        self._cut = cut
        self._seen = 0

    def read(self, event: Mapping[str, Any]) -> Chunk:
        """The new tokens of `event`.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, or its log-probs do not fit its tokens.
        """
        if "meta_info" not in event:
            raise InfraError(f"SGLang failed a request: {error_message(event)}")
        meta = event["meta_info"]
        finish = meta.get("finish_reason") or {}
        reason = str(finish.get("type", ""))
        if reason == "abort":
            if finish.get("status_code") == BAD_REQUEST:
                raise UserError(f"SGLang refuses a request: {finish.get('message')}")
            # Each place where a request is aborted fills this event differently, so its tokens are not read.
            return Chunk(
                tokens=(),
                logprobs=(),
                finish_reason=f"abort ({finish.get('message')})",
                spans=_spans(meta),
                experts=self._experts(meta),
            )
        start = 0 if self._increments else self._seen
        tokens = event["output_ids"][start:]
        logprobs = self._logprobs(meta)[start:]
        if len(logprobs) != len(tokens):
            raise InfraError(f"SGLang gave {len(logprobs)} log-probs for {len(tokens)} tokens")
        self._seen += len(tokens)
        return Chunk(
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            spans=_spans(meta),
            experts=self._experts(meta),
        )

    def _experts(self, meta: Mapping[str, Any]) -> npt.NDArray[Any] | None:
        """[n, L, K] of the base64 of its int32. Raises InfraError."""
        encoded = meta.get("routed_experts")
        if encoded is None:
            return None
        try:
            return np.frombuffer(base64.b64decode(encoded), "<i4").reshape(-1, *self._shape)
        except (ValueError, TypeError) as error:
            raise InfraError(f"SGLang gave routed experts that cannot be read: {error}") from error

    def _logprobs(self, meta: Mapping[str, Any]) -> Sequence[float]:
        if self._cut:
            logprobs: Sequence[float] = meta.get("output_token_sampling_logprobs") or ()
            return logprobs
        return [entry[0] for entry in meta.get("output_token_logprobs") or ()]


def _spans(meta: Mapping[str, Any]) -> Sequence[tuple[str, int, int]] | None:
    """Version spans, which only the last event has; `weight_version` is of when an event was sent, not sampled."""
    spans = meta.get("weight_versions")
    return None if spans is None else [(s["version"], s["start"], s["end"]) for s in spans]


_PROTOCOL_2_EMPTY_LIST = b"\x80\x02]"
_TEXT = b"X"
_CALL_TORCH_TENSOR = b"ctorch\nTensor\n)R"
_PAIR_APPEND_STOP = b"\x86a."


def named_empty_tensor(name: str) -> str:
    """Base64 of the pickle of `[(name, torch.Tensor())]`: the smallest legal body of `/update_weights_from_tensor`.

    The name says where a version is. SGLang wants one pickle for each tensor-parallel rank and reads it with an
    unpickler that allows a list of harmless names (0.5.23, `srt/utils/common.py`: `SafeUnpickler.ALLOWED_GLOBALS`).
    These are eight opcodes written by hand, so that no code of ours pickles or unpickles anything.
    """
    text = name.encode()
    body = _PROTOCOL_2_EMPTY_LIST + _TEXT + struct.pack("<I", len(text)) + text
    return base64.b64encode(body + _CALL_TORCH_TENSOR + _PAIR_APPEND_STOP).decode()
