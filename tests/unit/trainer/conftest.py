"""A world of one rank and a tiny checkpoint on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshrl.trainer.distributed import World
from meshrl.trainer.model import random_hf

from . import tiny


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    torch.set_num_threads(1)
    world = World.start("cpu")
    yield world
    world.close()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    random_hf(tiny.config(), seed=0).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path
