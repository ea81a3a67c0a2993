"""Dependencies of submitted functions: from a folder of wheels, once per list, complete or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Outcome, Sample, Uid
from meshrl.rewardd.config import START_DEADLINE_S, RewardConfig
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.pool.rule import FunctionSpec, RewardRule
from meshrl.rewardd.registry.building import submitted_sandbox
from meshrl.sandbox.environment import InstalledPackages, environment_of, missing
from meshrl.sandbox.limits import Limits, ScoringLimits
from meshrl.sandbox.sandbox import Isolation, no_bubblewrap

SOURCE = """
import counting_apples
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return counting_apples.APPLES
"""
BUILDER = """
import sys
from pathlib import Path
from meshrl.sandbox.environment import InstalledPackages
folder = Path(sys.argv[1])
InstalledPackages(requirements=("counting-apples",), wheelhouse=folder / "wheels", cache=folder / "cache").build()
"""


def wheel(folder: Path, name: str, source: str, requires: str = "") -> None:
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}.py", source)
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "counting-apples", "from apple_trees import APPLES\n", requires="apple-trees")
    wheel(folder, "apple-trees", "APPLES = 7\n")
    return folder


@pytest.mark.parametrize("level", list(Isolation))
async def test_a_function_imports_what_it_depends_on(
    level: Isolation, wheelhouse: Path, tmp_path: Path
) -> None:
    if level is Isolation.STRICT and (why := no_bubblewrap()):
        pytest.skip(why)
    if level is Isolation.WEAK and os.geteuid() == 0:
        pytest.skip("nobody cannot read the folders of pytest")
    environment = environment_of(["counting-apples==1.0", "numpy"], wheelhouse, tmp_path / "cache")
    assert environment is not None
    assert environment.requirements == ("counting-apples==1.0",)
    config = RewardConfig(sandbox=level)
    spec = FunctionSpec(
        component="f", weight=1, kwargs={}, name="compute_score", digest="d", path="/reward/r.py", source=SOURCE
    )  # fmt: skip
    sandbox = submitted_sandbox(tmp_path, config, environment=environment)
    judge = PoolJudge(RewardRule(functions=(spec,)), config, sandbox=sandbox)
    sample = Sample(
        uid=Uid("r", "t", 0), data_source="", solution="", ground_truth=0, extra_info={}
    )
    try:
        (score,) = await judge.score([sample])
    finally:
        await judge.close()
    assert (score.outcome, score.score, score.reason) == (Outcome.OK, 7.0, "")


async def test_building_at_once_is_building_once(wheelhouse: Path, tmp_path: Path) -> None:
    environment = InstalledPackages(
        requirements=("counting-apples",), wheelhouse=wheelhouse, cache=tmp_path / "cache"
    )
    await asyncio.gather(*(asyncio.to_thread(environment.build) for _ in range(2)))
    assert {path.name for path in environment.cache.iterdir()} == {"lock", environment.hash}


def test_a_killed_builder_leaves_no_environment(wheelhouse: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    builder = subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path)])
    while not list(cache.glob(".draft-*")):
        assert builder.poll() is None
        time.sleep(0.001)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    environment = InstalledPackages(
        requirements=("counting-apples",), wheelhouse=wheelhouse, cache=cache
    )
    assert not environment.path.exists()
    environment.build()
    assert (environment.path / "apple_trees.py").is_file()
    assert not list(cache.glob(".draft-*"))


def test_a_dependency_without_a_wheel_is_named_and_leaves_nothing(
    wheelhouse: Path, tmp_path: Path
) -> None:
    environment = environment_of(["pears==2.0"], wheelhouse, tmp_path / "cache")
    assert environment is not None
    with pytest.raises(
        ConfigError, match=r"pears==2\.0 cannot be installed from .*wheels: ERROR: No "
    ):
        environment.build()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_an_installed_package_needs_no_wheel(tmp_path: Path) -> None:
    assert missing(["numpy", "pydantic"]) == ()
    assert environment_of(["numpy"], None, tmp_path) is None
    with pytest.raises(
        ConfigError, match=r"'pears' is not installed .* reward\.wheelhouse is not set"
    ):
        environment_of(["pears"], None, tmp_path)
    with pytest.raises(ConfigError, match="want a package's name"):
        missing(["https://example.org/pears.whl"])


def test_functions_of_a_recipe_have_the_limits_of_submitted_ones_in_a_sandbox() -> None:
    free, shut = RewardConfig(), RewardConfig(recipe_sandbox=Isolation.STRICT, deadline_s=3)
    assert (free.recipe_limits.memory_bytes, free.recipe_limits.processes) == (None, None)
    assert shut.recipe_limits == shut.submitted_limits.model_copy(
        update={"deadline_s": 3.0, "start_deadline_s": START_DEADLINE_S}
    )
    bounded = RewardConfig(limits=ScoringLimits(memory_bytes=1 << 29))
    assert (bounded.recipe_limits.memory_bytes, bounded.recipe_limits.processes) == (1 << 29, None)


def test_a_submission_may_ask_for_lower_limits_but_not_for_higher() -> None:
    bounds = Limits(deadline_s=5, cpu_s=None)
    assert bounds.bounded({"deadline_s": 1, "cpu_s": 3}).deadline_s == 1
    with pytest.raises(
        ConfigError, match=r"deadline_s = 6.0 exceeds what the operator allows \(5.0\)"
    ):
        bounds.bounded({"deadline_s": 6})
    with pytest.raises(ConfigError, match="memory_bytes = None exceeds"):
        bounds.bounded({"memory_bytes": None})
    with pytest.raises(ConfigError, match=r"no limit 'deadlines'; did you mean 'deadline_s'\?"):
        bounds.bounded({"deadlines": 1})
    with pytest.raises(ConfigError, match="limit deadline_s: "):
        bounds.bounded({"deadline_s": "soon"})
