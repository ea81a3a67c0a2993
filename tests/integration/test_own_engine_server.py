"""A kind of engine server from outside the tree: the one file that docs/reference/engines.md shows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.engines import build_engine
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.streams import sample
from meshrl.testing.contract.engine_suite import SLOTS, ask

from ..sglang_checkpoint import make_checkpoint, mislabelled, weights

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_engine.py"
NAME = "my_package.my_engine"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_package: None) -> None:
    """A package of somebody else's that has nothing but the example."""
    folder = tmp_path / "elsewhere" / "my_package"
    folder.mkdir(parents=True)
    shutil.copy(EXAMPLE, folder / "my_engine.py")
    monkeypatch.syspath_prepend(str(folder.parent))


def config(tmp_path: Path, **options: object) -> RolloutConfig:
    command = [sys.executable, "-m", "meshrl.testing.sglang_server"]
    engine = {"command": command, "log": str(tmp_path / "log"), "eos_token_ids": [], **options}
    return RolloutConfig.model_validate({"name": NAME, "slots": SLOTS, "engine": engine})


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ServerEngine]:
    model = make_checkpoint(tmp_path / "model", max_length=500)
    built = build_engine(config(tmp_path), model=model, tokenizer=None)
    assert isinstance(built, ServerEngine)
    await built.start()
    yield built
    await built.close()


async def test_its_tokens_have_the_versions_that_sampled_them(engine: ServerEngine) -> None:
    for version in (Version(1, 1), Version(1, 2)):
        await engine.stage_weights(*weights(version))
        await engine.commit_weights(version, OnUpdate.IN_FLIGHT)
        response = await sample(engine, ask(str(version), max_tokens=40))
        assert len(response.tokens) == 40
        assert [span.version for span in response.spans] == [version]
        assert mislabelled(response) == 0


def test_its_options_are_those_of_its_own_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.pause_mod: .*'pause_mode'"):
        build_engine(config(tmp_path, pause_mod="abort"), model=tmp_path, tokenizer=None)
