"""Pictures, and tiny random models that read them."""

from __future__ import annotations

import json
from pathlib import Path

from meshrl.testing.vision import KINDS, PLACEHOLDER, random_checkpoint
from meshrl.testing.vision import tokenizer as make_tokenizer
from tests.doubles.vision_rows import picture

__all__ = ["KINDS", "PLACEHOLDER", "make_model", "make_tokenizer", "picture", "write_processor"]


def make_model(folder: Path, kind: str = "Qwen3VL") -> None:
    """A tiny random model in `folder`."""
    random_checkpoint(kind, folder)


def write_processor(folder: Path, placeholder: int = PLACEHOLDER) -> None:
    """The files of a checkpoint that say how its model reads pictures."""
    config = {"image_token_id": placeholder, "vision_config": {"spatial_merge_size": 2}}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **config}))
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps({**kind, "size": sizes}))
