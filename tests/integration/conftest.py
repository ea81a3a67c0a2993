"""Fixtures of several integration tests: a model that talks, each carrier of weights, queue processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..chat_model import write_chat_model


@pytest.fixture(scope="session")
def talking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny model with a chat template."""
    path = tmp_path_factory.mktemp("talking")
    write_chat_model(path)
    return path


@pytest.fixture(params=["gloo", "disk", "shm", "cuda_ipc", "auto", "nccl", "delta", "disk:memory"])
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)
