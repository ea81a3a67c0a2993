"""Real functions in real processes: every kind of failure, and its effect on other samples."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

import meshrl.rewardd.config
from meshrl.contract.errors import ConfigError, UnavailableError
from meshrl.contract.types import Outcome, Sample, Score, Uid
from meshrl.rewardd.config import CustomRewardFunctionConfig, RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.pool import pool
from meshrl.rewardd.pool.functions import describe
from meshrl.rewardd.pool.messages import MAX_COMPONENTS, MAX_REASON
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.pool.rule import read_rule
from meshrl.sandbox.limits import Limits
from meshrl.sandbox.sandbox import Isolation, Launch, OpenSandbox

from ...waiting import runs

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
ASYNC_HEAD = "import asyncio\nasync " + HEAD
Make = Callable[..., PoolJudge]


def sample(solution: str, index: int = 0, ground_truth: Any = "1", **extra_info: Any) -> Sample:
    return Sample(
        uid=Uid("run", "task", index),
        data_source="unit",
        solution=solution,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )


def samples(*solutions: str) -> list[Sample]:
    return [sample(solution, index) for index, solution in enumerate(solutions)]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    judges: list[PoolJudge] = []

    def build(source: str, *, name: str = "compute_score", **options: Any) -> PoolJudge:
        path = tmp_path / "reward.py"
        path.write_text(source)
        kwargs = options.pop("kwargs", {})
        custom = CustomRewardFunctionConfig(path=path, name=name, reward_kwargs=kwargs)
        judges.append(build_judge(RewardConfig(custom_reward_function=custom, **options)))
        return judges[-1]

    yield build
    pids = [pid for judge in judges for pid in judge.pids]
    for judge in judges:
        await judge.close()
    assert not any(map(runs, pids))


def scores_of(results: Sequence[Score]) -> list[float]:
    assert [r.reason for r in results if r.outcome is not Outcome.OK] == []
    return [r.score for r in results]


async def test_scores_come_back_in_order_with_their_uids_and_the_hash(make: Make) -> None:
    judge = make(HEAD + "    return float(solution_str)\n", workers=2)
    batch = [sample(str(n), n) for n in range(300)]
    results = await judge.score(batch)
    assert scores_of(results) == [float(n) for n in range(300)]
    assert [r.uid for r in results] == [s.uid for s in batch]
    assert {r.reward_hash for r in results} == {judge.reward_hash}
    assert os.getpid() not in judge.pids


async def test_the_function_gets_everything_by_keyword(make: Make) -> None:
    judge = make(
        HEAD + "    assert data_source == 'unit' and kwargs == {'bonus': 2}\n"
        "    return ground_truth['a'] + extra_info['number'] + kwargs['bonus'] + len(solution_str)\n",
        kwargs={"bonus": 2},
    )
    result = await judge.score([sample("ab\ud800", ground_truth={"a": 1}, number=10)])
    assert scores_of(result) == [16.0]


async def test_numeric_keys_of_a_dict_become_components(make: Make) -> None:
    judge = make(HEAD + "    return {'score': 1, 'acc': True, 'pred': '42', 'len': 3}\n")
    (result,) = await judge.score(samples("x"))
    assert result.score == 1.0
    assert result.components == {"compute_score": 1.0, "acc": 1.0, "len": 3.0}


async def test_an_exception_is_a_fault_with_the_line_of_the_users_file(
    make: Make, tmp_path: Path
) -> None:
    judge = make(
        HEAD + "    if solution_str == 'bad':\n        raise ValueError('no digit')\n    return 1\n"
    )
    good, bad, after = await judge.score(samples("good", "bad", "good"))
    assert (good.score, after.score) == (1.0, 1.0)
    assert bad.outcome is Outcome.INFRA_FAULT
    assert bad.reason == f"ValueError: no digit at {tmp_path / 'reward.py'}:3 in compute_score"


NO_SCORES = {
    "float('nan')": "NaN",
    "float('inf')": "returned inf",
    "-float('inf')": "returned -inf",
    "1e300": "too large for float32",
    "'1.0'": "str '1.0', not a number",
    "None": "NoneType None, not a number",
    "[1.0]": "list [1.0], not a number",
    "{'acc': 1}": "without 'score' (it has 'acc')",
    "{'score': float('nan')}": "key 'score' returned NaN",
    "()": "tuple (), not a number",
    "('0.5', 1)": "str '0.5', not a number",
    "10 ** 400": "returned inf",
    "1j": "complex 1j, not a number",
    "np.zeros(2)": "array of several values",
    "decimal.Decimal('sNaN')": "Decimal: cannot convert signaling NaN",
    "sys.exit(3)": "SystemExit: 3",
}


SCORES = {
    "True": 1.0,
    "decimal.Decimal('0.5')": 0.5,
    "fractions.Fraction(1, 4)": 0.25,
    "np.bool_(True)": 1.0,
    "np.array(0.5, dtype=np.float32)": 0.5,
    "np.array([[2]])": 2.0,
    "(0.5, 'why')": 0.5,
    "(True, {'pred': 1})": 1.0,
    "{'score': decimal.Decimal(1)}": 1.0,
    "print('x' * 20_000_000) or sys.stderr.write('y' * 100_000) / 100_000": 1.0,
    "os.write(1, b'\\0\\0\\0\\2{}')": 6.0,  # looks like an answer on the pipe
    "len(sys.stdin.read())": 0.0,  # which is at its end
}


async def test_what_is_no_score_is_named_and_never_a_reward_and_output_is_none(make: Make) -> None:
    head = "import decimal, fractions, os, sys\nimport numpy as np\n" + HEAD
    judge = make(head + "    return eval(solution_str)\n")
    results = await judge.score(samples(*NO_SCORES))
    for result, (expression, named) in zip(results, NO_SCORES.items(), strict=True):
        assert result.outcome is Outcome.INFRA_FAULT, expression
        assert named in result.reason and result.lasting
    assert scores_of(await judge.score(samples(*SCORES))) == list(SCORES.values())
    bad, good = await judge.score([sample("1", 0, ground_truth={1, 2}), sample("2", 1)])
    assert bad.outcome is Outcome.INFRA_FAULT
    assert "is not JSON" in bad.reason
    assert good.score == 2.0


async def test_keys_that_are_no_finite_number_cost_no_score_and_are_told_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    judge = make(
        HEAD
        + "    odd = {'nan': float('nan'), 'big': 1e39, 'none': None, 'lst': [1, 2], 'sub': {'a': 1}}\n"
        + "    many = {f'k{number}': number for number in range(100)}\n"
        + "    return {'score': 1, 'acc': 0.5, 'flag': True, 'txt': 'hi', **odd, **many}\n"
    )
    results = await judge.score(samples(*"abcd"))
    for result in results:
        assert (result.outcome, result.score) == (Outcome.OK, 1.0), result.reason
        assert (result.components["acc"], result.components["flag"]) == (0.5, 1.0)
        assert len(result.components) == MAX_COMPONENTS
        assert not result.components.keys() & {"nan", "big", "none", "lst", "sub"}
    told = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(told) == len(set(told)) == 5 + (3 + 100 - MAX_COMPONENTS)
    assert "compute_score: key 'nan' returned NaN: this key is dropped" in told[0]


def test_a_long_message_keeps_the_line_of_the_users_file() -> None:
    try:
        exec(compile("raise ValueError('x' * 5000)", "reward.py", "exec"))
    except ValueError as error:
        reason = describe(error)
    assert len(reason) == MAX_REASON and reason.endswith("x at reward.py:1 in <module>")


async def test_a_hanging_sample_times_out_alone_with_its_line(make: Make, tmp_path: Path) -> None:
    judge = make(
        "import re\n" + HEAD + "    while solution_str == 'bad':\n        pass\n"
        "    re.fullmatch('(a+)+b', solution_str)\n    return 1\n",
        deadline_s=0.5,
    )
    await judge.start()
    (before,) = judge.pids
    results = await judge.score(samples("a", "b", "bad", "c", "a" * 60, "d"))
    ok = Outcome.OK
    assert [r.outcome for r in results] == [ok, ok, Outcome.TIMEOUT, ok, Outcome.TIMEOUT, ok]
    assert results[2].reason.startswith(f"no score after 0.5 s at {tmp_path / 'reward.py'}:")
    assert not runs(before)


async def test_a_policy_cannot_hide_from_a_built_in_reward_behind_its_deadline() -> None:
    never_ends = {"name": "regex_match", "kwargs": {"pattern": "(a+)+b", "penalty": -1}}
    config = RewardConfig.model_validate({"functions": [never_ends], "deadline_s": 0.5})
    judge = build_judge(config)
    try:
        bad, good = await judge.score(samples("a" * 60, "aab"))
    finally:
        await judge.close()
    assert (bad.outcome, bad.score) == (Outcome.POLICY_FAULT, -1.0)  # what an empty response gets
    assert bad.components == {"regex_match": -1.0}
    assert bad.texts["policy_fault"].startswith("no score after 0.5 s")
    assert (good.outcome, good.score) == (Outcome.OK, 1.0)


ENDS_BADLY = {
    "while True: pass": "no score after 0.5 s",
    "os._exit(7)": "exit code 7",
    "raise MemoryError": "MemoryError",
    "compute_score(*[solution_str] * 4)": "RecursionError",
}


@pytest.mark.parametrize("empty", ["raise MemoryError", "pass"])
async def test_a_recipe_says_whether_the_deadline_of_its_own_function_is_the_policys_fault(
    make: Make, empty: str
) -> None:
    """Also where an empty response ends badly."""
    judge = make(
        "import os\n" + HEAD + f"    exec(solution_str or {empty!r})\n    return 1\n",
        deadline_s=0.5,
        own_timeout="policy_fault",
    )
    *results, good = await judge.score(samples(*ENDS_BADLY, "pass"))
    for bad, named in zip(results, ENDS_BADLY.values(), strict=True):
        assert (bad.outcome, bad.score) == (Outcome.POLICY_FAULT, 0.0)  # not the 1 of an empty one
        assert named in bad.texts["policy_fault"]
    assert good.score == 1.0


DEATHS = {
    "os._exit(7)": "exit code 7",
    "ctypes.string_at(0)": "killed by SIGSEGV at ",
    "os.kill(os.getpid(), 9)": "killed by SIGKILL",
}


async def test_a_crash_is_the_fault_of_the_sample_that_caused_it(make: Make) -> None:
    judge = make(f"import ctypes, os\n{HEAD}    exec(solution_str)\n    return 1\n")
    for death, named in DEATHS.items():
        results = await judge.score(samples("pass", death, "pass", "pass"))
        assert [r.outcome for r in results] == [Outcome.OK, Outcome.INFRA_FAULT, *[Outcome.OK] * 2]
        assert named in results[1].reason


async def test_fast_samples_do_not_wait_for_a_slow_one(make: Make) -> None:
    judge = make(
        "import time\n"
        + HEAD
        + "    time.sleep(3600 if solution_str == 'slow' else 0)\n    return 1\n",
        workers=2,
        deadline_s=3600,
    )
    await judge.start()
    slow = asyncio.create_task(_score(judge, samples("slow")))
    for _ in range(3):
        assert scores_of(await judge.score(samples(*"abcdefgh"))) == [1.0] * 8
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def _score(judge: PoolJudge, batch: list[Sample]) -> Sequence[Score]:
    return await judge.score(batch)


async def test_async_functions_run_side_by_side(make: Make) -> None:
    # Each sample waits until all sixteen have begun: one after the other they would never end.
    judge = make(
        ASYNC_HEAD.replace("async def", "began, all_here = 0, asyncio.Event()\nasync def")
        + "    global began\n    began += 1\n    if began == 16: all_here.set()\n"
        "    await all_here.wait()\n    return float(solution_str)\n",
        deadline_s=20,
    )
    results = await judge.score([sample(str(n), n) for n in range(16)])
    assert scores_of(results) == [float(n) for n in range(16)]


async def test_an_async_function_that_awaits_for_ever_harms_no_process(make: Make) -> None:
    judge = make(
        ASYNC_HEAD + "    await asyncio.sleep(3600 * (solution_str == 'bad'))\n    return 1\n",
        deadline_s=0.5,
    )
    await judge.start()
    pids = judge.pids
    results = await judge.score(samples("a", "bad", "c"))
    assert [r.outcome for r in results] == [Outcome.OK, Outcome.TIMEOUT, Outcome.OK]
    assert "reward.py:" in results[1].reason
    assert judge.pids == pids


async def test_an_async_function_that_ends_its_process_harms_no_other_sample(make: Make) -> None:
    judge = make(
        ASYNC_HEAD + "    await asyncio.sleep(0.05)\n    import os\n"
        "    if solution_str == 'bad': os._exit(1)\n    await asyncio.sleep(0.05)\n    return 1\n"
    )
    results = await judge.score(samples("a", "bad", "c", "d"))
    assert [r.outcome for r in results] == [Outcome.OK, Outcome.INFRA_FAULT, *[Outcome.OK] * 2]


async def test_an_async_function_that_blocks_its_loop_fails_alone(
    make: Make,
) -> None:
    judge = make(
        ASYNC_HEAD + "    await asyncio.sleep(0)\n    while solution_str == 'bad': pass\n"
        "    await asyncio.sleep(0.01)\n    return 1\n",
        deadline_s=0.3,
    )
    results = await judge.score(samples("a", "bad", "c"))
    assert [r.outcome for r in results] == [Outcome.OK, Outcome.TIMEOUT, Outcome.OK]


async def test_memory_beyond_the_limit_is_a_fault_of_that_sample(make: Make) -> None:
    judge = make(
        HEAD + "    return len(bytearray(4 << 30 if solution_str == 'bad' else 1))\n",
        limits={"memory_bytes": 2 << 30},
    )
    bad, good = await judge.score(samples("bad", "good"))
    assert bad.outcome is Outcome.INFRA_FAULT
    assert bad.reason.startswith("MemoryError")
    assert good.score == 1.0


async def test_cpu_time_beyond_the_limit_is_a_timeout(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RewardConfig(deadline_s=600).recipe_limits.model_copy(update={"cpu_s": 1})
    monkeypatch.setattr(RewardConfig, "recipe_limits", property(lambda _: limits))
    judge = make(
        HEAD + "    while solution_str == 'bad': pass\n    return 1\n",
        deadline_s=600,
    )
    bad, good = await judge.score(samples("bad", "good"))
    assert bad.outcome is Outcome.TIMEOUT
    assert "more than 1 s of CPU time" in bad.reason
    assert good.score == 1.0


async def test_closing_answers_waiting_samples_and_leaves_no_process(make: Make) -> None:
    judge = make("import time\n" + HEAD + "    time.sleep(3600)\n")
    await judge.start()
    (pid,) = judge.pids
    waiting = asyncio.create_task(_score(judge, samples("a", "b")))
    await asyncio.sleep(0)
    await judge.close()
    assert [r.outcome for r in await waiting] == [Outcome.CANCELLED] * 2
    assert not runs(pid)
    await judge.close()
    with pytest.raises(UnavailableError):
        await judge.score(samples("a"))


async def test_cancelled_samples_are_not_scored(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "BATCH_SIZE", 1)
    judge = make(
        "import pathlib, time\n"
        + HEAD
        + "    while not pathlib.Path(kwargs['go']).exists(): time.sleep(0.01)\n"
        "    with open(kwargs['log'], 'a') as log: log.write(solution_str)\n    return 1\n",
        kwargs={"go": str(tmp_path / "go"), "log": str(tmp_path / "log")},
    )
    await judge.start()
    first = asyncio.create_task(_score(judge, samples("a")))
    await asyncio.sleep(0)
    cancelled = asyncio.create_task(_score(judge, samples("b")))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    (tmp_path / "go").touch()
    await first
    assert scores_of(await judge.score(samples("c"))) == [1.0]
    assert (tmp_path / "log").read_text() == "ac"


async def test_the_file_may_import_its_neighbours(make: Make, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("BONUS = 5\n")
    judge = make("from neighbour_of_reward import BONUS\n" + HEAD + "    return BONUS\n")
    assert scores_of(await judge.score(samples("x"))) == [5.0]


async def test_what_was_hashed_is_what_scores_even_after_an_edit(
    make: Make, tmp_path: Path
) -> None:
    judge = make(HEAD + "    return 1\n")
    (tmp_path / "reward.py").write_text(HEAD + "    return 2\n")
    assert scores_of(await judge.score(samples("x"))) == [1.0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "def compute_score(answer):\n    return 1\n",
            "cannot be called: missing a required argument",
        ),
        ("def compute_score(data_source, solution_str):\n    return 1\n", "cannot be called"),
        ("import nothing_of_that_name\n" + HEAD + "    return 1\n", "ModuleNotFoundError"),
        ("compute_score = 3\n", "defines no function 'compute_score'"),
        ("import os\nos._exit(5)\n" + HEAD + "    return 1\n", "while being loaded: exit code 5"),
        ("import time\ntime.sleep(3600)\n" + HEAD + "    return 1\n", "did not load within 2 s at"),
    ],
)
async def test_a_file_that_cannot_be_loaded_is_refused_at_start(
    make: Make, tmp_path: Path, source: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in source:
        monkeypatch.setattr(meshrl.rewardd.config, "START_DEADLINE_S", 2.0)
    judge = make(source)
    with pytest.raises(ConfigError) as refused:
        await judge.start()
    assert expected in str(refused.value)
    assert str(tmp_path / "reward.py") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_scoring_process_leaks_on_uvloop(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        f"import os\n{HEAD}    if solution_str == 'bad':\n        os._exit(3)\n    return 1\n"
    )

    async def score() -> tuple[Sequence[Score], list[int]]:
        custom = CustomRewardFunctionConfig(path=path)
        judge = build_judge(RewardConfig(custom_reward_function=custom, workers=2))
        results = await judge.score(samples("a", "bad", "c"))
        pids = judge.pids
        await judge.close()
        return results, pids

    results, pids = uvloop.run(score())
    assert [r.outcome for r in results] == [Outcome.OK, Outcome.INFRA_FAULT, Outcome.OK]
    assert not any(map(runs, pids))


GARBAGE = [
    "[1]",
    '{"id": Infinity}',
    '{"id": 1, "score": Infinity, "components": {}}',
    '{"id": 1, "score": 1, "components": {"a": "b"}}',
    '{"id": 1, "fault": "ok", "reason": ""}',
    "null",
    "no json",
]
FORGES = (
    f"import os, struct\n{HEAD}"
    """    body = solution_str.encode()
    for descriptor in range(3, 20) if body else ():
        try:
            os.write(descriptor, struct.pack('>I', len(body)) + body)
        except OSError:
            pass
    return 2.0
"""
)


async def test_garbage_in_the_pipe_stops_neither_the_pool_nor_other_samples(make: Make) -> None:
    judge = make(FORGES, deadline_s=20)
    async with asyncio.timeout(120):
        for frame in GARBAGE:
            first, forged, last = await judge.score(samples("", frame, ""))
            again = await judge.score(samples(""))
            assert scores_of([first, last, *again]) == [2.0, 2.0, 2.0]
            assert forged.outcome is Outcome.INFRA_FAULT or forged.score == 2.0


class LaunchFails:
    """A sandbox that starts `good` processes, and then raises what nobody foresees."""

    level, prepare = Isolation.OFF, None

    def __init__(self, good: int) -> None:
        self.limits = Limits()
        self.launches = 0
        self.failed = asyncio.Event()
        self._good = good
        self._open = OpenSandbox(limits=self.limits)

    def launch(self, module: str, *, shares: int = 2) -> Launch:
        self.launches += 1
        if self.launches > self._good:
            self.failed.set()
            raise RuntimeError("nobody foresaw this")
        return self._open.launch(module)

    def process(self, pid: int) -> int | None:
        return pid

    def orphans(self, pid: int) -> int:
        return 0


async def test_a_slot_that_crashes_again_and_again_waits_longer_each_time(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("import os\n" + HEAD + "    os._exit(3)\n")
    config = RewardConfig(custom_reward_function=CustomRewardFunctionConfig(path=path), workers=1)
    sandbox = LaunchFails(good=1)
    judge = PoolJudge(read_rule(config), config, sandbox=sandbox)
    scoring = asyncio.create_task(judge.score(samples("1")))
    try:
        await sandbox.failed.wait()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert sandbox.launches < 20
        (score,) = await scoring
        assert score.outcome is Outcome.INFRA_FAULT
        assert score.reason == "judge: nobody foresaw this"
    finally:
        scoring.cancel()
        await judge.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"id": 1, "score": 1, "components": {str(n): 1 for n in range(65)}},
        {"id": 1, "score": 1, "components": {"..": 1}},
        {"id": 1, "score": 1, "components": {"a\x00": 1}},
        {"id": 1, "score": 1, "components": {"\ud800": 1}},
        {"id": 1, "score": 1, "components": {"x" * 257: 1}},
        {"id": 1, "score": 1, "components": {"a": "1"}},
        {"id": 1, "score": 1, "components": ["a"]},
        {"id": 1, "score": "1", "components": {}},
        {"id": 1, "score": 1e308, "components": {}},
        {"id": 1, "score": float("nan"), "components": {}},
        {"id": 1, "score": 10**400, "components": {}},
        {"id": 1, "score": 1, "components": {}, "token_rewards": [0.0, 1.0]},
        {"id": 1, "score": 1, "components": {}, "token_rewards": {"0": 1}},
        {"id": 1, "score": 1, "components": {}, "outcome": "infra_fault"},
        {"id": 1, "fault": "ok", "reason": ""},
        {"id": 1, "fault": "infra_fault", "reason": {"a": "b"}},
        {"id": 1},
        [1],
        None,
    ],
    ids=lambda answer: repr(answer)[:60],
)
def test_an_answer_that_our_code_does_not_send_is_none(answer: Any) -> None:
    item = pool._PoolSample(1, Uid("r", "t", 0), None, tokens=3)  # type: ignore[arg-type]  # nobody waits
    assert pool._score(answer, item, "hash") is None


def test_a_reason_is_cut_and_holds_text_only() -> None:
    item = pool._PoolSample(1, Uid("r", "t", 0), None)  # type: ignore[arg-type]  # nobody waits
    answer = {"id": 1, "fault": "infra_fault", "reason": "a\ud800\x1b[31m\nb" + "x" * 9000}
    score = pool._score(answer, item, "hash")
    assert score is not None
    assert score.reason.startswith("a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m\nbx")
    assert len(score.reason) == 2000
