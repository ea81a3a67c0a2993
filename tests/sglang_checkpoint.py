"""A checkpoint and its versions for the fake SGLang server, whose weights are one number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import xxhash

from meshrl.contract.types import TensorSpec, Uint8, Version, WeightManifest
from meshrl.rollout.server_engine.checkpoint import write_version
from meshrl.rollout.streams import Response
from meshrl.testing.sglang_server.scheduler import GARBAGE, marks_of

VOCABULARY = 512
EOS = 511
SHAPES = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}


def mark(version: Version) -> int:
    """The mark that the fake encodes while it serves `version`."""
    return version.step % GARBAGE


def weights(version: Version) -> tuple[WeightManifest, Sequence[Uint8]]:
    """The version whose first number is its mark: two tensors of two dtypes in one bucket."""
    tensors, pieces, offset = [], [], 0
    for name, shape in SHAPES.items():
        data = np.full(shape, mark(version), dtype="<f4").reshape(-1).view(np.uint8)
        tensors.append(
            TensorSpec(
                name=name, dtype="float32", shape=shape, bucket=0, offset=offset, nbytes=len(data)
            )
        )
        pieces.append(data)
        offset += len(data)
    bucket = np.concatenate(pieces)
    manifest = WeightManifest(
        run="run",
        version=version,
        tensors=tuple(tensors),
        bucket_bytes=(len(bucket),),
        bucket_hashes=(xxhash.xxh3_128_hexdigest(bucket),),
    )
    return manifest, [bucket]


def make_checkpoint(path: Path, *, max_length: int) -> Path:
    """A model directory with mark 0."""
    config = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": max_length,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
    }
    manifest, buckets = weights(Version(1, 0))
    write_version(path, manifest, buckets, tied=False)
    (path / "config.json").write_text(json.dumps(config))
    return path


def mislabelled(answer: Response) -> int:
    """How many tokens (or their log-probs) come from other weights than the span says."""
    wrong = 0
    for span in answer.spans:
        expected = mark(span.version)
        for index in range(span.start, span.end):
            sampled, _ = marks_of(float(answer.logprobs[index]))
            wrong += answer.tokens[index] != expected or sampled != expected
    return wrong


def cache_marks(answer: Response) -> list[int]:
    """The weights that the cache of each token was computed with."""
    return [marks_of(float(value))[1] for value in answer.logprobs]


async def post(url: str, route: str, body: Mapping[str, object]) -> None:
    """A call of another client."""
    async with httpx.AsyncClient(trust_env=False) as http:
        (await http.post(f"{url}{route}", json=body)).raise_for_status()


async def fault(url: str, **what: object) -> None:
    """Make the fake fail; see `Routes._fault`."""
    await post(url, "/fake/fault", what)


async def state(url: str) -> Any:
    """The fake's own state."""
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{url}/fake/state")).json()
