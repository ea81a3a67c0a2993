"""Dynamic sampling and greedy baselines through the mesh: what is dropped is written down, what is taken is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ActorConfig, AlgorithmConfig
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.ranks.world import World
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from .trainer_mesh import GROUP_SIZE, GROUPS, Mesh, mesh, save_model

BATCH = GROUPS * GROUP_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def dynamic(**changes: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"filter_groups": {"enable": True, **changes}})


async def train(made: Mesh, steps: int, prompts: int) -> int:
    feeding = asyncio.create_task(made.feed(prompts, close=True))
    try:
        return await made.train(steps)
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


async def test_groups_without_a_signal_leave_and_others_take_their_place(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        made.algorithm = dynamic()
        assert await train(made, 4, GROUPS * 40) == 4
        ledger = await queue.ledger("run")
        assert ledger.balanced and ledger.trained == 4 * BATCH
        dropped = ledger.filtered["equal_rewards"]
        assert dropped > 0 and dropped % GROUP_SIZE == 0
        lines = made.lines()
        assert sum(line.get("sampling/dropped_equal_rewards", 0) for line in lines) > 0
        for line in lines:
            # Every group of the batch has a gradient, at max_staleness 0 as well: refills are of the same version.
            assert line["batch/rows"] == BATCH and line["staleness/max"] == 0
            assert line["advantages/rows_in_equal_groups"] == 0


async def test_a_killed_run_with_refills_resumes_to_the_same_bits(
    model: Path, tmp_path: Path, world: World
) -> None:
    exports = []
    for name, kill_at in (("whole", None), ("killed", 3)):
        queue = await TransferQueue.open(MemoryStore())
        async with mesh(queue, model, tmp_path / name, world) as made:
            made.algorithm = dynamic()
            feeding = asyncio.create_task(made.feed(GROUPS * 60))
            made.sampler.fail_at = kill_at
            if kill_at:
                # Two batches of one step are settled, no checkpoint covers them: both come back.
                with pytest.raises(ConnectionError):
                    await made.train(4, save_freq=2)
                made.sampler.fail_at = None
            assert await made.train(4, save_freq=2) == 4
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            ledger = await queue.ledger("run")
            assert ledger.balanced and ledger.trained == 4 * BATCH
            exports.append((made.weights(), ledger.filtered["equal_rewards"]))
        await queue.close()
    (ours, dropped), (theirs, dropped_too) = exports
    assert dropped == dropped_too
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


async def test_oversampled_groups_leave_as_such(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world, batch_groups=8 * GROUPS) as made:
        made.algorithm = dynamic(oversample=8.0)
        assert await train(made, 1, GROUPS * 20) == 1
        filtered = (await queue.ledger("run")).filtered
        assert filtered["oversampled"] > 0 and filtered["oversampled"] % GROUP_SIZE == 0
        assert [line["batch/rows"] for line in made.lines()] == [BATCH]


async def test_prompts_that_are_never_worth_a_step_end_the_run_in_one_line(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        made.algorithm = dynamic(low=0.99, max_num_gen_batches=2)
        with pytest.raises(UserError, match="2 takes for step 1 and no group worth a step"):
            await train(made, 2, GROUPS * 40)
        assert (await queue.ledger("run")).balanced


async def test_a_metric_that_no_reward_reports_is_named(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        made.algorithm = dynamic(metric="luck")
        with pytest.raises(UserError, match=r"no reward component 'luck' \(it has: lucky\)"):
            await train(made, 1, GROUPS * 4)


async def test_the_data_may_end_in_the_middle_of_a_refill(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        made.algorithm = dynamic(max_num_gen_batches=0)
        await train(made, 99, GROUPS * 3)
        ledger = await queue.ledger("run")
        assert ledger.balanced and ledger.admitted == 3 * BATCH
        assert ledger.trained + ledger.filtered["equal_rewards"] == 3 * BATCH


async def test_the_greedy_row_of_each_prompt_is_its_baseline(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world, group_size=GROUP_SIZE + 1) as made:
        made.algorithm = AlgorithmConfig(adv_estimator="remax")
        made.actor = ActorConfig(optim=OptimConfig(lr=2e-2))
        assert await train(made, 8, GROUPS * 8) == 8
        ledger = await queue.ledger("run")
        # The greedy rows leave with their group, and are not in the loss.
        assert ledger.balanced and ledger.trained == 8 * GROUPS * (GROUP_SIZE + 1)
        lines = made.lines()
        assert {line["batch/rows"] for line in lines} == {BATCH}
        assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.1
