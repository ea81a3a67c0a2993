"""Any order of requests, repeats, early ones, restarts and kills against a model that has no disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from meshrl.contract.errors import ConflictError, UserError, WaitTimeoutError
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    LoadWeights,
    Pass,
    SaveWeights,
    TrainingRequest,
    TrainingVerb,
)
from meshrl.trainer.hosted.host import HostedTraining, HostingLimits
from tests.doubles.hosted import Killed, KillingDisk, StandInBench, StandInModel

CREATE = CreateModel(base_model="m", lora_rank=4)
LIMITS = HostingLimits(snapshot_steps=3)
NUMBERS = st.integers(0, 3).map(float)
VERBS: st.SearchStrategy[TrainingVerb] = st.one_of(
    st.builds(
        lambda number, backward: Pass(
            examples=[], loss="ppo", loss_settings={"number": number}, backward=backward
        ),
        NUMBERS,
        st.booleans(),
    ),
    st.builds(AdamStep, learning_rate=st.sampled_from([0.1, 0.2, 13.0])),
    st.sampled_from(["wrong", "fails"]).map(
        lambda how: Pass(examples=[], loss="ppo", loss_settings={how: 1.0})
    ),
    st.builds(SaveWeights, name=st.sampled_from("ab"), overwrite=st.booleans()),
    st.builds(
        LoadWeights,
        path=st.sampled_from("ab").map("tinker://m/weights/{}".format),
        with_optimizer=st.booleans(),
    ),
)


class Reference:
    """Answers of each request without a journal: the first word of an error, or the numbers."""

    def __init__(self) -> None:
        self.state: StandInModel = StandInBench().create(CREATE)
        self.saved: dict[str, tuple[str, str]] = {}
        self.answers: list[Any] = [None]

    def do(self, verb: TrainingVerb) -> None:
        self.answers.append(self._answer(verb))

    def _answer(self, verb: TrainingVerb) -> Any:
        if isinstance(verb, Pass):
            if "wrong" in verb.loss_settings:
                return "wrong"
            if "fails" in verb.loss_settings:
                return "ZeroDivisionError:"
            return self.state.forward_backward(verb).outputs[0]["logprobs"].tolist()
        if isinstance(verb, AdamStep):
            try:
                return self.state.step(verb).metrics["value"]
            except UserError:
                return "no"
        if isinstance(verb, SaveWeights):
            if verb.name in self.saved and not verb.overwrite:
                return "there"
            self.saved[verb.name] = (self.state.weights, self.state.optimizer)
            return f"tinker://m/weights/{verb.name}"
        assert isinstance(verb, LoadWeights)
        found = self.saved.get(verb.path[-1])
        if found is None:
            return "there"
        self.state.weights = found[0]
        self.state.optimizer = found[1] if verb.with_optimizer else "new"
        self.state.drop_gradients()
        return None


class Callers(RuleBasedStateMachine):
    """One model; requests in order, with at most one gap."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.runner.get_loop().set_exception_handler(lambda *_: None)
        self.reference = Reference()
        self.verbs: list[TrainingVerb] = [CREATE]
        self.start()
        self.submit(0)

    def start(self) -> None:
        self.disk = KillingDisk()
        self.host = HostedTraining(self.folder, StandInBench(), disk=self.disk, limits=LIMITS)
        self.run(self.host.open())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result; None if the process was killed meanwhile, and then there is a new one."""
        dead = asyncio.Event()
        loop = self.runner.get_loop()
        self.disk._on_kill = lambda: loop.call_soon_threadsafe(dead.set)  # type: ignore[assignment]

        if self.disk.killed:  # between two runs of the loop
            dead.set()

        async def until_killed() -> Any:
            tasks = [asyncio.create_task(work), asyncio.create_task(dead.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks[1].cancel()
            if not self.disk.killed:
                return await tasks[0]
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                with suppress(asyncio.CancelledError, Killed, Exception):
                    await task
            return None

        found = self.runner.run(until_killed())
        if self.disk.killed:
            self.host._thread.shutdown()
            if self.host._lock >= 0:
                os.close(self.host._lock)
            self.start()
        return found

    def submit(self, number: int) -> None:
        request = TrainingRequest(model="m", number=number, verb=self.verbs[number])

        async def submitted() -> bool:
            try:
                await self.host.submit(request)
            except UserError as error:
                assert "wrong" in str(error)
            return True

        while not self.run(submitted()):  # a client tries again
            pass

    def check(self, number: int) -> None:
        while (answer := self.run(self.host.result("m", number, wait_s=10))) is None:
            pass
        wanted = self.reference.answers[number]
        if answer.error is not None:
            assert answer.error.split()[0] == wanted
        elif answer.outputs:
            assert answer.outputs[0]["logprobs"].tolist() == wanted
        else:
            assert answer.metrics.get("value", answer.path) == wanted

    def add(self, verb: TrainingVerb) -> int:
        self.verbs.append(verb)
        self.reference.do(verb)
        return len(self.verbs) - 1

    @rule(verb=VERBS)
    def ask_for_one(self, verb: TrainingVerb) -> None:
        self.submit(self.add(verb))

    @rule(first=VERBS, second=VERBS)
    def ask_for_two_the_later_first(self, first: TrainingVerb, second: TrainingVerb) -> None:
        earlier, later = self.add(first), self.add(second)
        self.submit(later)
        if "wrong" not in getattr(second, "loss_settings", {}):
            with suppress(WaitTimeoutError):
                assert self.run(self.host.result("m", later, wait_s=0)) is None
        self.submit(earlier)

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        self.submit(data.draw(st.integers(0, len(self.verbs) - 1)))

    @rule(data=st.data())
    def ask_for_something_else_by_a_number_that_is_taken(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.verbs) - 1))
        other = replace(AdamStep(learning_rate=0.7), beta1=0.5)
        request = TrainingRequest(model="m", number=number, verb=other)

        async def submitted() -> bool:
            with pytest.raises(ConflictError):
                await self.host.submit(request)
            return True

        while not self.run(submitted()):
            pass

    @rule(data=st.data())
    def read_an_answer(self, data: st.DataObject) -> None:
        self.check(data.draw(st.integers(0, len(self.verbs) - 1)))

    @rule(points=st.integers(0, 30))
    def kill_soon(self, points: int) -> None:
        self.disk.kill_after(points)

    @rule()
    def restart(self) -> None:
        if self.run(self.host.close()) is None and self.host._serving is not None:
            return  # it was killed instead
        self.start()

    def teardown(self) -> None:
        try:
            for number in range(len(self.verbs)):
                self.check(number)
            self.disk._at = None
            self.run(self.host.close())
        finally:
            self.runner.close()
            shutil.rmtree(self.folder)


def test_callers_see_one_history() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Callers, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
