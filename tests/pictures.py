"""Pictures, and tiny random models that read them."""

from __future__ import annotations

from pathlib import Path

from meshrl.testing.vision import KINDS, PLACEHOLDER, picture, random_checkpoint
from meshrl.testing.vision import tokenizer as make_tokenizer

__all__ = ["KINDS", "PLACEHOLDER", "make_model", "make_tokenizer", "picture"]


def make_model(folder: Path, kind: str = "Qwen3VL") -> None:
    """A tiny random model in `folder`."""
    random_checkpoint(kind, folder)
