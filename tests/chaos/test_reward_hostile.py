"""Hostile functions, each in a sandbox of its own, while an honest one scores beside them."""

from __future__ import annotations

import asyncio
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Outcome, Sample, Score, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.pool.rule import FunctionSpec, Rule
from meshrl.rewardd.registry.building import submitted_sandbox
from meshrl.rewardd.sandbox import landlock, seccomp
from meshrl.rewardd.sandbox.sandbox import Isolation, no_bubblewrap

from .hostile import ATTACKS, SECRET, Attack, table

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "reward-sandbox.md"
LIMITS = {"deadline_s": 1, "start_deadline_s": 20, "output_bytes": 1_000_000, "tmp_bytes": 4 << 20}
AT_ONCE = 4
ASKED = ("good", "bad", "good")
HONEST = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str)
"""


@dataclass
class Ended:
    """The end of an attack."""

    scores: list[Score]
    refused: str = ""
    left_over: int = 0
    """Processes of the sandboxes that still run."""


@dataclass
class Campaign:
    ended: dict[str, Ended]
    honest: list[Score]
    rounds: int


def judge_of(source: str, directory: Path, level: Isolation, **limits: object) -> PoolJudge:
    spec = FunctionSpec(
        component="compute_score", weight=1, kwargs={}, name="compute_score", digest="d" * 32,
        path=str(directory / "source.py"), source=source,
    )  # fmt: skip
    config = RewardConfig.model_validate(
        {"sandbox": level, "workers": 1, "limits": LIMITS | limits}
    )
    return PoolJudge(Rule(functions=(spec,)), config, sandbox=submitted_sandbox(directory, config))


def sample(solution: str, index: int) -> Sample:
    return Sample(
        uid=Uid("r", "t", index),
        data_source="",
        solution=solution,
        ground_truth=None,
        extra_info={},
    )


def sandbox_processes(marker: str) -> int:
    """Processes anywhere on this machine whose command line names a sandbox of this test."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += marker.encode() in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return found


async def attacked(attack: Attack, directory: Path, level: Isolation, marked: Path) -> Ended:
    source = attack.source.replace("{marked}", str(marked))
    short = {"start_deadline_s": 2} if attack.name == "endless import" else {}
    judge = judge_of(source, directory, level, **short)
    try:
        scores = list(await judge.score([sample(text, n) for n, text in enumerate(ASKED)]))
        return Ended(scores)
    except ConfigError as error:
        return Ended([], refused=str(error))
    finally:
        await judge.close()


async def campaign(level: Isolation, attacks: list[Attack], folder: Path) -> Campaign:
    """Every attack, a few at once, while an honest function scores."""
    marked = folder / "another_sample.json"
    marked.write_text("the truth")
    honest_folder = folder / "honest"
    honest_folder.mkdir()
    honest = judge_of(HONEST, honest_folder, level, deadline_s=60)
    await honest.start()
    slots, ended, over = asyncio.Semaphore(AT_ONCE), dict[str, Ended](), asyncio.Event()

    async def one(number: int, attack: Attack) -> None:
        directory = folder / f"version-{number}"
        directory.mkdir()
        async with slots:
            ended[attack.name] = await attacked(attack, directory, level, marked)
            ended[attack.name].left_over = sandbox_processes(str(directory))

    async def score_honestly() -> tuple[list[Score], int]:
        scores, rounds = [], 0
        while not over.is_set():
            scores += await honest.score([sample(str(n), n) for n in range(8)])
            rounds += 1
            await asyncio.sleep(0.01)  # leaves the processors to the attacks
        return scores, rounds

    scoring = asyncio.create_task(score_honestly())
    try:
        async with asyncio.TaskGroup() as group:
            for number, attack in enumerate(attacks):
                group.create_task(one(number, attack))
    finally:
        over.set()
        scores, rounds = await scoring
        await honest.close()
    return Campaign(ended, scores, rounds)


def run_campaign(level: Isolation, attacks: list[Attack], folder: Path) -> Campaign:
    os.environ[SECRET] = SECRET
    try:
        return asyncio.run(campaign(level, attacks, folder))
    finally:
        del os.environ[SECRET]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    if (why := no_bubblewrap()) is not None:
        pytest.skip(f"no strict sandbox here: {why}")
    return run_campaign(Isolation.STRICT, ATTACKS, tmp_path_factory.mktemp("strict"))


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    if not (seccomp.available() and landlock.version()):
        pytest.skip("this kernel has no system call filters or no Landlock")
    attacks = [attack for attack in ATTACKS if attack.weak]
    return run_campaign(Isolation.WEAK, attacks, tmp_path_factory.mktemp("weak"))


def check(attack: Attack, ended: Ended) -> None:
    if not attack.body:
        assert attack.reason in ended.refused
        return
    assert ended.refused == ""
    before, bad, after = ended.scores
    assert (bad.outcome, bad.reason) == (attack.outcome, bad.reason), bad.reason
    assert attack.expected in bad.reason
    assert bad.score == attack.score
    assert [(s.outcome, s.score) for s in (before, after)] == [(Outcome.OK, 1.0)] * 2
    assert ended.left_over == 0


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_ends_as_the_table_says(strict: Campaign, attack: Attack) -> None:
    check(attack, strict.ended[attack.name])


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if attack.weak], ids=lambda attack: attack.name
)
def test_an_attack_ends_the_same_way_without_bubblewrap(weak: Campaign, attack: Attack) -> None:
    check(attack, weak.ended[attack.name])


@pytest.mark.parametrize("level", ["strict", "weak"])
def test_no_score_of_others_is_missing_or_wrong(level: str, request: pytest.FixtureRequest) -> None:
    run: Campaign = request.getfixturevalue(level)
    assert run.rounds > len(run.ended)
    assert {s.outcome for s in run.honest} == {Outcome.OK}
    assert [s.score for s in run.honest] == [float(n) for n in range(8)] * run.rounds


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
    config = RewardConfig.model_validate({"limits": LIMITS | {"memory_bytes": 256 << 20}})
    judge = PoolJudge(Rule(functions=(spec,)), config, sandbox=submitted_sandbox(tmp_path, config))

    async def start() -> None:
        try:
            await judge.start()
        finally:
            await judge.close()

    with pytest.raises(ConfigError, match="MemoryError"):
        asyncio.run(start())


def test_the_page_shows_this_table() -> None:
    assert table() in TABLE.read_text()
