"""A row that no step can be computed from leaves as a dead letter, with its reason; the step has the others."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from torch.distributed import DistBackendError

from meshrl.contract.errors import InfraError, PartFailedError
from meshrl.contract.types import Columns, GroupPolicy, Uid
from meshrl.trainer.config import AlgorithmConfig
from meshrl.trainer.learner.experience import Schedule
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.ranks.world import World
from meshrl.transferqueue.queue import TransferQueue

from .trainer_mesh import GROUP_SIZE, GROUPS, VOCABULARY, mesh, save_model

BATCH = GROUPS * GROUP_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


class Changes:
    """Gives a trainer one row's column as it must not be: it came in before anybody looked, or in another way."""

    def __init__(self, queue: TransferQueue, column: str, change: Callable[[Any], Any]) -> None:
        self._queue = queue
        self._column = column
        self._change = change
        self.changed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        found: list[Mapping[str, Any]] = list(await self._queue.fetch_rows(run, uids, columns))
        for at, uid in enumerate(uids):
            if (
                uid.task == "000001"
                and (uid.index, uid.attempt) == (2, 0)
                and self._column in columns
            ):
                value = self._change(found[at][self._column].copy())
                found[at] = {**found[at], self._column: value}
                self.changed.add(str(uid))
        return found


def holding(at: int, value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[at] = value
        return array

    return change


def text(said: str) -> Callable[[Any], Any]:
    return lambda array: np.frombuffer(said.encode(), np.uint8)


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        ("loss_mask", holding(5, 7), "column loss_mask holds 7 at 5, want 0 or 1"),
        ("loss_mask", holding(0, 1), "column loss_mask holds 1 at 0, where a sequence begins"),
        ("tokens", holding(-1, VOCABULARY), f"column tokens holds {VOCABULARY} at "),
        ("tokens", holding(5, -1), f"column tokens holds -1 at 5, want 0 to {VOCABULARY - 1}"),
        ("tokens", lambda array: array[:-1], "column spans holds [1, 0, 4, "),
        ("rollout_logprobs", holding(-1, np.nan), "column rollout_logprobs holds nan"),
        ("reward", holding(0, np.inf), "column reward holds inf at 0"),
        ("reward_components", text("{"), "column reward_components holds '{'"),
        ("replica", lambda array: np.array([0xFF], np.uint8), "column replica is no UTF-8 text"),
    ],
)
async def test_a_row_that_nothing_can_be_computed_from_costs_its_group_and_no_training(
    queue: TransferQueue,
    model: Path,
    tmp_path: Path,
    world: World,
    column: str,
    change: Callable[[Any], Any],
    said: str,
) -> None:
    async with mesh(queue, model, tmp_path, world, max_staleness=2.0) as made:
        feeding = asyncio.create_task(made.feed(GROUPS * 2, close=True))
        made.queue = changes = Changes(queue, column, change)  # type: ignore[assignment]
        assert await made.train(None) == 2
        await feeding
        ledger = await queue.ledger("run")
        assert ledger.balanced and ledger.admitted == 2 * BATCH
        assert ledger.trained == 2 * BATCH - GROUP_SIZE
        assert ledger.filtered == {"group_incomplete": GROUP_SIZE - 1}
        (letter,) = await queue.dead_letters("run")
        assert {str(letter.uid)} == changes.changed
        assert letter.reason.startswith(f"cannot be trained on: row {letter.uid}: ")
        assert said in letter.reason
        assert made.lines()[0]["batch/rows"] == BATCH - GROUP_SIZE


async def test_a_row_that_nothing_can_be_computed_from_is_replaced_where_the_run_says_so(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    policy = {"group_policy": GroupPolicy.REPLACE_SIBLING}
    async with mesh(queue, model, tmp_path, world, max_staleness=2.0, **policy) as made:
        feeding = asyncio.create_task(made.feed(GROUPS * 2, close=True))
        made.queue = Changes(queue, "loss_mask", holding(5, 7))  # type: ignore[assignment]
        await made.train(None)
        await feeding
        ledger = await queue.ledger("run")
        assert ledger.balanced and ledger.trained == 2 * BATCH
        assert sum(ledger.dead_lettered.values()) == 1 and not ledger.filtered


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("split_with_sizes"), 1),
        (IndexError("index out of range in self"), 1),
        (InfraError("rank 0 of 2: a peer rank is gone"), 0),
        (DistBackendError("NCCL error: unhandled system error"), 0),
        (OSError(errno.ENOSPC, "No space left on device"), 0),
    ],
)
async def test_the_queue_hears_of_failures_that_may_be_of_the_rows(
    error: Exception, told: int
) -> None:
    """If a rank was killed, errors of the others are no reason to give rows up."""
    source = AsyncMock()
    trainer = Mock(_source=source, _state=Mock(epoch=3), _settings=Mock(batch_groups=1))
    with pytest.raises(type(error)):
        async with Trainer._telling_of_parts(trainer, Mock(groups=[Mock()])):
            raise error
    assert source.tell_of_failure.await_count == told


@pytest.mark.parametrize("filters", [False, True])
async def test_what_trainers_die_of_is_found_and_the_run_goes_on(
    queue: TransferQueue,
    model: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    filters: bool,
) -> None:
    """Neither the queue nor the trainer knows what is wrong with the row."""
    learn, deadly = Learner.learn, list[str]()

    def fails(self: Learner, schedule: Schedule, *rest: Any) -> Any:
        tasks = [row.uid.task for row in schedule.rows]
        deadly[:] = deadly or [tasks[GROUP_SIZE]]  # one of the first batch
        if deadly[0] in tasks:
            raise RuntimeError("split_with_sizes")
        return learn(self, schedule, *rest)

    monkeypatch.setattr(Learner, "learn", fails)
    errors: list[type[Exception]] = []
    async with mesh(queue, model, tmp_path, world, max_staleness=9.0) as made:
        if filters:  # takes others for groups of equal rewards, and never beside those that trainers died with
            made.algorithm = AlgorithmConfig.model_validate({"filter_groups": {"enable": True}})
        feeding = asyncio.create_task(made.feed(GROUPS * 3, close=True))
        steps = None
        while steps is None and len(errors) < 9:
            try:
                steps = await made.train(None, save_freq=1)
            except Exception as error:
                errors.append(type(error))
        await feeding
    # With all four groups, with two of them, and twice alone.
    assert errors == [RuntimeError, RuntimeError, PartFailedError, PartFailedError, PartFailedError]
    ledger = await queue.ledger("run")
    equal = ledger.filtered.get("equal_rewards", 0)
    assert ledger.balanced and ledger.trained == 3 * BATCH - GROUP_SIZE - equal
    (letter,) = await queue.dead_letters("run")
    assert letter.uid.task == deadly[0]
    assert letter.reason == (
        "cannot be trained on: twice its step failed: RuntimeError: split_with_sizes"
    )
