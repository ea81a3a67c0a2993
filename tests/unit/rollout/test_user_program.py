"""The program `user`: what a function may do with a session, and what it hears of its mistakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.rows import column_posted
from meshrl.contract.types import POSTED_REWARD, Outcome, PostedReward, Uid
from meshrl.rollout.agents.agent import posted
from meshrl.rollout.ports import Rollout
from meshrl.rollout.programs import ProgramCache
from tests.doubles.scripted import END, Scripted, task

from . import some_agents
from .chats import chat_tokenizer

HERE = "tests.unit.rollout.some_agents"
UID = Uid("run", "t0", 0)
TOKENIZER = chat_tokenizer()


async def run(
    function: str, turns: Sequence[str], *, max_tokens: int = 200, **options: Any
) -> tuple[Rollout, Scripted, str]:
    some_agents.seen.clear()
    name = function if ":" in function else f"{HERE}.{function}"
    policy = Scripted(TOKENIZER, [turn + END for turn in turns])
    async with ProgramCache("user", {"function": name} | options) as programs:
        program = await programs.start()
        user_task = task(TOKENIZER, max_tokens=max_tokens, ground_truth="42")
        rollout = await program(user_task, UID, policy, TOKENIZER)
    return rollout, policy, policy.text(rollout.trajectory.tokens)


async def test_a_function_leads_the_conversation() -> None:
    rollout, policy, text = await run("insist", ["41?", "43?", "42!"])
    said = "\n<|start|>user\nWrong.<|end|>\n<|start|>assistant\n"
    assert text.endswith(f"41?{END}{said}43?{END}{said}42!{END}")
    row = rollout.trajectory
    assert policy.text(row.tokens[row.loss_mask.astype(bool)]) == f"41?{END}43?{END}42!{END}"
    assert some_agents.seen == ["41?", "43?"]
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.OK, "stop")


@pytest.mark.parametrize(
    ("options", "reason", "turns"),
    [({"max_turns": 2}, "max_turns", 2), ({"max_tokens": 50}, "length", 3)],
)
async def test_a_conversation_that_is_too_long_ends_the_row(
    options: dict[str, Any], reason: str, turns: int
) -> None:
    rollout, policy, _ = await run("insist", ["41?"] * 9, **options)
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.TRUNCATED, reason)
    assert len(policy.requests) == turns and rollout.trajectory.loss_mask[-1] == 1


@pytest.mark.parametrize(
    ("turn", "reward", "outcome"),
    [
        ("half", PostedReward(score=0.5), Outcome.OK),
        ("much", PostedReward(score=2.0, components={"steps": 3.0}), Outcome.OK),
        ("nothing", None, Outcome.OK),
        ("bad", None, Outcome.POLICY_FAULT),
        ("more", PostedReward(score=0.0), Outcome.TRUNCATED),
    ],
)
async def test_a_function_may_say_what_its_row_is_worth(
    turn: str, reward: PostedReward | None, outcome: Outcome
) -> None:
    rollout, _, _ = await run("score", [turn], posts_reward=True, max_turns=1)
    assert column_posted(rollout.columns[POSTED_REWARD]) == reward
    assert rollout.outcome is outcome


async def test_a_reward_that_the_recipe_does_not_announce_is_refused() -> None:
    with pytest.raises(UserError, match=r"returned float, .*program_options\.posts_reward"):
        await run("score", ["half"])
    with pytest.raises(UserError, match="a reward's score is 'x', want a finite number"):
        await run("return_text", ["x"], posts_reward=True)
    with pytest.raises(UserError, match=r"a reward's score is 10+, want a finite number"):
        posted(10**400)


async def test_a_cut_turn_may_be_continued() -> None:
    rollout, _, text = await run("insist", ["it is 1?", "42!"], max_turn_tokens=5)
    assert f"it is{END}\n<|start|>user\nWrong." in text and text.endswith("42!<|end|>")
    assert rollout.outcome is Outcome.OK


async def test_a_function_may_catch_the_end() -> None:
    rollout, _, _ = await run("catch", ["a"] * 9, max_turns=2)
    assert some_agents.seen[:2] == ["stop", "stop"]
    assert some_agents.seen[2].startswith("max_turns, ")
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.TRUNCATED, "max_turns")


async def test_a_function_may_set_the_outcome() -> None:
    rollout, _, _ = await run("judge", ["a"])
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.POLICY_FAULT, "stop")


async def test_a_function_may_be_a_whole_program() -> None:
    rollout, _, text = await run("whole", ["42"])
    assert text.endswith("42<|end|>") and rollout.outcome is Outcome.OK


async def test_a_function_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Plan:\n"
        "    word: str = 'More.'\n"
        "async def agent(session):\n"
        "    await session.reply()\n"
        "    await session.say(Plan().word)\n"
    )
    _, policy, text = await run(f"{file}:agent", ["a", "b"])
    assert "user\nMore.<|end|>" in text and len(policy.requests) == 2


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("not_async", "is not async; want async def agent\\(session\\)"),
        ("two", "has the parameters task, uid; want async def agent\\(session\\)"),
        ("nobody", "'nobody' is not there in tests.unit.rollout.some_agents"),
        ("seen", "'seen' is not a function in"),
    ],
)
async def test_a_function_that_cannot_be_a_program_is_refused_at_the_start(
    function: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"^rollout.program_options.function: .*{problem}"):
        await run(function, [])


async def test_a_file_with_a_mistake_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'nothing_of"):
        await run(f"{file}:agent", [])


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("return_text", "some_agents.return_text returned str, want None or an Outcome"),
        ("whole_but_wrong", "some_agents.whole_but_wrong returned int, want a Rollout"),
        ("say_first", "the policy must answer the prompt first"),
        ("say_nothing", "say_nothing returned before the policy had a turn"),
    ],
)
async def test_a_mistake_at_run_time_is_one_clear_line(function: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        await run(function, ["a"])


async def test_a_task_names_no_code_that_the_recipe_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "program.py").write_text("raise SystemExit('planted')")
    monkeypatch.syspath_prepend(tmp_path)
    async with ProgramCache("single_turn") as programs:
        with pytest.raises(ConfigError, match=r"names it: rollout\.program$"):
            programs.get("planted.program")


async def test_a_response_that_the_engine_aborted_is_not_trained() -> None:
    class Gone(Scripted):
        def _delta(self, tokens: Sequence[int], reason: str) -> Any:
            return super()._delta(tokens, "abort")

    async with ProgramCache("user", {"function": f"{HERE}.insist"}) as programs:
        program = await programs.start()
        rollout = await program(task(TOKENIZER), UID, Gone(TOKENIZER, ["a"]), TOKENIZER)
    assert rollout.outcome is Outcome.CANCELLED


HELD = """
import asyncio, logging, time
from meshrl.rollout.loop_watchdog import LoopWatchdog
logging.basicConfig(format="%(message)s")

async def step():
    time.sleep(1000)  # an environment that computes without await

async def main():
    with LoopWatchdog(0.5):
        await asyncio.sleep(0.1)
        await step()

asyncio.run(main())
"""


def test_a_loop_that_is_held_ends_its_process_with_the_place() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "the event loop has run nothing for 0.5 s" in ended.stderr
    assert "it is held by <string>:7 step, called by <string>:12 main" in ended.stderr


BUSY = """
import asyncio, time
from meshrl.rollout.loop_watchdog import LoopWatchdog

async def main():
    with LoopWatchdog(2.0):
        for _ in range(30):
            time.sleep(0.1)
            await asyncio.sleep(0)
    time.sleep(2.5)  # nobody watches any more

asyncio.run(main())
"""


def test_a_loop_that_is_busy_is_left_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", BUSY], timeout=120, check=False)
    assert ended.returncode == 0
