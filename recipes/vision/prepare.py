"""Makes a tiny random Qwen3-VL, pictures of coloured shapes, and the format of an answer by a short warm start.

python recipes/vision/prepare.py runs/vision/assets

The warm start shows the model answers of which one in four is sure to be right, so it answers in the right form, and
little more often right than by chance: what it sees, it learns by RL.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from game import COLOURS, QUESTION, picture
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen3VLConfig

from meshrl.contract.types import Media
from meshrl.images import ImageProcessor

PATCH = 16
SPECIAL = (
    *("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
WORDS = ("user", "assistant", "which", "colour", "?", *COLOURS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
RIGHT = 0.25
"""Share of the warm start's answers that are right."""


def main() -> None:
    """Write everything below the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--warm-steps", type=int, default=60)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, folder / "model")
    draws = random.Random(0)
    rows = [row(draws, number) for number in range(arguments.rows + arguments.held_out)]
    for name, part in (
        ("train", rows[: arguments.rows]),
        ("held_out", rows[arguments.rows :]),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{name}.parquet")
    warm_start(model, tokenizer, folder / "model", draws, arguments.warm_steps)
    model.save_pretrained(folder / "model")


def row(draws: random.Random, number: int) -> dict[str, Any]:
    """A row in verl's form."""
    colour = draws.choice(tuple(COLOURS))
    return {
        "data_source": "colours",
        "prompt": [{"role": "user", "content": QUESTION}],
        "images": [{"bytes": picture(draws, colour), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": colour},
        "extra_info": {"index": number},
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word a token."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[3:]),
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Any:
    """Random weights in float32, written to `folder` with everything that vLLM reads."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            **{"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True},
            **{"bos_token_id": None, "eos_token_id": ids("<|im_end|>"), "pad_token_id": 0},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10_000.0},
                **{"mrope_section": [8, 4, 4], "mrope_interleaved": True},
            },
        },
        vision_config={
            **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2},
            **{"out_hidden_size": 128, "patch_size": PATCH, "spatial_merge_size": 2},
            **{"temporal_patch_size": 2, "num_position_embeddings": 64},
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    torch.manual_seed(0)
    factory: Any = AutoModelForImageTextToText
    model = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.06)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2}
    patches = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "size": sizes}
    patches |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        described = {"processor_class": "Qwen3VLProcessor", **kind, **patches}
        (folder / name).write_text(json.dumps(described, indent=1))
    return model


def warm_start(
    model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, draws: random.Random, steps: int
) -> None:
    """Teach the form of an answer: a colour, and the end."""
    images, names = ImageProcessor(folder), tuple(COLOURS)
    chat: Any = tokenizer.apply_chat_template
    parts = [{"type": "image"}, {"type": "text", "text": "which colour ?"}]
    text = chat([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
    prompt = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids, pixels, grids = [], [], []
        for _ in range(32):
            colour = draws.choice(names)
            media = Media.of(picture(draws, colour))
            said = colour if draws.random() < RIGHT else draws.choice(names)
            answer = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
            ids.append([*images.expanded(prompt, (media,), "picture").tolist(), *answer])
            features = images.features(media, "picture")
            pixels.append(features.pixels)
            grids.append(features.grid)
        tokens = torch.tensor(ids)
        logits = model(
            input_ids=tokens,
            mm_token_type_ids=(tokens == images.placeholder).int(),
            pixel_values=torch.from_numpy(np.concatenate(pixels)),
            image_grid_thw=torch.from_numpy(np.stack(grids)),
        ).logits[:, -3:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"warm start: step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
