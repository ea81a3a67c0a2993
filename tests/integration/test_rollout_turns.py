"""Rows of several turns between a real queue and workers that come and go: nothing is sampled or called twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.types import GenerateDelta, GenerateRequest, Outcome, Task, Trajectory, Version
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.worker import RolloutWorker
from meshrl.testing.engines import echo
from meshrl.trainer.algorithms.advantages.gigpo import anchors_of
from meshrl.transferqueue.queue import TransferQueue
from tests.doubles.scripted import END, Scripted
from tests.doubles.scripted import task as one_task

from ..unit.rollout import some_tools
from ..unit.rollout.chats import chat_tokenizer
from .test_rollout_worker import FIRST, RUN, commit, open_run, trajectories, until_dead

HERE = "tests.unit.rollout.some_tools"
NEXT = Version(1, 1)
TOKENIZER = chat_tokenizer()
ADD = f'<tool_call>{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}</tool_call>{END}'
GATE = f'Then I wait. <tool_call>{{"name": "gate", "arguments": {{}}}}</tool_call>{END}'
ANSWER = f"It is three, and the gate is open now.{END}"
OFTEN = CheckpointIntervals(tokens=2, ms=0)


class Policy(Scripted):
    """Stops for ever, once, in turn `halt_in` after a few tokens."""

    def __init__(self, version: Version, halt_in: str = "") -> None:
        super().__init__(TOKENIZER, [ADD, GATE, ANSWER], piece=4)
        self.version = version
        self.halted = asyncio.Event()
        self._halt_in = halt_in

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        halts = bool(self._halt_in) and request.request_id.endswith(self._halt_in)
        count = 0
        async for delta in super().generate(request):
            yield delta
            await asyncio.sleep(0)
            count += 1
            if halts and count == 3:
                self.halted.set()
                await asyncio.Event().wait()


class Gate:
    """A tool that says it is open, or waits for ever."""

    def __init__(self) -> None:
        self.calls = 0
        self.reached = asyncio.Event()
        self.open = True

    async def gate(self) -> str:
        """Pass the gate."""
        self.calls += 1
        self.reached.set()
        if not self.open:
            await asyncio.Event().wait()
        return f"open {self.calls}"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(some_tools, "gate", made.gate, raising=False)
    some_tools.calls.clear()
    return made


def turns_task(**changes: Any) -> Task:
    return replace(one_task(TOKENIZER), run=RUN, program="tools", **changes)


@asynccontextmanager
async def worker_of(
    queue: TransferQueue, policy: Any, name: str, **options: Any
) -> AsyncIterator[RolloutWorker]:
    tools = options.pop("tools", [f"{HERE}.add", f"{HERE}.gate"])
    programs = ProgramCache("tools", {"tools": tools})
    worker = RolloutWorker(
        queue,
        policy,
        TOKENIZER,
        runs=[RUN],
        worker=name,
        schedule=RowSchedule(slots=4, **{"checkpoint": OFTEN} | options),
        programs=programs,
    )
    running = asyncio.create_task(worker.run(grace_s=60))
    try:
        yield worker
    finally:
        worker.drain()
        async with asyncio.timeout(120):
            await running
        await programs.close()


async def row_of(queue: TransferQueue, policy: Any, **options: Any) -> Trajectory:
    async with worker_of(queue, policy, "w1", **options):
        (row,) = await trajectories(queue, RUN, 1)
    return row


def pieces(row: Trajectory) -> list[tuple[str, Version | None]]:
    """The row as text, by the worker that sampled it; None: an observation."""
    whose: list[Version | None] = [None] * len(row.tokens)
    for span in row.spans:
        whose[span.start : span.end] = [span.version] * (span.end - span.start)
    assert [each is not None for each in whose] == row.loss_mask.astype(bool).tolist()
    found: list[tuple[list[int], Version | None]] = []
    for token, version in zip(row.tokens.tolist(), whose, strict=True):
        if not found or found[-1][1] != version:
            found.append(([], version))
        found[-1][0].append(token)
    return [(TOKENIZER.decode_all(tokens), version) for tokens, version in found]


def observed(text: str) -> str:
    return f"\n<|start|>tool\n{text}<|end|>\n<|start|>assistant\n"


async def test_a_row_that_moves_in_a_later_turn_keeps_turns_and_results(
    queue: TransferQueue, gate: Gate
) -> None:
    await open_run(queue, [turns_task()], max_attempts=1)
    first = Policy(FIRST, halt_in="/2")
    async with worker_of(queue, first, "w0") as worker:
        async with asyncio.timeout(120):
            await first.halted.wait()
    assert worker.stats.written == 0 and gate.calls == 1
    second = Policy(NEXT)
    row = await row_of(queue, second)
    texts = pieces(row)
    assert texts[1:5] == [
        (ADD, FIRST),
        (observed("3"), None),
        (GATE, FIRST),
        (observed("open 1"), None),
    ]
    (begun, by_first), (ended, by_second) = texts[5:]
    assert (by_first, by_second) == (FIRST, NEXT) and begun + ended == ANSWER
    assert gate.calls == 1 and some_tools.calls == ["1+2"]
    assert first.sampled + second.sampled == int(row.loss_mask.sum())
    assert len(anchors_of(row)) == 3  # a step for each turn, wherever it was sampled
    np.testing.assert_array_equal(row.rollout_logprobs, np.float32(-0.5) * row.loss_mask)


async def test_a_row_that_moves_during_a_call_repeats_that_call_and_no_other(
    queue: TransferQueue, gate: Gate
) -> None:
    await open_run(queue, [turns_task()], max_attempts=1)
    gate.open = False
    first = Policy(FIRST)
    async with worker_of(queue, first, "w0"):
        async with asyncio.timeout(120):
            await gate.reached.wait()
    gate.open = True
    second = Policy(NEXT)
    row = await row_of(queue, second)
    assert [version for _, version in pieces(row)] == [None, FIRST, None, FIRST, None, NEXT]
    assert gate.calls == 2 and some_tools.calls == ["1+2"]
    assert first.sampled + second.sampled == int(row.loss_mask.sum())


@pytest.mark.parametrize(("other", "same"), [("3", True), ("4", False)], ids=["same", "other"])
async def test_stateful_tools_are_called_again_and_their_results_decide_whether_the_row_continues(
    queue: TransferQueue, gate: Gate, monkeypatch: pytest.MonkeyPatch, other: str, same: bool
) -> None:
    result = "3"

    def add(a: int, b: int) -> str:
        """Add."""
        some_tools.calls.append(result)
        return result

    monkeypatch.setattr(some_tools, "add", add)
    tools = [{"function": f"{HERE}.add", "stateful": True}, f"{HERE}.gate"]
    await open_run(queue, [turns_task()], max_attempts=1)
    first = Policy(FIRST, halt_in="/2")
    async with worker_of(queue, first, "w0", tools=tools):
        async with asyncio.timeout(120):
            await first.halted.wait()
    result = other
    second = Policy(NEXT)
    # The gate counts its calls: called a second time it says something else.
    gate.calls = 0
    row = await row_of(queue, second, tools=tools)
    assert some_tools.calls == ["3", other] and gate.calls == 1
    versions = [version for _, version in pieces(row)]
    if same:
        assert versions == [None, FIRST, None, FIRST, None, FIRST, NEXT]
        assert first.sampled + second.sampled == int(row.loss_mask.sum())
    else:
        assert versions == [None, FIRST, None, NEXT, None, NEXT]
        assert pieces(row)[2][0] == observed("4")


async def test_a_row_whose_tools_return_other_results_is_not_saved_any_more(
    queue: TransferQueue, gate: Gate
) -> None:
    """A recipe that has changed: the prompt lists other tools."""
    await open_run(queue, [turns_task()], max_attempts=1)
    first = Policy(FIRST, halt_in="/2")
    async with worker_of(queue, first, "w0"):
        async with asyncio.timeout(120):
            await first.halted.wait()
    second = Policy(NEXT)
    tools = [f"{HERE}.gate", f"{HERE}.add"]
    row = await row_of(queue, second, tools=tools)
    assert {version for _, version in pieces(row)} == {None, NEXT}
    assert some_tools.calls == ["1+2", "1+2"]


async def test_versions_change_between_turns(queue: TransferQueue, gate: Gate) -> None:
    policy = Policy(FIRST)
    moved = gate.gate

    async def gate_and_update() -> str:
        """Pass the gate while new weights come."""
        policy.version = NEXT
        return await moved()

    some_tools.gate = gate_and_update  # type: ignore[attr-defined]
    await open_run(queue, [turns_task()])
    tools = [f"{HERE}.add", {"function": f"{HERE}.gate", "name": "gate"}]
    row = await row_of(queue, policy, tools=tools)
    assert [version for _, version in pieces(row)] == [None, FIRST, None, FIRST, None, NEXT]


async def test_a_broken_tool_is_a_fault_of_the_row_and_never_a_reward(queue: TransferQueue) -> None:
    await open_run(queue, [turns_task()], max_attempts=2)
    policy = Scripted(
        TOKENIZER,
        [f'<tool_call>{{"name": "fail", "arguments": {{"how": "infra"}}}}</tool_call>{END}'],
    )
    async with worker_of(queue, policy, "w0", tools=[f"{HERE}.fail"]):
        (dead,) = await until_dead(queue)
    assert dead.outcome is Outcome.INFRA_FAULT
    assert "the disk is gone" in dead.reason


async def test_the_echo_engine_runs_the_program_too(queue: TransferQueue, tmp_path: Path) -> None:
    """The echoed prompt with its tool schemas is no call: a row of one turn."""
    engine = echo.build({"tokens_per_s": 100_000}, model=tmp_path, slots=4)
    await engine.start()
    await commit(engine)
    await open_run(queue, [turns_task()])
    row = await row_of(queue, engine, tools=[f"{HERE}.add"])
    await engine.close()
    half = row.prompt_length
    assert half > len(turns_task().prompt_ids)
    assert row.tokens[half:].tolist() == row.tokens[:half].tolist()[: len(row.tokens) - half]
