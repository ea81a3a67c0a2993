"""Pictures, and tiny random models that read them."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from meshrl.contract.types import Media

FOLDER = Path(__file__).parents[1] / "recipes/vision"

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PLACEHOLDER = 7


def picture(seed: int, width: int = 64, height: int = 64) -> Media:
    """Noise, as PNG."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return Media.of(file.getvalue())


def prepare() -> ModuleType:
    """`recipes/vision/prepare.py`."""
    spec = importlib.util.spec_from_file_location("vision_prepare", FOLDER / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))  # as `python prepare.py` has it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def make_model(folder: Path, kind: str = "qwen3_vl") -> None:
    """The recipe's tiny model in `folder`, or one of the same size and tokens of another `kind`."""
    module = prepare()
    tokenizer = module.make_tokenizer()
    model = module.make_model(tokenizer, folder)
    if kind == "qwen3_vl":
        return
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": module.PATCH}
    text = model.config.text_config.to_dict()
    text["rope_parameters"] = {
        **{"rope_type": "default", "rope_theta": 10_000.0},
        "mrope_section": [4, 6, 6],
    }
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128}
        vision |= {"fullatt_block_indexes": [1], "window_size": 64}
    ids = {
        name: getattr(model.config, name)
        for name in ("image_token_id", "video_token_id", "vision_start_token_id")
    }
    keep = {k: v for k, v in text.items() if k not in ("model_type", "head_dim")}
    config = AutoConfig.for_model(
        kind, text_config=keep, vision_config=vision, tie_word_embeddings=True, **ids
    )
    torch.manual_seed(0)
    factory: Any = AutoModelForImageTextToText
    other = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.06)
    other.save_pretrained(folder)
