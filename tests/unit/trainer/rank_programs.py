"""Functions that ranks run, alone or together, with JSON for arguments: `ranks.run("snapshot", …)` runs one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from meshrl.config.loading import Written
from meshrl.contract.errors import InfraError
from meshrl.contract.ports import Queue, WeightSource
from meshrl.contract.rows import reward_write, rollout_write
from meshrl.contract.types import Batch, Columns, Outcome, Score, Uid, Version
from meshrl.launcher.address_book import free_port
from meshrl.trainer.checkpoint import checkpoint, export
from meshrl.trainer.checkpoint.async_checkpointer import AsyncCheckpointer
from meshrl.trainer.config import ModelConfig, ParallelConfig, TrainerConfig
from meshrl.trainer.learner.beside import build_critic
from meshrl.trainer.loop.context import RunContext, TrainerSettings
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.model.policy import build_policy, load_hf, open_hf
from meshrl.trainer.model.snapshot import take_snapshot
from meshrl.trainer.offline import dpo, sft
from meshrl.trainer.offline.config import DpoConfig, SftConfig
from meshrl.trainer.offline.loop import OfflineProgress
from meshrl.trainer.ranks import world as ranks_world
from meshrl.trainer.ranks.peers import Peers, Seat, came
from meshrl.trainer.ranks.world import Compute, World
from meshrl.trainer.reference.model import ReferenceModel
from tests.doubles.equality import TRAININGS, differences
from tests.doubles.equality import train as train_by_table
from tests.unit.trainer import named_algorithms, rank_work, tiny


@contextmanager
def joined(parallel: Mapping[str, int] | None = None) -> Iterator[World]:
    """The world of these ranks, which they leave with their processes: see `ranks.start`."""
    yield World.start("cpu", ParallelConfig.model_validate(parallel or {}))


def train(
    model: str, target: str, rows: int, steps: int, parallel: Mapping[str, int], top: int
) -> None:
    """Train up to so many steps; count reductions of gradients and backward passes."""
    reductions: list[object] = []
    add_up = DefaultReduceScatter.__call__

    def counted(self: DefaultReduceScatter, *args: Any, **options: Any) -> Any:
        reductions.append(self)
        return add_up(self, *args, **options)

    passes: list[object] = []
    backward: Any = torch.Tensor.backward

    def passed(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        passes.append(self.shape)
        return backward(self, *args, **options)

    with joined(parallel) as world:
        DefaultReduceScatter.__call__ = counted  # type: ignore[method-assign]
        torch.Tensor.backward = passed  # type: ignore[method-assign]
        numbers = rank_work.train(Path(model), Path(target), world, rows, steps, top)
        if world.is_main:
            Path(target, "reductions").write_text(f"{len(reductions)} {len(passes)}")
            Path(target, "numbers").write_text(" ".join(map(repr, numbers)))


def algorithms(model: str, target: str, names: list[str]) -> None:
    """Take one step of the named algorithms given."""
    found = {}
    with joined() as world:
        for name in names:
            recipe = named_algorithms.recipe_of(name, Path(model), *named_algorithms.GRADIENTS)
            learner = named_algorithms.learner_of(recipe, world)
            rows = named_algorithms.trajectories(recipe, Path(model))
            named_algorithms.learn(learner, recipe, rows)
            found[name] = named_algorithms.weights(learner)
        if world.is_main:
            torch.save(found, target)


def finetune(config: dict[str, Any]) -> None:
    sft.run(SftConfig.model_validate(config))


def snapshot(model: str, parallel: Mapping[str, int], bucket_bytes: int) -> None:
    """Print the collectives of a gather, and the tensors that differ from what each gathers to alone."""
    path = Path(model)
    with joined(parallel) as world:
        policy = build_policy(open_hf(path), world, ModelConfig(path=path))
        with CommDebugMode() as one_by_one:
            alone = {
                name: weight.whole(torch.bfloat16) for name, weight in policy.published_weights()
            }
        with CommDebugMode() as together:
            sent = take_snapshot(
                policy,
                world,
                run="r",
                version=Version(1, 1),
                dtype="bfloat16",
                bucket_bytes=bucket_bytes,
            )
        if sent is not None:
            wrong, stored = 0, load_file(path / "model.safetensors")
            for spec in sent.manifest.tensors:
                held = sent.bucket(spec.bucket)[spec.offset : spec.offset + spec.nbytes].copy()
                found = torch.from_numpy(held).view(torch.bfloat16).view(spec.shape)
                wrong += not torch.equal(found, alone[spec.name])
                wrong += not torch.equal(found, stored.get(spec.name, found).to(found.dtype))
            buckets, counts = len(sent.manifest.bucket_bytes), (together, one_by_one)
            print(buckets, *(each.get_total_counts() for each in counts), wrong, len(alone))


def beside_one(folder: str, layouts: Sequence[Mapping[str, int]]) -> None:
    """Take steps of the table of equality in every layout, beside the same by one rank."""
    wanted = torch.load(Path(folder, "alone.pt"))
    with joined():
        for layout in layouts:
            world = World.start("cpu", ParallelConfig.model_validate(layout))
            trained = train_by_table(Path(folder, "model"), world, TRAININGS["AdamW"])
            found = differences(trained, wanted)
            if world.is_main:
                with Path(folder, "found").open("a") as file:
                    file.write(json.dumps([layout, found]) + "\n")


class Counted:
    """xxh3-128 that counts what it is given."""

    bytes = 0

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, block: bytes) -> None:
        Counted.bytes += len(block)
        self._digest.update(block)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class Counting:
    """The module `xxhash`, as far as checkpoints use it."""

    xxh3_128 = Counted


def hash_checkpoints(model: str, root: str) -> None:
    """Save twice and look for the newest checkpoint, the last one damaged.

    Each rank prints the bytes that it hashed while it saved and while it loaded, and the step that it found.
    """
    with joined() as world:
        learner = rank_work.make(Path(model), world)
        checkpoint.xxhash = Counting  # type: ignore[assignment, attr-defined]
        state = rank_work.state(1, world_size=2)
        parts = learner.policy, learner.optimizers
        path = checkpoint.save(Path(root), *parts, state, world, keep=2)
        saving, Counted.bytes = Counted.bytes, 0
        checkpoint.load(checkpoint.newest(Path(root), world)[0], *parts)  # type: ignore[index]
        loading = Counted.bytes
        later = rank_work.state(2, world_size=2)
        path = checkpoint.save(Path(root), *parts, later, world, keep=2)
        if world.is_main:
            victim = path / "tensors" / "__1_0.distcp"
            victim.write_bytes(victim.read_bytes()[:-1] + b"?")
        world.barrier()
        found = checkpoint.newest(Path(root), world)
        assert found is not None
        print(f"{saving} {loading} {found[1].step}\n", end="", flush=True)


def read_by_dcp_alone(model: str, folder: str, expected: str) -> None:
    """Fill shards of a model by torch's DCP as it is, and compare them with the whole."""
    with joined() as world:
        policy, _ = rank_work.fresh(Path(model), world)
        fill(policy, 0)
        state = {"model": get_model_state_dict(policy)}
        state_dict_loader.load(state, checkpoint_id=folder)
        set_model_state_dict(policy, state["model"])
        wanted = torch.load(expected, weights_only=True)
        found = rank_work.weights(policy)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        print("the same\n", end="", flush=True)


def noted(file: Path, _: None) -> None:
    """Leave the number of the rank that has written a file beside it."""
    file.with_suffix(".rank").write_text(os.environ["RANK"])


def load_and_export(path: str, parallel: Mapping[str, int]) -> None:
    """Read a model by shards, compare it with the whole, and export it."""
    model = Path(path)
    with joined(parallel) as world:
        whole, empty = load_hf(model), open_hf(model)
        assert all(tensor.is_meta for tensor in empty.state_dict().values())
        policy = build_policy(empty, world, ModelConfig(path=model))
        own = dict(policy.hf.named_parameters()) | dict(policy.hf.named_buffers())
        stored = dict(whole.named_parameters()) | dict(whole.named_buffers())
        assert own.keys() == stored.keys()
        for name, tensor in stored.items():
            found = own[name].full_tensor() if isinstance(own[name], DTensor) else own[name]
            assert torch.equal(found, tensor), name
        critic = build_critic(open_hf(model), world, ModelConfig(path=model))
        assert not any(parameter.is_meta for parameter in critic.parameters())
        local = sum(p.to_local().numel() for p in policy.parameters() if isinstance(p, DTensor))
        print(world.rank, local, sum(parameter.numel() for parameter in whole.parameters()))
        export.SHARED_OUT = 1000
        export.save_file = lambda own, file, about: noted(file, save_file(own, file, about))
        export.export_policy(policy, world, model.with_name("export"), tokenizer=model)


async def _compare(model: ReferenceModel, alone: ReferenceModel) -> None:
    for count, top, temperature in ((9, 3, 0.7), (1, 0, 1.0), (2, 2, 1.0)):
        await asyncio.to_thread(model._ranks.idle)
        rows = tiny.rows(count)
        found = await model.judged(rows, temperature=temperature, top=top)
        wanted = await alone.judged(rows, temperature=temperature, top=top)
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.keys() == theirs.keys()
            for name, column in theirs.items():
                assert mine[name].dtype == column.dtype
                np.testing.assert_array_equal(mine[name], column)


def reference(path: str) -> None:
    """Answer by a reference over several ranks as one in one process does."""
    with joined() as world:
        for deterministic in (True, False):
            how = {"device": "cpu", "max_tokens": 60, "deterministic": deterministic}
            model = ReferenceModel(Path(path), world=world, **how)
            policy = model._policy
            assert all(isinstance(each, DTensor) for each in policy.parameters())
            if world.is_main:
                alone = ReferenceModel(Path(path), **how)
                asyncio.run(_compare(model, alone))
                alone.close()
                model.close()
            else:
                model.follow()
            # None is whole.
            assert all(isinstance(each, DTensor) for each in policy.parameters())


def listen() -> None:
    """Print the addresses at which ranks listen."""
    from listening import addresses

    with joined() as world:
        world.barrier()
        print(*sorted(addresses()), flush=True)
        world.barrier()


LONGEST_S = 0.25


class Committed:
    """The queue's end of a commit: a line in a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        os.write(self._pipe, f"{step}\n".encode())


async def save_for_ever(model: Path, root: Path, pipe: int) -> None:
    world = World.start("cpu")
    learner = rank_work.make(model, world)
    settings = TrainerSettings(
        run="r", directory=root, owner="test", seed=0, trainer=TrainerConfig(),
        tokenizer=model, batch_groups=1, group_size=1, total_steps=None,
    )  # fmt: skip
    context = RunContext(
        settings=settings, queue=cast(Queue, Committed(pipe)), learner=learner,
        compute=Compute(world.device),
    )  # fmt: skip
    checkpointer = AsyncCheckpointer(context, step=0)
    await checkpointer.open()
    for step in range(1, 10_000):
        fill(learner.policy, step)
        await checkpointer.begin(rank_work.state(step, world_size=world.size))
        # The next step changes the weights while this one's are on their way to the disk.
        fill(learner.policy, -step)


@torch.no_grad()
def fill(policy: torch.nn.Module, value: float) -> None:
    for parameter in policy.parameters():
        parameter.fill_(value)


def round_of(model: Path, root: Path, ranks: int, draw: random.Random) -> int:
    """Kill every rank at a random moment after a first commit; the last step that was committed."""
    reading, writing = os.pipe()
    port = str(free_port("127.0.0.1"))
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            )  # fmt: skip
            try:
                asyncio.run(save_for_ever(model, root, writing))
            finally:
                os._exit(1)
        children.append(child)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        committed = int(pipe.readline())
        time.sleep(draw.uniform(0.0, LONGEST_S))
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        return max([committed, *(int(line) for line in pipe if line.endswith("\n"))])


def save_and_die(model: str, target: str, ranks: int, rounds: int) -> None:
    draw = random.Random(ranks)
    for number in range(rounds):
        committed = round_of(Path(model), Path(target, str(number)), ranks, draw)
        print(number, committed, flush=True)


def dpo_that_is_killed(recipe: str, step: int) -> None:
    """Learning from preferences, whose process is killed in this step."""

    def report(progress: OfflineProgress) -> None:
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        dpo.run(Written.read(Path(recipe), ()).as_config(DpoConfig), report)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


STEPS = 2
PUBLISH_S = 1.5


class SameBatch:
    """The queue, as far as the loop asks it: each step trains on the same rows."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self._rows = rank_work.trajectories()

    async def take(self, run: str, *, step: int, **given: object) -> Batch:
        rows = rank_work.batch(self._rows).rows
        return Batch.of_rows(rows, batch_id=str(given["batch_id"]), run=run, step=step)

    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        by_uid = {row.uid: row for row in self._rows}
        found = []
        for uid in uids:
            row = by_uid[uid]
            score = Score(
                uid=uid,
                outcome=Outcome.OK,
                score=row.reward or 0.0,
                components={},
                reward_hash="h",
            )
            rollout = rollout_write(row, Outcome.OK, "stop", Version(1, 0))
            found.append({**rollout.columns, **reward_write(score).columns})
        return found

    async def settle(self, run: str, **given: object) -> None: ...

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        self.committed.append(step)


class SlowFleet:
    """Takes each version after many times `take_wait_s`."""

    async def publish(self, source: WeightSource) -> None:
        await asyncio.sleep(PUBLISH_S)

    async def drained(self) -> None: ...


async def train_slowly(model: Path, directory: Path) -> None:
    world = World.start("cpu")
    settings = TrainerSettings(
        run="r", directory=directory, owner="test", seed=0, tokenizer=model,
        trainer=TrainerConfig(save_freq=1, take_wait_s=0.1),
        batch_groups=rank_work.GROUPS, group_size=rank_work.GROUP_SIZE, total_steps=STEPS,
    )  # fmt: skip
    state = rank_work.state(0, world_size=world.size)
    compute, queue = Compute(world.device), SameBatch()
    context = RunContext(
        settings=settings, queue=cast(Queue, queue), learner=rank_work.make(model, world),
        compute=compute,
    )  # fmt: skip
    await Trainer(context, state, SlowFleet()).run()
    compute.close()
    if world.is_main:
        print(*queue.committed)


def publish_slowly(model: str, directory: str) -> None:
    ranks_world.CONTROL_TIMEOUT_S = 20.0  # type: ignore[misc]
    asyncio.run(train_slowly(Path(model), Path(directory)))


SILENT_S = 1.0


def _started(rank: int, port: int, silent_s: float) -> tuple[object, Peers]:
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    seat = Seat(rank, rank, 2, True)
    assert came(store, seat)
    return store, Peers(store, seat, silent_s)


def _first(silent_s: float, work: str) -> tuple[int, int]:
    """A fork that is rank 0; its process id and port."""
    read, write = os.pipe()
    if pid := os.fork():
        return pid, int(os.read(read, 16))
    store, others = _started(0, 0, silent_s)
    os.write(write, str(store.port).encode())  # type: ignore[attr-defined]
    if work == "finish":
        time.sleep(1.0)
        others.finish()
        print("together to the end", flush=True)
        os._exit(0)
    time.sleep(60 if work == "wait" else 1.0)
    os._exit(3)


def _second(port: int, silent_s: float) -> int:
    if pid := os.fork():
        return pid
    _, others = _started(1, port, silent_s)
    try:
        others.until_finished()
        print("together to the end", flush=True)
    except InfraError as error:
        print(error, flush=True)
    os._exit(0)


def _code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def peers() -> None:
    """Two machines of one rank each, of which one is stopped, replaced, or comes to the end."""
    os.dup2(1, 2)
    first, port = _first(SILENT_S, "wait")
    second = _second(port, SILENT_S)
    time.sleep(0.5)
    os.kill(second, signal.SIGSTOP)
    assert _code(first) == 1
    os.kill(second, signal.SIGKILL)
    _code(second)

    first, port = _first(6.0, "wait")
    second = _second(port, 60.0)
    time.sleep(1.0)
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
    assert not came(store, Seat(1, 1, 2, True))
    assert _code(first) == 1 and _code(second) == 0

    first, port = _first(60.0, "end")
    second = _second(port, 60.0)
    assert _code(first) == 3 and _code(second) == 0

    first, port = _first(60.0, "finish")
    second = _second(port, 60.0)
    assert _code(first) == 0 and _code(second) == 0
