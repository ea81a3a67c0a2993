from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.contract.errors import FencedError, InfraError, UnavailableError, UserError
from meshrl.contract.types import Columns, TrainerPhase, Uid, Version
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.config import ActorConfig, AlgorithmConfig
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.model.policy import load_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from .trainer_mesh import GROUP_SIZE, GROUPS, VOCABULARY, mesh, save_model

BATCH = GROUPS * GROUP_SIZE
PLACEHOLDER = VOCABULARY
"""A token that nobody samples."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


async def test_a_policy_learns_and_every_row_is_accounted_for(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        feeding = asyncio.create_task(made.feed(GROUPS * 12, close=True))
        assert await made.train(12, save_freq=5, max_ckpt_to_keep=1) == 12
        await feeding
        lines = made.lines()
        assert [line["step"] for line in lines] == list(range(1, 13))
        assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.2
        assert {line["staleness/max"] for line in lines} == {0}
        # On-policy in float32: the trainer's log-probs are the sampler's.
        assert max(line["mismatch/logprob_abs_max"] for line in lines) < 1e-4
        assert made.sampler.published == [Version(1, step) for step in range(13)]
        ledger = await queue.ledger("run")
        assert ledger.balanced and ledger.trained == ledger.admitted == 12 * BATCH
        assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1


def louder(model: Path, target: Path) -> Path:
    """The same with embeddings far from 0: a random model's are so small that no adapter could sharpen its logits."""
    hf = load_hf(model)
    with torch.no_grad():
        hf.get_output_embeddings().weight.mul_(20.0)
    hf.save_pretrained(target)
    return target


async def test_lora_learns_resumes_and_serves_what_it_exports(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, louder(model, tmp_path / "model"), tmp_path, world) as made:
        made.changes = {"lora_rank": 4, "lora_alpha": 8}
        feeding = asyncio.create_task(made.feed(GROUPS * 12, close=True))
        assert await made.train(6) == 6
        assert await made.train(12) == 12
        await feeding
        lines = made.lines()
        assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.2
        # The sampler has merged weights, the trainer adapters beside them: the same policy.
        assert max(line["mismatch/logprob_abs_max"] for line in lines) < 1e-4
        served = made.sampler._hf.state_dict()
        exported = made.weights()
        assert all(torch.equal(served[name], exported[name]) for name in exported)
        assert (await queue.ledger("run")).trained == 12 * BATCH


async def test_the_served_weights_are_the_exported_ones(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        await made.feed(GROUPS)
        await made.train(1)
        served = made.sampler._hf.state_dict()
        exported = made.weights()
        assert all(torch.equal(served[name], exported[name]) for name in exported)


async def test_a_killed_run_resumes_to_the_same_bits_as_an_uninterrupted_one(
    model: Path, tmp_path: Path, world: World
) -> None:
    exports = []
    for name, kill_at in (("whole", None), ("killed", 4)):
        queue = await TransferQueue.open(MemoryStore())
        async with mesh(queue, model, tmp_path / name, world) as made:
            feeding = asyncio.create_task(made.feed(GROUPS * 6, close=True))
            made.sampler.fail_at = kill_at
            if kill_at:
                # The step is settled, the version never reaches the fleet: the widest gap to fall into.
                with pytest.raises(ConnectionError):
                    await made.train(6, save_freq=2)
                made.sampler.fail_at = None
            assert await made.train(6, save_freq=2) == 6
            await feeding
            ledger = await queue.ledger("run")
            assert ledger.balanced and ledger.trained == 6 * BATCH
            assert [line["step"] for line in made.lines()] == list(range(1, 7))
            # Each row is logged once, as it was trained: what the killed trainer wrote of later steps is gone.
            logged = [made.logged(f"step-{step}.parquet") for step in range(1, 7)]
            assert len({row["uid"] for rows in logged for row in rows}) == 6 * BATCH
            for line, rows in zip(made.lines(), logged, strict=True):
                assert sum(r["reward"] for r in rows) / BATCH == pytest.approx(line["reward/mean"])
                for source in ("s0", "s1"):
                    of_it = [r["reward"] for r in rows if r["data_source"] == source]
                    assert len(of_it) == line[f"source/{source}/rows"] == BATCH / 2
                    mean = sum(of_it) / len(of_it)
                    assert mean == pytest.approx(line[f"source/{source}/reward"])
            if kill_at:
                assert [rows[0]["epoch"] for rows in logged] == [1, 1, 2, 2, 2, 2]
            exports.append(made.weights())
        await queue.close()
    assert all(torch.equal(exports[0][name], exports[1][name]) for name in exports[0])


class LeavingQueue:
    """For a trainer's calls gone for ever, from one call of one step on."""

    def __init__(self, queue: TransferQueue, method: str, step: int) -> None:
        self._queue, self._method, self._step = queue, method, step
        self.gone = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._queue, name)
        if name not in {
            "take",
            "fetch_rows",
            "filter",
            "settle",
            "commit",
            "ledger",
            "why_waiting",
        }:
            return method

        async def call(*args: Any, **options: Any) -> Any:
            batches = self._queue._run("run").batches.values()
            step = max((batch.step + batch.settled for batch in batches), default=0)
            if name == self._method and options.get("step", step) == self._step:
                self.gone.set()
            # A commit runs beside the next step, whose rows have been read by then, those for the log too.
            if self.gone.is_set() and (self._method, name) != ("commit", "fetch_rows"):
                raise UnavailableError("queue at nowhere cannot be reached")
            return await method(*args, **options)

        return call


@pytest.mark.parametrize(
    ("method", "drains"),
    [("take", False), ("fetch_rows", True), ("settle", True), ("settle", False), ("commit", True)],
)
async def test_a_trainer_saves_without_the_queue_and_nothing_is_trained_again(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World, method: str, drains: bool
) -> None:
    """As when an engine stops both at once, or the queue stays away for longer than calls wait."""
    async with mesh(queue, model, tmp_path, world) as made:
        feeding = asyncio.create_task(made.feed(GROUPS * 4, close=True))
        made.queue = leaving = LeavingQueue(queue, method, step=2)  # type: ignore[assignment]
        async with made.trainer(4, save_freq=2, max_ckpt_to_keep=1) as trainer:
            running = asyncio.create_task(trainer.run())
            await leaving.gone.wait()
            if drains:
                trainer.drain()
                await running
                assert trainer.drained
            else:
                with pytest.raises(UnavailableError, match="cannot be reached"):
                    await running
        saved = 3 if method == "settle" else trainer.step  # a commit fails beside a step
        assert trainer.step == saved
        made.queue = queue
        assert await made.train(4, save_freq=2) == 4
        await feeding
        ledger = await queue.ledger("run")
        assert ledger.balanced and ledger.trained == 4 * BATCH
        logged = [made.logged(f"step-{step}.parquet") for step in range(1, 5)]
        assert len({row["uid"] for rows in logged for row in rows}) == 4 * BATCH
        assert [rows[0]["epoch"] for rows in logged] == [1] * saved + [2] * (4 - saved)


async def test_the_run_ends_with_the_data_and_a_shorter_last_batch(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        feeding = asyncio.create_task(made.feed(GROUPS + 1, close=True))
        assert await made.train(None) == 2
        await feeding
        assert [line["batch/rows"] for line in made.lines()] == [BATCH, GROUP_SIZE]
        assert (await queue.ledger("run")).trained == (GROUPS + 1) * GROUP_SIZE


async def test_a_drained_trainer_saves_and_the_next_one_goes_on(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        await made.feed(GROUPS)
        async with made.trainer(3) as trainer:
            running = asyncio.create_task(trainer.run())
            async for status in trainer.status.watch(10.0):
                if status.step == 1 and status.phase is TrainerPhase.WAITING:
                    trainer.drain()
            assert (await running).step == 1 and trainer.drained
        assert (await queue.run_state("run")).committed_step == 1
        assert not (tmp_path / "export").exists()
        feeding = asyncio.create_task(made.feed(GROUPS * 2, GROUPS, close=True))
        assert await made.train(3) == 3
        await feeding


class SlowToCommit(TransferQueue):
    """Answers the commit of step 2 only when step 4 was settled."""

    settled: asyncio.Event

    async def settle(self, run: str, *args: Any, **named: Any) -> None:
        await super().settle(run, *args, **named)
        if named.get("step") == 3:
            self.settled.set()

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        if step == 2:
            await self.settled.wait()
        await super().commit(run, epoch=epoch, step=step)


class Mangles(TransferQueue):
    """Gives one row out mangled: with a mask of two tokens, or `place` in its prompt."""

    mangled: Uid | None = None
    place: int | None = None

    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        found = [dict(row) for row in await super().fetch_rows(run, uids, columns)]
        if "loss_mask" in columns and uids[0].run == "run":
            self.mangled = self.mangled or uids[-1]
            for uid, row in zip(uids, found, strict=True):
                if uid == self.mangled and self.place is None:
                    row["loss_mask"] = row["loss_mask"][:2]
                elif uid == self.mangled:
                    row["tokens"] = np.where(
                        np.arange(len(row["tokens"])) == 1, self.place, row["tokens"]
                    ).astype(np.int32)
        return found


async def mangled_row(
    queue: Mangles, model: Path, tmp_path: Path, world: World, reader: VisionReader | None = None
) -> str:
    """Train two steps, of which one row is mangled; why that became a dead letter."""
    async with mesh(queue, model, tmp_path, world) as made:
        made.reader = reader
        feeding = asyncio.create_task(made.feed(GROUPS * 2, close=True))
        assert await made.train(None) == 2
        await feeding
        ledger = await queue.ledger("run")
        assert ledger.balanced and ledger.trained == 2 * BATCH - GROUP_SIZE
        (letter, *_) = await queue.dead_letters("run")
    await queue.close()
    return letter.reason


async def test_a_row_that_cannot_be_put_together_is_a_dead_letter_and_the_rest_is_trained(
    model: Path, tmp_path: Path, world: World
) -> None:
    queue = await Mangles.open(MemoryStore())
    reason = await mangled_row(queue, model, tmp_path, world)
    assert "column loss_mask has 2 entries, tokens" in reason


async def test_a_row_whose_pictures_are_not_those_of_its_tokens_is_a_dead_letter(
    model: Path, tmp_path: Path, world: World
) -> None:
    reads = {"image_token_id": PLACEHOLDER, "vision_config": {"spatial_merge_size": 2}}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
    for name, text in (
        ("config", {"model_type": "qwen3_vl", **reads}),
        ("preprocessor_config", processor),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(text))
    queue = await Mangles.open(MemoryStore())
    queue.place = PLACEHOLDER
    reader = VisionReader(tmp_path, load_hf(model))
    reason = await mangled_row(queue, model, tmp_path, world, reader)
    assert "its prompt has 1 places for pictures that it does not have" in reason


async def test_training_goes_on_while_a_checkpoint_is_written(
    model: Path, tmp_path: Path, world: World
) -> None:
    queue = await SlowToCommit.open(MemoryStore())
    queue.settled = asyncio.Event()
    async with mesh(queue, model, tmp_path, world) as made:
        feeding = asyncio.create_task(made.feed(GROUPS * 4, close=True))
        assert await made.train(4, save_freq=2) == 4
        await feeding
        ledger = await queue.ledger("run")
        assert ledger.balanced and ledger.trained == 4 * BATCH
    await queue.close()


async def test_a_checkpoint_that_cannot_be_written_ends_training_in_one_line(
    queue: TransferQueue,
    model: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_directory(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOTDIR, "Not a directory")

    async with mesh(queue, model, tmp_path, world) as made:
        monkeypatch.setattr(checkpoint, "write_tensors", no_directory)
        feeding = asyncio.create_task(made.feed(GROUPS * 2))
        # No batch for step 3 will ever come: the failed write has to end the wait for it.
        with pytest.raises(InfraError, match="cannot write the checkpoint of step 2"):
            await made.train(4, save_freq=2)
        await feeding
        assert (await queue.run_state("run")).committed_step == 0


async def test_a_wait_in_vain_names_what_blocks(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made, made.trainer(1) as trainer:
        running = asyncio.create_task(trainer.run())
        async for status in trainer.status.watch(10.0):
            if status.waiting_for:
                trainer.drain()
        await running


async def test_a_trainer_that_was_replaced_ends_fenced(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made, made.trainer(3) as trainer:
        running = asyncio.create_task(trainer.run())
        await queue.acquire("run", "another")
        feeding = asyncio.create_task(made.feed(GROUPS))
        with pytest.raises(FencedError):
            await running
        await feeding
        assert trainer.status.status().phase is TrainerPhase.FAILED


async def test_checkpoints_behind_the_queue_are_refused_in_one_line(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        await made.feed(GROUPS)
        await made.train(1)
        with pytest.raises(UserError, match="has committed step 1 to the queue, but no checkpoint"):
            await made.train(2, resume_mode="disable")


async def test_held_out_prompts_go_through_the_mesh_and_their_ledger_balances(
    queue: TransferQueue, model: Path, tmp_path: Path, world: World
) -> None:
    async with mesh(queue, model, tmp_path, world) as made:
        feeding = asyncio.create_task(made.feed(GROUPS * 3, close=True))
        await made.train(3, held_out=5, test_freq=2)
        await feeding
        scores = [(line["step"], line["val/tasks"]) for line in made.lines() if "val/tasks" in line]
        assert scores == [(0, 5), (2, 5), (3, 5)]
        ledger = await queue.ledger("run.eval")
        assert ledger.balanced and ledger.trained == ledger.admitted == 15
        for step in (0, 2, 3):
            rows = made.logged(f"eval-{step}.parquet")
            assert [row["task"] for row in rows] == [f"1.{step}-{task}" for task in range(5)]
            line = next(line for line in made.lines() if line.get("val/version") == f"1.{step}")
            assert sum(r["reward"] for r in rows) / 5 == pytest.approx(line["val/score/mean"])
            assert (line["val/source/s0/rows"], line["val/source/s1/rows"]) == (3, 2)
            means = (line["val/source/s0/score"], line["val/source/s1/score"])
            assert 0.6 * means[0] + 0.4 * means[1] == pytest.approx(line["val/score/mean"])


@pytest.mark.parametrize(
    ("algorithm", "actor"),
    [
        ({"use_kl_in_reward": True}, {}),
        ({}, {"use_kl_loss": True, "entropy_coeff": 0.01}),
        (
            {"rollout_correction": {"rollout_is": "token"}},
            {"ppo_epochs": 2, "ppo_mini_batch_size": 2},
        ),
    ],
)
async def test_every_term_of_the_objective_trains(
    queue: TransferQueue,
    model: Path,
    tmp_path: Path,
    world: World,
    algorithm: dict[str, object],
    actor: dict[str, object],
) -> None:
    needs_reference = bool(algorithm.get("use_kl_in_reward") or actor.get("use_kl_loss"))
    async with mesh(queue, model, tmp_path, world, reference=needs_reference) as made:
        made.algorithm = AlgorithmConfig.model_validate(algorithm)
        made.actor = ActorConfig.model_validate({"optim": OptimConfig(lr=1e-2), **actor})
        feeding = asyncio.create_task(made.feed(GROUPS * 2, close=True))
        assert await made.train(2) == 2
        await feeding
        last = made.lines()[-1]
        assert last["actor/grad_norm"] > 0
        if needs_reference:
            # After one step the policy has left the reference: the KL terms see it.
            assert last["reward/kl" if algorithm else "actor/kl_loss"] != 0
