"""Hostile functions, each in a sandbox of its own, while an honest one scores beside them."""

from __future__ import annotations

import asyncio
import os
import zipfile
from pathlib import Path

import pytest

from meshrl.contract.errors import ConfigError
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.pool.rule import FunctionSpec, RewardRule
from meshrl.rewardd.registry.building import submitted_sandbox
from meshrl.sandbox.sandbox import Isolation, no_bubblewrap
from tests.adversarial.attacks import ATTACKS, Attack, table
from tests.adversarial.campaign import (
    LIMITS,
    Campaign,
    faults,
    honest_faults,
    run_campaign,
    why_not,
)

TABLE = Path(__file__).parents[2] / "docs" / "measurements" / "hostile-functions.md"


def campaign_of(level: Isolation, factory: pytest.TempPathFactory) -> Campaign:
    folder = factory.mktemp(level)
    if os.geteuid() == 0:
        for above in (folder, *folder.parents):  # pytest closes its folders to the user nobody
            if above.stat().st_mode & 0o005 != 0o005 and above.name.startswith("pytest"):
                above.chmod(0o755)
    if (why := why_not(level, folder)) is not None:
        pytest.skip(f"no sandbox {level} here: {why}")
    attacks = [a for a in ATTACKS if a.weak or level is Isolation.STRICT]
    return run_campaign(level, attacks, folder)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return campaign_of(Isolation.STRICT, tmp_path_factory)


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return campaign_of(Isolation.WEAK, tmp_path_factory)


def check(run: Campaign, attack: Attack) -> None:
    if attack.name in run.skipped:
        pytest.skip(run.skipped[attack.name])
    assert faults(attack, run.ended[attack.name]) == []


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_ends_as_the_table_says(strict: Campaign, attack: Attack) -> None:
    check(strict, attack)


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if attack.weak], ids=lambda attack: attack.name
)
def test_an_attack_ends_the_same_way_without_bubblewrap(weak: Campaign, attack: Attack) -> None:
    check(weak, attack)


@pytest.mark.parametrize("level", ["strict", "weak"])
def test_no_score_of_others_is_missing_or_wrong(level: str, request: pytest.FixtureRequest) -> None:
    assert honest_faults(request.getfixturevalue(level)) == []


def test_a_wheel_that_unpacks_to_more_than_its_memory_is_refused(tmp_path: Path) -> None:
    if (why := no_bubblewrap()) is not None:
        pytest.skip(f"no strict sandbox here: {why}")
    tmp_path.chmod(0o755)
    wheel = tmp_path / "bomb-1-py3-none-any.whl"
    with (
        zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("bomb.py", "w") as module,
    ):
        for _ in range(160):
            module.write(b"#" * (1 << 20))
    assert wheel.stat().st_size < 2 << 20
    spec = FunctionSpec(
        component="bomb", weight=1, kwargs={}, name="compute_score", digest="d" * 32,
        module="bomb", path=str(wheel),
    )  # fmt: skip
    config = RewardConfig()
    sandbox = submitted_sandbox(tmp_path, config, limits=LIMITS | {"memory_bytes": 256 << 20})
    judge = PoolJudge(RewardRule(functions=(spec,)), config, sandbox=sandbox)

    async def start() -> None:
        try:
            await judge.start()
        finally:
            await judge.close()

    with pytest.raises(ConfigError, match="MemoryError"):
        asyncio.run(start())


def test_the_page_shows_this_table() -> None:
    assert table() in TABLE.read_text()
