"""Batches of a real queue process as tensors: values, workers, ranks, kill -9."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from meshrl.client import ConflictError, FencedError, UserError, WaitTimeoutError
from meshrl.client.batches import Share
from meshrl.client.dataset import QueueDataset, _Turns
from meshrl.client.sync import Queue
from meshrl.contract.types import Batch, BatchRow, Outcome, Uid, Version

from .client_scenes import GROUP, fill, queue_process, spec

TASKS = 12


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with queue_process(tmp_path / "queue") as address:
        fill(address, TASKS)
        yield address


def test_a_batch_is_complete_groups_as_ragged_or_padded_tensors(address: str) -> None:
    with QueueDataset(address, run="run", groups=3, steps=1) as dataset:
        (batch,) = DataLoader(dataset, batch_size=None)
        tokens, lengths = batch["tokens"], [row.num_tokens for row in batch.rows]
        assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2]
        assert tokens.values.dtype == torch.int32
        assert tokens.lengths.tolist() == lengths
        assert tokens.offsets.tolist()[-1] == len(tokens.values) == sum(lengths)
        for row, values in zip(batch.rows, tokens.split(), strict=True):
            assert set(values.tolist()) == {int(row.group[1:])}
        padded = tokens.padded(-1)
        assert padded.shape == (6, max(lengths))
        for row, length, group in zip(padded.tolist(), lengths, batch.groups.tolist(), strict=True):
            assert row == [group] * length + [-1] * (max(lengths) - length)
        assert batch["reward"].values.tolist() == [0.0, 1.0] * 3


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_take_in_order_and_the_main_process_settles(
    address: str, context: str, workers: int
) -> None:
    with QueueDataset(address, run="run", groups=2) as dataset:
        loader = DataLoader(
            dataset, batch_size=None, num_workers=workers, multiprocessing_context=context
        )
        seen = []
        for batch in loader:
            seen.append((batch.step, [row.group for row in batch.rows]))
            dataset.settle(batch.step)
        names = [f"t{number:03}" for number in range(TASKS)]
        assert seen == [
            (step, [names[2 * step]] * GROUP + [names[2 * step + 1]] * GROUP) for step in range(6)
        ]
        with dataset.checkpoint() as step:
            assert step == 6
    with Queue.connect(address) as queue:
        assert queue.run("run").ledger().trained == TASKS * GROUP


def test_what_was_taken_ahead_and_not_settled_comes_again(address: str) -> None:
    with QueueDataset(address, run="run", groups=2) as dataset:
        loader = iter(DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=4))
        first = next(loader)
        dataset.settle(first.step)
        del loader
    with QueueDataset(address, run="run", groups=2, step=1) as resumed:
        groups = [[row.group for row in batch.rows] for batch in resumed]
    assert [part[0] for part in groups] == [f"t{number:03}" for number in range(2, TASKS, 2)]
    with pytest.raises(FencedError):
        dataset.settle(1)
    dataset.close()


def test_a_worker_that_is_killed_while_it_waits_for_its_turn_holds_no_other_up() -> None:
    turns = _Turns(0)
    waiting = multiprocessing.get_context("fork").Process(target=turns.wait, args=(1,))
    waiting.start()
    waiting.join(1)  # it waits by then; if not, this shows nothing
    waiting.kill()
    waiting.join()
    turns.pass_on(0)
    assert turns.wait(1)


def test_a_loop_after_one_that_waited_in_vain_gets_what_came_since(address: str) -> None:
    with Queue.connect(address) as queue:
        queue.open_run(spec("late"))
        with QueueDataset(address, run="late", groups=2, wait_s=0.01) as dataset:
            with pytest.raises(WaitTimeoutError):
                next(iter(dataset))
            fill(address, 2, run="late")
            assert [batch.step for batch in dataset] == [0]


def test_ranks_fetch_their_own_rows_of_one_batch(address: str) -> None:
    with QueueDataset(address, run="run", groups=4, share=Share(rank=0, world_size=2)) as first:
        share = Share(rank=1, world_size=2)
        with QueueDataset(
            address, run="run", groups=4, share=share, position=first.position
        ) as second:
            for one, other in zip(first, second, strict=True):
                uids = [row.uid for batch in (one, other) for row in batch.rows]
                assert len(set(uids)) == 4 * GROUP
                assert {row.group for row in one.rows}.isdisjoint(r.group for r in other.rows)
                second.settle(other.step)
                first.settle(one.step)
        with first.checkpoint() as step:
            assert step == TASKS / 4
    with Queue.connect(address) as queue:
        assert queue.run("run").ledger().trained == TASKS * GROUP


def test_a_rank_that_does_not_know_the_position_says_so(address: str) -> None:
    with pytest.raises(UserError, match="pass position="):
        QueueDataset(address, run="run", groups=2, share=Share(rank=1, world_size=2)).open()


def test_a_step_before_the_last_commit_is_refused(address: str) -> None:
    with QueueDataset(address, run="run", groups=2, steps=2) as dataset:
        for batch in dataset:
            dataset.settle(batch.step)
        with dataset.checkpoint():
            pass
    with pytest.raises(ConflictError, match="committed"):
        QueueDataset(address, run="run", groups=2, step=1).open()


def manifest(lengths: list[int]) -> Batch:
    rows = [
        BatchRow(
            uid=Uid("run", f"t{number // GROUP}", number % GROUP),
            group=f"t{number // GROUP}",
            group_size=GROUP,
            num_tokens=length,
            oldest=Version(0, 0),
            newest=Version(0, 0),
            outcome=Outcome.OK,
        )
        for number, length in enumerate(lengths)
    ]
    return Batch.of_rows(rows, batch_id="b", run="run", step=0)


@pytest.mark.parametrize("whole_groups", [True, False])
def test_shares_are_a_partition_balanced_by_tokens(whole_groups: bool) -> None:
    batch = manifest([100 + (37 * number) % 91 for number in range(64)])
    shares = [
        Share(rank=rank, world_size=4, whole_groups=whole_groups).rows_of(batch)
        for rank in range(4)
    ]
    assert sorted(row.uid for share in shares for row in share) == sorted(
        row.uid for row in batch.rows
    )
    loads = [sum(row.num_tokens for row in share) for share in shares]
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_a_rank_without_a_row_has_an_empty_share() -> None:
    batch = manifest([5, 5])
    shares = [Share(rank=rank, world_size=2).rows_of(batch) for rank in range(2)]
    assert [len(share) for share in shares] == [2, 0]


def test_a_killed_trainer_resumes_without_loss_or_repetition(address: str, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("foreign_trainer.py"))

    def train(die_at: int) -> int:
        command = [sys.executable, script, address, str(tmp_path), "2", str(die_at)]
        return subprocess.run(command, timeout=120).returncode

    # In the middle of step 3, whose checkpoint is of step 2; then between the save of step 4 and its commit.
    assert train(3) == -signal.SIGKILL
    assert train(4 - 100) == -signal.SIGKILL
    assert train(10**6) == 0
    learned = json.loads((tmp_path / "model.json").read_text())["learned"]
    counts = Counter(uid for step in learned for uid in step)
    assert len(counts) == TASKS * GROUP
    assert set(counts.values()) == {1}
    with Queue.connect(address) as queue:
        ledger = queue.run("run").ledger()
    assert ledger.balanced
    assert (ledger.trained, ledger.resident.get("settled", 0)) == (TASKS * GROUP, 0)


def test_the_sync_client_works_inside_a_running_event_loop(address: str) -> None:
    async def inside() -> int:
        with Queue.connect(address) as queue:
            return queue.run("run").ledger().admitted

    assert asyncio.run(inside()) == TASKS * GROUP
