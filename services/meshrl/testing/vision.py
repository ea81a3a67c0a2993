"""Tiny random models that read pictures, and rows with pictures."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

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
from meshrl.trainer.model.packing import Pack, alone, cut, pack
from meshrl.trainer.model.policy import Policy
from meshrl.trainer.model.vision import VisionReader

SPECIAL = (
    "<pad>",
    "<eos>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
WORDS = (
    "user",
    "assistant",
    "which",
    "colour",
    "?",
    "red",
    "green",
    "blue",
    "white",
    "black",
    "yellow",
)
AROUND_TILES = (
    "<fake_token_around_image>",
    "<global-img>",
    "\n",
    "\n\n",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
VOCABULARY = (*SPECIAL, *WORDS, *AROUND_TILES)
PLACEHOLDER = VOCABULARY.index("<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PATCH, HIDDEN = 16, 128
TOKENS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": VOCABULARY.index("<|video_pad|>"),
    "vision_start_token_id": VOCABULARY.index("<|vision_start|>"),
    "vision_end_token_id": VOCABULARY.index("<|vision_end|>"),
}
TEXT = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": VOCABULARY.index("<|im_end|>"),
    "tie_word_embeddings": True,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
TOWER = {"depth": 2, "num_heads": 2, "patch_size": PATCH}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen2VL": {
        "model_type": "qwen2_vl",
        "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}},
        "vision_config": {
            **TOWER,
            "patch_size": 14,
            "embed_dim": 64,
            "hidden_size": HIDDEN,
            "mlp_ratio": 2,
        },
    },
    "Qwen2_5_VL": {
        "model_type": "qwen2_5_vl",
        "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}},
        "vision_config": {
            **TOWER,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "patch_size": 14,
        },
    },
    "Qwen3VL": {
        "model_type": "qwen3_vl",
        "text_config": {
            **TEXT,
            "head_dim": 32,
            "rope_parameters": {**ROPE, "mrope_section": [8, 4, 4], "mrope_interleaved": True},
        },
        "vision_config": {
            **TOWER,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": HIDDEN,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    "SmolVLM": {
        "model_type": "smolvlm",
        "text_config": {**TEXT, "model_type": "llama", "rope_parameters": ROPE},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": PATCH,
        },
        "scale_factor": 2,
    },
}
PATCHES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2},
}
PROCESSORS = {
    "Qwen2VL": "Qwen2VLProcessor",
    "Qwen2_5_VL": "Qwen2_5_VLProcessor",
    "Qwen3VL": "Qwen3VLProcessor",
    "SmolVLM": "SmolVLMProcessor",
}
"""What vLLM loads, which is not asked for pixels."""
TILES = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_image_splitting": True,
    "size": {"longest_edge": 128},
    "max_image_size": {"longest_edge": 64},
}
"""A picture becomes tiles of 64 x 64 pixels, four tokens each, up to 128 pixels a side."""


def random_checkpoint(name: str, directory: Path) -> None:
    """Random weights in float32, the tokenizer, and what makes pixels of pictures."""
    described: dict[str, Any] = {**KINDS[name], **TOKENS, "tie_word_embeddings": True}
    config: Any = AutoConfig.for_model(**described)
    torch.manual_seed(0)
    factory: Any = AutoModelForImageTextToText
    model = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.06)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    patch_size = config.vision_config.patch_size
    images = TILES if name == "SmolVLM" else {**PATCHES, "patch_size": patch_size}
    images = {**images, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images["processor_class"] = PROCESSORS[name]
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {**images, "video_processor_type": "Qwen3VLVideoProcessor"}
    del videos["image_processor_type"]
    (directory / "video_preprocessor_config.json").write_text(json.dumps(videos))


def tokenizer() -> PreTrainedTokenizerFast:
    """A word a token."""
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    factory: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = factory(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=[*SPECIAL[3:], *AROUND_TILES],
    )
    made.chat_template = TEMPLATE
    return made


def picture(seed: int, width: int = 64, height: int = 64) -> Media:
    """Noise, as PNG."""
    from PIL import Image

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


PACK_TOKENS = 1024
SIDES = (32, 64, 96, 128)


@torch.no_grad()
def move_weights(policy: Policy, seed: int) -> None:
    """Other weights everywhere, in the tower, too."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in policy.named_tensors():
        local: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
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
