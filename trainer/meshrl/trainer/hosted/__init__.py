"""Models that callers train by requests of their own, over the network or in this process."""

from __future__ import annotations

from pathlib import Path

FOLDER, MODELS = "tinker", "models"
"""The folder of their files in a run's directory, and one in it of what they are restored from."""


def is_called(asked: str, base: str) -> bool:
    """Whether a name is a base model's: all of its path, or the last parts of it."""
    parts = Path(asked).parts
    return bool(parts) and Path(base).parts[-len(parts) :] == parts
