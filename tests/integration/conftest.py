"""What several integration tests ask for: a model that talks, and each carrier of weights in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..talking import write_talking_model


@pytest.fixture(scope="session")
def talking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny model with a chat template."""
    path = tmp_path_factory.mktemp("talking")
    write_talking_model(path)
    return path


@pytest.fixture(params=["gloo", "disk", "shm", "cuda_ipc", "auto", "nccl", "delta", "object"])
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)
