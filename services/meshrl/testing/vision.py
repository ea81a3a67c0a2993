"""Tiny random vision-language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

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
    "Qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **TEXT,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        "vision_config": {
            **TOWER,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": HIDDEN,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
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
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
MIXTURES = {"Qwen3VLMoe": ("Qwen3VL", "qwen3_vl_moe"), "Qwen3_5Moe": ("Qwen3_5", "qwen3_5_moe")}
"""Mixtures of experts, the dense models that they are otherwise, and their types."""
for name, (dense, kind) in MIXTURES.items():
    parts = KINDS[dense]
    KINDS[name] = {**parts, "model_type": kind, "text_config": {**parts["text_config"], **EXPERTS}}
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
    "Qwen3_5": "Qwen3VLProcessor",
    **dict.fromkeys(MIXTURES, "Qwen3VLProcessor"),
    "SmolVLM": "SmolVLMProcessor",
}
"""Processors that vLLM loads and does not ask for pixels."""
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
