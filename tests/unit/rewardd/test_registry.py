"""Submissions: what is accepted, what is refused and how, where names point, and what a kill leaves."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from meshrl.contract.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    NotFoundError,
    UserError,
)
from meshrl.contract.types import Outcome, Sample, Uid
from meshrl.rewardd.config import RegistryConfig, RewardConfig
from meshrl.rewardd.pool.signatures import FunctionKind
from meshrl.rewardd.registry import types
from meshrl.rewardd.registry.active_reward import JudgeCache
from meshrl.rewardd.registry.building import open_registry
from meshrl.rewardd.registry.checks import checked
from meshrl.rewardd.registry.registry import MOST_NAMES, Registry
from meshrl.rewardd.registry.store import SubmissionStore
from meshrl.rewardd.registry.types import Action, Case, Submission
from meshrl.sandbox.limits import Limits
from meshrl.sandbox.sandbox import no_bubblewrap

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
Open = Callable[..., Awaitable[Registry]]
SANDBOX = "weak" if no_bubblewrap() else "strict"
"""The strictest level that this machine gives."""


def constant(score: float, **fields: Any) -> Submission:
    return Submission(**{"name": "reward", "source": HEAD + f"    return {score}\n", **fields})


def sample(solution: str = "x", index: int = 0) -> Sample:
    uid = Uid("run", "task", index)
    return Sample(uid=uid, data_source="", solution=solution, ground_truth="x", extra_info={})


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    base = tmp_path / "base.py"
    base.write_text(HEAD + "    return -1\n")
    closers: list[Callable[[], Awaitable[None]]] = []

    async def make(*, restart: bool = False, **registry: Any) -> Registry:
        while restart and closers:
            await closers.pop()()
        fields = {
            "custom_reward_function": {"path": base},
            "deadline_s": 5,
            "registry": registry,
            "sandbox": SANDBOX,
        }
        held = open_registry(RewardConfig.model_validate(fields), tmp_path / "rewards")
        opened = await held.__aenter__()
        closers.append(lambda: held.__aexit__(None, None, None))
        return opened

    yield make
    for close in closers:
        await close()


async def scored(registry: Registry, *samples: Sample) -> list[tuple[float, str]]:
    scores = await registry.judge.score(list(samples or [sample()]))
    assert [s.reason for s in scores if s.outcome is not Outcome.OK] == []
    return [(s.score, s.reward_hash) for s in scores]


async def test_a_submission_scores_the_run_until_a_roll_back(opened: Open) -> None:
    registry = await opened()
    assert await scored(registry) == [(-1.0, registry.base)]
    one = (await registry.submit("ann", constant(1))).manifest.hash
    two = (await registry.submit("bob", constant(2))).manifest.hash
    assert await scored(registry) == [(2.0, two)]
    name = await registry.roll_back("ann", "reward", "")
    assert await scored(registry) == [(1.0, one)]
    assert [(e.action, e.hash, e.by) for e in name.history] == [
        (Action.SUBMIT, one, "ann"),
        (Action.POINT, one, "ann"),
        (Action.SUBMIT, two, "bob"),
        (Action.POINT, two, "bob"),
        (Action.POINT, one, "ann"),
    ]
    with pytest.raises(ConflictError, match="no version before"):
        await registry.roll_back("ann", "reward", "")
    await registry.roll_back("ann", "reward", two[:6])
    assert await scored(registry) == [(2.0, two)]
    assert registry.diff("reward", one, "").splitlines()[-2:] == ["-    return 1", "+    return 2"]
    with pytest.raises(NotFoundError, match=r"'rewart'; did you mean 'reward'\?"):
        registry.resolve("rewart")
    with pytest.raises(NotFoundError, match=f"no version that start with 'zz'; it has .*{two}"):
        registry.resolve("reward", "zz")
    with pytest.raises(NotFoundError, match="no version"):
        registry.resolve("reward", "../../etc")


async def test_a_roll_back_to_the_recipe_lets_its_own_functions_score_again(opened: Open) -> None:
    registry = await opened()
    one = (await registry.submit("ann", constant(1))).manifest.hash
    for _ in range(2):
        assert (await registry.roll_back("bob", "reward", "recipe")).current == ""
        assert await scored(registry) == [(-1.0, registry.base)]
    again = await opened(restart=True)
    assert await scored(again) == [(-1.0, again.base)]
    await again.roll_back("bob", "reward", one)
    assert await scored(again) == [(1.0, one)]
    with pytest.raises(ConflictError, match="'recipe' names the recipe's own functions"):
        await again.roll_back("bob", "reward", "")


async def test_the_start_says_which_reward_scores_the_run_since_when_and_by_whom(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    registry = await opened()
    assert f"the recipe's own functions score the run: version {registry.base}" in caplog.text
    one = (await registry.submit("ann", constant(1))).manifest.hash
    caplog.clear()
    await opened(restart=True)
    (warning,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert re.fullmatch(
        f"the run is scored by version {one} of the reward 'reward', submitted 20..-..-.. ..:..:.. by ann, not by the"
        r" recipe's functions \(`meshrl reward rollback reward recipe` goes back to them\)",
        warning,
    )


async def test_the_same_content_is_one_version_and_another_name_does_not_touch_the_run(
    opened: Open,
) -> None:
    registry = await opened()
    found = await asyncio.gather(*(registry.submit(str(n), constant(1)) for n in range(5)))
    again = await registry.submit("bob", constant(1))
    assert not again.created
    assert {each.manifest.hash for each in found} == {again.manifest.hash}
    assert len(registry.name("reward").history) == 2
    await registry.submit("ann", constant(7, name="other"))
    assert await scored(registry) == [(1.0, again.manifest.hash)]
    assert [s.score for s in await registry.score("other", "", [sample()])] == [7.0]


async def test_everything_is_there_after_a_restart(opened: Open, tmp_path: Path) -> None:
    registry = await opened()
    one = (await registry.submit("ann", constant(1))).manifest.hash
    await registry.submit("ann", constant(2))
    await registry.roll_back("ann", "reward", one)
    before = registry.names()
    with pytest.raises(UserError, match="in use by another reward service"):
        await opened()
    again = await opened(restart=True)
    assert again.names() == before
    assert await scored(again) == [(1.0, one)]


async def test_a_name_that_was_once_compared_in_passing_is_read_without_that(
    opened: Open, tmp_path: Path
) -> None:
    registry = await opened()
    one = (await registry.submit("ann", constant(1))).manifest.hash
    before = registry.names()
    (path,) = (tmp_path / "rewards").rglob("reward.json")
    stored = json.loads(path.read_text())
    watched = {"action": "watch", "hash": one, "by": "ann", "at": 1.0, "note": "", "share": 0.1}
    stored["history"] = [{**each, "share": 0.0} for each in stored["history"]] + [watched]
    path.write_text(json.dumps(stored))
    again = await opened(restart=True)
    assert again.names() == before
    assert await scored(again) == [(1.0, one)]


class SmallRegistryConfig(RegistryConfig):
    """Takes little."""

    max_source_bytes: ClassVar[int] = 1000
    max_unpacked_bytes: ClassVar[int] = 2000


LIMITS = SmallRegistryConfig(allowed_dependencies=["requests"])


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"source": "x = 1\ndef compute_score(:\n"}, r"^the source, line 2: "),
        ({"source": "def other(): pass\n"}, "defines no 'compute_score'"),
        ({"source": "def compute_scor(x): pass\n"}, "did you mean 'compute_scor'"),
        (
            {"source": "def compute_score(a): pass\n"},
            "line 1: compute_score takes no 'data_source'",
        ),
        ({"source": "x" * 2000}, "2000 bytes; at most 1000"),
        ({"source": "(" * 900}, "line 1"),
        ({"source": "\udcff"}, "UTF-8"),
        ({"source": "a\0b"}, "null bytes"),
        ({"source": ""}, "either a Python source or a wheel"),
        ({"name": "No Such!"}, "cannot name a reward"),
        ({"name": "../evil"}, "cannot name a reward"),
        ({"deps": ("reqests",)}, "'reqests' is not allowed here; did you mean 'requests'"),
        ({"deps": ("a; import os",)}, "want a package's name"),
        ({"entry_point": "a.b"}, "want the name of a function"),
        ({"cases": (Case(solution="s", score=float("nan")),)}, "want a finite number"),
        ({"cases": (Case(solution="s", score=0),) * 300}, "300 tests; at most 256"),
        ({"wheel": b"x", "source": "", "entry_point": "a:b"}, "not a zip archive"),
        ({"wheel": b"x", "source": ""}, "want package.module:function"),
        (
            {"limits": {"deadline_s": 11.0}},
            r"deadline_s = 11.0 exceeds .* operator allows \(10.0\)",
        ),
        ({"limits": {"deadlines": 1.0}}, r"^no limit 'deadlines'; did you mean 'deadline_s'\? "),
        ({"limits": {"processes": 0.5}}, "^limit processes: Input should be a valid integer"),
    ],
)
def test_what_the_checks_find_without_running_is_refused_in_one_line(
    fields: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line) as refused:
        checked(constant(1, **fields), LIMITS, Limits())
    assert "\n" not in str(refused.value)


REFUSED = [
    (
        constant(1, source="import nowhere_at_all\n" + HEAD + "    return 1\n"),
        "ModuleNotFoundError",
    ),
    (constant(1, source="raise SystemExit\n" + HEAD + "    return 1\n"), "failed while loading"),
    (constant(1, source="import os\nos._exit(3)\n" + HEAD + "    return 1\n"), "exit code 3"),
    (
        constant(1, cases=(Case(solution="s", score=2.0),)),
        "test 0 failed: the score is 1, expected 2",
    ),
    (
        constant(1, source=HEAD + "    return '1'\n", cases=(Case(solution="s", score=1),)),
        "test 0 got no score: .*not a number",
    ),
]


async def test_what_fails_when_run_is_refused_in_one_line_and_nothing_stays(
    opened: Open, tmp_path: Path
) -> None:
    registry = await opened()
    for submission, line in REFUSED:
        with pytest.raises((UserError, ConfigError), match=line) as refused:
            await registry.submit("ann", submission)
        assert "\n" not in str(refused.value)
    assert list((tmp_path / "rewards" / "versions").iterdir()) == []
    assert registry.names() == []
    assert await scored(registry) == [(-1.0, registry.base)]


async def test_a_retired_version_does_not_score(opened: Open) -> None:
    registry = await opened()
    one = (await registry.submit("ann", constant(1))).manifest.hash
    with pytest.raises(ConflictError, match="roll back or submit another first"):
        await registry.retire("ann", "reward", one)
    await registry.submit("ann", constant(2))
    await registry.retire("ann", "reward", one)
    await registry.retire("ann", "reward", one)
    for attempt in (registry.roll_back("ann", "reward", one), registry.submit("ann", constant(1))):
        with pytest.raises(ConflictError, match=f"{one} of reward 'reward' was retired"):
            await attempt


async def test_a_retired_version_that_was_displaced_does_not_come_back(opened: Open) -> None:
    registry = await opened(max_versions=1)
    retired = (await registry.submit("ann", constant(1, point=False))).manifest.hash
    await registry.retire("ann", "reward", retired)
    await registry.submit("ann", constant(2, point=False))
    with pytest.raises(ConflictError, match="was retired"):
        await registry.submit("ann", constant(1))


async def test_versions_that_names_pointed_to_lock_nobody_out(opened: Open) -> None:
    registry = await opened(max_versions=4)
    await registry.submit("carl", constant(99))
    for number in range(3):
        await registry.submit("ann", constant(number))
        await registry.submit("ben", constant(10 + number))
    newest = (await registry.submit("carl", constant(100))).manifest.hash
    assert registry.resolve("reward") == newest
    assert await scored(registry, sample()) == [(100, newest)]
    assert len(registry.name("reward").versions) == 4


async def test_names_that_the_run_does_not_follow_lock_nobody_out(opened: Open) -> None:
    registry = await opened(max_versions=4)
    scores = (await registry.submit("ann", constant(1))).manifest.hash
    for number in range(3):
        await registry.submit("eve", constant(10 + number, name=f"mine{number}"))
        await registry.submit("eva", constant(20 + number, name=f"hers{number}"))
    await registry.submit("ann", constant(2, name="other"))
    assert registry.resolve("reward") == scores
    assert registry.resolve("other")
    assert len(registry.names()) == 4
    before = registry.names()
    again = await opened(restart=True, max_versions=4)
    assert again.names() == before


async def test_a_name_points_to_nothing_when_its_version_made_room(opened: Open) -> None:
    registry = await opened(max_versions=4)
    await registry.submit("eve", constant(1, name="mine"))
    await registry.submit("eve", constant(2, name="mine"))
    await registry.retire("operator", "mine", registry.resolve("mine"))
    assert registry.name("mine").current == ""
    with pytest.raises(NotFoundError, match="points to no version"):
        registry.resolve("mine")


async def test_only_what_scores_now_is_refused_room(opened: Open) -> None:
    registry = await opened(max_versions=1)
    await registry.submit("ann", constant(1))
    with pytest.raises(CapacityError, match="ann has 1 versions, and may have no more"):
        await registry.submit("ann", constant(2))
    with pytest.raises(CapacityError, match="no room for another"):
        await registry.submit("ben", constant(2))
    await registry.roll_back("operator", "reward", "recipe")
    await registry.submit("ben", constant(2))


async def test_the_operator_frees_room_by_retiring(opened: Open, tmp_path: Path) -> None:
    registry = await opened()
    one = (await registry.submit("ann", constant(1))).manifest.hash
    await registry.submit("ann", constant(1, name="other"))
    two = (await registry.submit("ann", constant(2))).manifest.hash
    stored = tmp_path / "rewards" / "versions"
    await registry.retire("operator", "reward", one)
    assert {path.name for path in stored.iterdir()} == {one, two}, "another name has it"
    await registry.retire("operator", "other", one)
    assert {path.name for path in stored.iterdir()} == {two}
    registry = await opened(restart=True)
    assert {path.name for path in stored.iterdir()} == {two}
    assert registry.name("reward").retired == {one}


async def test_a_history_of_moves_between_two_versions_is_bounded(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(types, "MOVES", 3)
    registry = await opened()
    for number in range(8):
        accepted = await registry.submit("ann", constant(number % 2))
    assert [event.action for event in accepted.name.history] == ["submit", "submit", *["point"] * 3]
    assert registry.resolve("reward") == accepted.manifest.hash


async def test_a_flood_of_versions_that_no_name_points_to_displaces_itself(opened: Open) -> None:
    registry = await opened(max_versions=4)
    used = (await registry.submit("ann", constant(1))).manifest.hash
    for number in range(2, 12):
        await registry.submit("eve", constant(number, name=f"flood{number}", point=False))
    names = [name.name for name in registry.names()]
    assert names == ["flood10", "flood11", "flood9", "reward"]
    assert registry.resolve("reward") == used
    second = (await registry.submit("ann", constant(20))).manifest.hash
    assert registry.name("reward").versions == (used, second)
    assert [name.name for name in registry.names()] == ["flood10", "flood11", "reward"]
    before = registry.names()
    again = await opened(restart=True, max_versions=4)
    assert again.names() == before


async def test_one_version_has_so_many_names_and_no_more(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(JudgeCache, "hold", nothing)
    monkeypatch.setattr(JudgeCache, "release", lambda *_: None)
    monkeypatch.setattr(Registry, "_test", nothing)
    registry = await opened()
    for number in range(MOST_NAMES):
        await registry.submit("eve", constant(1, name=f"name{number}"))
    with pytest.raises(CapacityError, match="has 16 names, and may have no more: name0, "):
        await registry.submit("eve", constant(1, name="another"))
    await registry.submit("eve", constant(1, name="name3"))
    await registry.submit("eve", constant(2, name="another"))
    assert len(registry.names()) == MOST_NAMES + 1


BATCH = """
def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == t) for s, t in zip(solution_strs, ground_truths)]
"""


async def test_a_function_is_called_as_its_kind_says(opened: Open) -> None:
    """A batch function with lists; the steps of a process function add up to the reward."""
    registry = await opened()
    await registry.submit("ann", constant(1, source=BATCH, kind=FunctionKind.BATCH))
    assert [s for s, _ in await scored(registry, sample("x", 0), sample("y", 1))] == [1.0, 0.0]
    source = HEAD + "    return [1, 0.5, -0.25]\n"
    await registry.submit("ann", constant(1, source=source, kind=FunctionKind.PROCESS))
    (score,) = await registry.judge.score([sample()])
    assert score.score == 1.25
    wanted = {"compute_score": 1.25, "steps": 3.0, "step_min": -0.25, "step_mean": 1.25 / 3}
    assert score.components == pytest.approx(wanted)
    source = HEAD + "    return 1.0\n"
    await registry.submit("ann", constant(1, source=source, kind=FunctionKind.PROCESS))
    (score,) = await registry.judge.score([sample()])
    assert score.outcome is Outcome.INFRA_FAULT
    assert "returned float; want a list of step scores" in score.reason


async def test_a_version_gets_the_limits_that_it_asks_for(opened: Open) -> None:
    registry = await opened()
    source = "import time\n" + HEAD + "    time.sleep(float(solution_str))\n    return 1\n"
    plain = await registry.submit("ann", constant(1, source=source))
    limited = await registry.submit("ann", constant(1, source=source, limits={"deadline_s": 0.2}))
    assert plain.manifest.hash != limited.manifest.hash  # the limits are part of the version
    registry = await opened(restart=True)
    (score,) = await registry.score("reward", "", [sample("30")])
    assert (score.outcome, score.reward_hash) == (Outcome.TIMEOUT, limited.manifest.hash)
    assert score.reason.startswith("no score after 0.2 s")
    assert await registry.score("reward", plain.manifest.hash, [sample("0.3")])


def wheel(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {"judge-1.dist-info/METADATA": "Name: judge\n", **files}.items():
            archive.writestr(name, text)
    return buffer.getvalue()


async def test_a_wheel_scores_through_its_entry_point(opened: Open) -> None:
    registry = await opened()
    helper = {"judge/__init__.py": "", "judge/help.py": "ANSWER = 3\n"}
    body = "from judge.help import ANSWER\n" + HEAD + "    return ANSWER\n"
    packed = wheel({**helper, "judge/score.py": body})
    submission = Submission(name="reward", wheel=packed, entry_point="judge.score:compute_score")
    await registry.submit("ann", submission)
    assert [score for score, _ in await scored(registry)] == [3.0]


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"a.py": "x" * 3000}, "unpacks to .* bytes; at most 2000"),
        ({"../a.py": ""}, "outside itself"),
        ({"a.so": ""}, "native code"),
        ({"b.py": ""}, "no module 'a'"),
        ({"a.py": "def g(: pass"}, "a.py of the wheel, line 1"),
    ],
)
def test_a_wheel_is_checked_before_it_is_stored(files: dict[str, str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        checked(Submission(name="reward", wheel=wheel(files), entry_point="a:f"), LIMITS, Limits())


async def test_two_versions_are_compared_on_given_and_on_recent_samples(opened: Open) -> None:
    registry = await opened()
    one = (await registry.submit("ann", constant(1))).manifest.hash
    await registry.submit("ann", constant(2, source=HEAD + "    return len(solution_str)\n"))
    found = await registry.compare("reward", one, "", [sample("x", 0), sample("yyy", 1)])
    assert (found.compared, found.equal, found.mean_a, found.mean_b) == (2, 1, 1.0, 2.0)
    assert found.largest_first == [(2.0, "run/task/1.0", 1.0, 3.0, "yyy")]
    await registry.judge.score([sample("zz", 4)])
    recent = await registry.compare("reward", "recipe", "", [])
    assert (recent.compared, recent.mean_a, recent.mean_b) == (1, -1.0, 2.0)


WRITER = """
import sys
from pathlib import Path
from meshrl.rewardd.registry.checks import checked
from meshrl.rewardd.config import RegistryConfig
from meshrl.rewardd.registry.types import Action, Event, Name, Submission
from meshrl.rewardd.registry.store import SubmissionStore
from meshrl.sandbox.limits import Limits
store = SubmissionStore(Path(sys.argv[1]), 10_000)
name = store.names().get("reward", Name(name="reward"))
print("go", flush=True)
for number in range(len(name.versions), 100_000):
    source = f"def compute_score(**kwargs):\\n    return {number}\\n" + "#" * 5000
    manifest = store.add(checked(Submission(name="reward", source=source), RegistryConfig(), Limits()))
    point = [Event(action=a, hash=manifest.hash, by="x", at=0.0) for a in (Action.SUBMIT, Action.POINT)]
    name = name.after(*point)
    store.save(name)
    print(manifest.hash, flush=True)
"""


def test_a_kill_at_any_moment_loses_no_acknowledged_change(tmp_path: Path) -> None:
    for delay in (0, 3, 8, 21):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        answered = [process.stdout.readline().strip() for _ in range(delay)]
        os.kill(process.pid, signal.SIGKILL)
        answered += [line for line in process.stdout.read().splitlines() if len(line) == 32]
        process.wait()
        process.stdout.close()
        store = SubmissionStore(tmp_path, 10_000)
        names = store.names()
        known = names["reward"].versions if names else ()
        assert set(answered) <= set(known)
        for version in known:
            assert store.manifest(version).hash == version
            assert store.content(version).endswith(b"#")
        store.delete_all_but(set(known))
        store.close()
