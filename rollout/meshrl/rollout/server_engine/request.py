"""Checks a request of the mesh and turns it into what any server needs to know."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.contract.errors import UserError
from meshrl.contract.types import GenerateRequest, Media
from meshrl.images import ImageFeatures, ImageProcessor
from meshrl.rollout.end_tokens import StopStrings
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts
from meshrl.rollout.server_engine.config import ServerConfig
from meshrl.rollout.streams import check_request, response_before


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """One response to be sampled, independent of the kind of server."""

    token_ids: Sequence[int]
    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    """-1: all."""
    max_tokens: int
    """0 for a continued request that has reached its length already."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...]
    """Every token that ends the response; no other token does."""
    seed: int
    """Specific to this request, 63 bits."""
    stream_interval: int
    """Decode steps between two chunks."""
    experts_from: int | None = None
    """The experts of the tokens from this place on are wanted; None: none are."""
    prompt_top: int | None = None
    """As in `GenerateRequest`, of the first `prompt_length` tokens."""
    prompt_length: int = 0
    pictures: tuple[Picture, ...] = ()
    adapter: str = ""
    """The server's name for the adapter that answers; empty: that of the newest version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of a request."""

    media: Media
    start: int
    """Index of its first token in `token_ids`."""
    num_tokens: int
    images: ImageProcessor

    def features(self) -> ImageFeatures:
        """The image as the model reads it. Call this in a thread: it takes processor time. Raises UserError."""
        return self.images.features(self.media, f"picture {self.media.sha256[:12]}")


def read_request(
    request: GenerateRequest,
    config: ServerConfig,
    checkpoint: CheckpointFacts,
    *,
    max_length: int,
    finds_strings: bool,
    adapter: str = "",
) -> ServerRequest:
    """The request for the server.

    It has no stop strings: the engine itself looks for them (`finds_strings`), as every engine of the mesh does, so
    the server needs no tokenizer.

    Raises:
        UserError: the request cannot be run.
    """
    sampling, prompt, name = request.sampling, request.prompt_ids, request.request_id
    check_request(
        request,
        joint_cut=config.joint_cut,
        pictures=config.pictures,
        vocab_size=checkpoint.vocab_size,
    )
    for key, why in config.unable(sampling):
        raise UserError(f"{key}: {why}")
    left = max_length - len(prompt)
    if left < (0 if request.continued else 1):
        raise UserError(
            f"request {name}: {len(prompt)} prompt tokens leave no room for a response in {max_length} "
            "(rollout.engine.max_model_len)"
        )
    if prompt.min() < 0 or prompt.max() >= checkpoint.vocab_size:
        raise UserError(
            f"request {name}: prompt ids go from {prompt.min()} to {prompt.max()}, the model knows 0 to "
            f"{checkpoint.vocab_size - 1}: prompt and model have different tokenizers"
        )
    if sampling.stop and not finds_strings:
        raise UserError("stop strings need a tokenizer, and the engine was built without one")
    eos = checkpoint.eos_token_ids if config.eos_token_ids is None else config.eos_token_ids
    return ServerRequest(
        token_ids=prompt.tolist(),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        max_tokens=min(sampling.max_tokens, left),
        stop_token_ids=tuple(sorted({*eos, *sampling.stop_token_ids})),
        seed=_seed(sampling.seed, name, request.continued),
        stream_interval=config.stream_interval,
        experts_from=request.experts_from,
        prompt_top=request.prompt_top,
        prompt_length=request.prompt_length,
        pictures=_pictures(request, checkpoint),
        adapter=adapter,
    )


def _pictures(request: GenerateRequest, checkpoint: CheckpointFacts) -> tuple[Picture, ...]:
    """Raises UserError for pictures that the model cannot read, or that the prompt has no places for."""
    if not request.media:
        return ()
    where, images = f"request {request.request_id}", checkpoint.images
    if images is None:
        raise UserError(f"{where}: it has pictures, and {checkpoint.path} reads text only")
    places = _places(request, images, where)
    return tuple(
        Picture(media=media, start=start, num_tokens=count, images=images)
        for media, (start, count) in zip(request.media, places, strict=True)
    )


def _places(
    request: GenerateRequest, images: ImageProcessor, where: str
) -> Sequence[tuple[int, int]]:
    """First token and number of tokens of each picture. Raises UserError."""
    prompt, media, starts = request.prompt_ids, request.media, request.media_starts
    first = len(media) - len(starts)
    if first < 0:
        raise UserError(f"{where}: {len(media)} pictures begin at {list(starts)[:8]}")
    found = images.places(prompt, media[:first], where)
    for number, (start, picture) in enumerate(zip(starts, media[first:], strict=True), first + 1):
        count = images.num_tokens(picture, f"{where}, picture {number}")
        own = prompt[max(0, start) : start + count]
        if len(own) != count or (own != images.placeholder).any():
            raise UserError(f"{where}: picture {number} wants {count} places at {start}")
        if found and start < sum(found[-1]):
            raise UserError(f"{where}: picture {number} begins in the one before it, at {start}")
        found.append((start, count))
    return found


def ended_before(
    request: GenerateRequest, server_request: ServerRequest, stop_strings: StopStrings | None
) -> str:
    """Why a continued response needs no more tokens; empty where it does."""
    tokens = response_before(request)
    if not tokens:
        return ""
    if tokens[-1] in server_request.stop_token_ids or (
        stop_strings is not None and stop_strings.completed_by(tokens)
    ):
        return "stop"
    return "" if server_request.max_tokens else "length"


def _seed(seed: int, request_id: str, continued: int) -> int:
    """A seed specific to the request: its draws do not depend on requests that run at the same time.

    A server counts its draws from the first token of a request, so a continued request needs other draws than before.
    """
    name = f"{seed}:{request_id}" + (f":{continued}" if continued else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # both servers take 63 bits
