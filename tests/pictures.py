"""Pictures, and tiny random models that read them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from meshrl.testing.vision import KINDS, PLACEHOLDER, picture, random_checkpoint

__all__ = ["KINDS", "PLACEHOLDER", "make_model", "picture", "prepare"]
FOLDER = Path(__file__).parents[1] / "recipes/vision"


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


def make_model(folder: Path, kind: str = "Qwen3VL") -> None:
    """A tiny random model in `folder`."""
    random_checkpoint(kind, folder)
