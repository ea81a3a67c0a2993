"""Rows with pictures for the models of `meshrl.testing.vision`, and what holds them against transformers."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.distributed.tensor import DTensor

from meshrl.contract.ports import Engine
from meshrl.contract.types import (
    GenerateRequest,
    Media,
    SamplingParams,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.images import ImageProcessor
from meshrl.rollout.streams import sample
from meshrl.testing.vision import PLACEHOLDER
from meshrl.trainer.model.packing import Pack, alone, cut, pack
from meshrl.trainer.model.policy import Policy
from meshrl.trainer.model.vision import VisionReader

PACK_TOKENS = 1024
SIDES = (32, 64, 96, 128)


def picture(seed: int, width: int = 64, height: int = 64) -> Media:
    """Noise, as PNG."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return Media.of(file.getvalue())


def row(
    processor: ImageProcessor, media: Sequence[Media], response: int, number: int
) -> Trajectory:
    """A prompt with its pictures and `response` random tokens; the last one is a placeholder that was sampled."""
    draws = np.random.default_rng(number)
    ids = np.array([3, 9, *([5, PLACEHOLDER, 6, 11] * len(media)), 12], dtype=np.int32)
    prompt = processor.expanded(ids, tuple(media), "row")
    answer = draws.integers(9, 19, response).astype(np.int32)
    answer[-1] = PLACEHOLDER
    tokens = np.concatenate([prompt, answer])
    mask = np.zeros(len(tokens), dtype=np.uint8)
    mask[len(prompt) :] = 1
    return Trajectory(
        uid=Uid("r", f"t{number // 2}", number % 2),
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=np.where(mask == 1, np.float32(-3.5), np.float32(0)),
        spans=(VersionSpan(version=Version(1, 0), start=len(prompt), end=len(tokens)),),
        reward=float(draws.random()),
        media=tuple(media),
    )


def rows(checkpoint: Path) -> list[Trajectory]:
    """Rows with no picture, one and two, some of them alike up to there."""
    processor, one, two = ImageProcessor(checkpoint), picture(1, 96, 64), picture(2, 70, 130)
    asked = ((one,), (one,), (two,), (one, two), (picture(3), one), ())
    return [row(processor, media, 4 + n, n) for n, media in enumerate(asked)]


def packed(reader: VisionReader, rows: Sequence[Trajectory], *, share: bool = True) -> Pack:
    """Rows in one pack."""
    return pack(
        [row.tokens for row in rows],
        [row.prompt_length for row in rows],
        images=[reader.of_row(row) for row in rows],
        share_prefixes=share,
    )


def logprobs_alone(hf: Any, row: Trajectory, reader: VisionReader) -> torch.Tensor:
    """float32[response]: of a row by itself, by transformers alone."""
    images, tokens = reader.of_row(row).features, torch.from_numpy(row.tokens).long()
    read, given = tokens[None, :-1], {}
    if images and images[0].pixels.ndim > 2:
        tiles = np.concatenate([each.pixels for each in images])
        given = {"pixel_values": torch.from_numpy(tiles)[None]}
    elif images:
        given = {
            "mm_token_type_ids": (read == PLACEHOLDER).int(),
            "pixel_values": torch.from_numpy(np.concatenate([each.pixels for each in images])),
            "image_grid_thw": torch.from_numpy(np.stack([each.grid for each in images])),
        }
    logits = hf(input_ids=read, **given).logits[0, row.prompt_length - 1 :]
    found: torch.Tensor = logits.log_softmax(-1)
    return found.gather(1, tokens[row.prompt_length :, None])[:, 0]


@torch.no_grad()
def move_weights(policy: Policy, seed: int) -> None:
    """Other weights everywhere that is trained, in the tower, too."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in policy.named_tensors():
        if not parameter.requires_grad:
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local += 0.02 * torch.randn(local.shape, generator=generator)


async def sampled(
    engine: Engine, processor: ImageProcessor, name: str, count: int, seed: int = 0
) -> list[Trajectory]:
    """Rows of one to four pictures, 16 tokens sampled by `engine` each; the same pictures for the same `seed`."""
    draws = random.Random(seed)

    async def one(number: int, media: tuple[Media, ...]) -> Trajectory:
        prompt = row(processor, media, 1, number)
        prompt_ids = prompt.tokens[: prompt.prompt_length]
        asked = GenerateRequest(
            request_id=f"{name}-{number}",
            prompt_ids=prompt_ids,
            sampling=SamplingParams(max_tokens=16),
            media=media,
        )
        answer = await sample(engine, asked)
        tokens = np.concatenate([prompt_ids, answer.tokens]).astype(np.int32)
        zeros = np.zeros(len(prompt_ids), np.float32)
        return Trajectory(
            uid=Uid("r", str(number), 0),
            tokens=tokens,
            loss_mask=(np.arange(len(tokens)) >= len(prompt_ids)).astype(np.uint8),
            rollout_logprobs=np.concatenate([zeros, answer.logprobs]),
            spans=(),
            media=media,
        )

    given = [
        tuple(
            picture(draws.randrange(1 << 30), draws.choice(SIDES), draws.choice(SIDES))
            for _ in range(1 + number % 4)
        )
        for number in range(count)
    ]
    return list(await asyncio.gather(*(one(*each) for each in enumerate(given))))


@torch.no_grad()
def apart(policy: Policy, reader: VisionReader, rows: Sequence[Trajectory]) -> torch.Tensor:
    """float32[tokens]: how far the log-probs of rows are from the policy's, which computes them in packs."""
    ours, theirs = [], []
    for chosen in cut(alone([len(row.tokens) for row in rows]), PACK_TOKENS):
        part = [rows[index] for index in chosen]
        ours.append(policy(packed(reader, part), 1.0)[0])
        theirs += [torch.from_numpy(row.rollout_logprobs[row.prompt_length :]) for row in part]
    policy.reshard()  # type: ignore[operator]  # its forward left the root's weights gathered
    return (torch.cat(ours) - torch.cat(theirs)).abs()
