"""Does every named algorithm learn? Each recipe of recipes/algorithms for a few steps, in one process.

    recipe ──▶ queue (memory), engine, reward, reference, trainer: the services' own parts, without gRPC

What is measured: the mean reward of the batch, step by step; a line per algorithm with its start (the mean of the
first steps in which the policy moves) and end (of the last ones), the last line is JSON. The model and the prompts
are the demo's (made on the first run, about a minute). A batch is `--rows` rows whatever the recipe says, so that the
algorithms see equally much; the peer is the reward at the start.

    python benchmarks/learning.py [--steps 30] [--rows 96] [NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import torch

from meshrl.cli.demo.prepare import prepare
from meshrl.config.loading import load_recipe
from meshrl.config.recipe import (
    Recipe,
    algorithm_needs,
    group_rows,
    train_sampling,
)
from meshrl.config.stages import train_spec
from meshrl.contract.ports import Queue, WeightSource
from meshrl.contract.types import Outcome, Sample, Score
from meshrl.launcher.learner import build_learner
from meshrl.launcher.prompts import read_prompts
from meshrl.rewardd.reward_stage import RewardStage
from meshrl.rollout.engines import build_engine
from meshrl.rollout.tokenizer import load_tokenizer
from meshrl.rollout.worker import RolloutWorker
from meshrl.trainer.checkpoint.resume import resume
from meshrl.trainer.data.feeder import Feeder, PromptOrder
from meshrl.trainer.data.prompts import task_maker
from meshrl.trainer.loop.context import RunContext, TrainerSettings
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.metrics.log import MetricsLog
from meshrl.trainer.ranks.world import Compute, World
from meshrl.trainer.reference.model import ReferenceModel
from meshrl.trainer.reference.stage import ReferenceStage
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from meshrl.weights.messages import whole

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes" / "algorithms"
FIRST, LAST = 2, 5
"""Steps that start and end are means of."""


class InlineJudge:
    """The recipe's `compute_score`, called in this process."""

    reward_hash = "inline"

    def __init__(self, path: Path) -> None:
        spec = importlib.util.spec_from_file_location("reward_of_recipe", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._score = module.compute_score

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order."""
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> Score:
        found = self._score(sample.data_source, sample.solution, sample.ground_truth)
        score = float(found.pop("score"))
        return Score(uid=sample.uid, outcome=Outcome.OK, score=score, components=found)

    async def close(self) -> None:
        """Nothing to end."""


class Direct:
    """The publisher of a mesh with one engine in this process."""

    def __init__(self, recipe: Recipe, queue: Queue, engine: object) -> None:
        self._recipe = recipe
        self._queue = queue
        self._engine = engine

    async def publish(self, source: WeightSource) -> None:
        """Stage, commit, tell the queue."""
        await whole(source)
        manifest = source.manifest
        buckets = [source.bucket(index) for index in range(len(manifest.bucket_bytes))]
        await self._engine.stage_weights(manifest, buckets)
        await self._engine.commit_weights(manifest.version, self._recipe.rollout.on_update)
        await self._queue.publish(manifest.run, manifest.version)

    async def drained(self) -> None:
        """Nothing is ever in transfer."""


@asynccontextmanager
async def in_process(queue: TransferQueue) -> AsyncIterator[TransferQueue]:
    """The queue as it is, without gRPC."""
    yield queue


async def train(
    recipe: Recipe,
    world: World,
    directory: Path,
    *,
    reached: Callable[[TransferQueue], AbstractAsyncContextManager[Queue]] = in_process,
    metrics: Callable[[Path], MetricsLog] = MetricsLog,
) -> list[dict[str, float]]:
    """The metrics of every step. `reached`: how the parts call the queue; `metrics`: the log of a file."""
    opened = await TransferQueue.open(MemoryStore())
    try:
        async with reached(opened) as queue:
            log = metrics(directory / "metrics.jsonl")
            return await _train(recipe, world, directory, queue, log)
    finally:
        await opened.close()


async def _train(
    recipe: Recipe, world: World, directory: Path, queue: Queue, log: MetricsLog
) -> list[dict[str, float]]:
    tokenizer = load_tokenizer(recipe.tokenizer_dir)
    engine = build_engine(recipe.rollout, model=recipe.model.path, tokenizer=tokenizer)
    await engine.start()
    spec = train_spec(recipe)
    await queue.open_run(spec)
    run = spec.run
    stages = [
        RolloutWorker(
            queue,
            engine,
            tokenizer,
            runs=[run],
            worker="rollout-0",
            schedule=recipe.rollout.schedule(float(recipe.queue.max_staleness)),
        ).run(),
        RewardStage(
            queue, [run], InlineJudge(recipe.reward.custom_reward_function.path), worker="reward"
        ).run(),
    ]
    if algorithm_needs(recipe).reference:
        reference = ReferenceModel(recipe.reference_model.path, device="cpu")
        stages.append(ReferenceStage(queue, [run], reference.judged, worker="reference").run())
    make_task = task_maker(
        run,
        group_size=spec.group_size,
        sampling=train_sampling(recipe),
        program=recipe.rollout.program,
        deadline_s=recipe.rollout.deadline_s,
    )
    prompts = read_prompts(recipe)
    feeder = Feeder(
        queue, run, prompts, make_task, epochs=None, order=PromptOrder(shuffle=True, seed=0)
    )
    settings = TrainerSettings(
        run=run,
        directory=directory,
        owner="benchmark",
        seed=recipe.run.seed,
        trainer=recipe.trainer,
        tokenizer=recipe.tokenizer_dir,
        batch_groups=recipe.data.train_batch_size,
        group_size=group_rows(recipe),
        extra_rows=algorithm_needs(recipe).extra_rows,
        filter_groups=recipe.algorithm.filter_groups,
        total_steps=recipe.trainer.total_training_steps,
    )
    compute = Compute(world.device)
    learner = build_learner(recipe, settings.total_steps, world)
    context = RunContext(settings=settings, queue=queue, learner=learner, compute=compute)
    state = await resume(context)
    trainer = Trainer(context, state, Direct(recipe, queue, engine), metrics=log)
    working = [asyncio.create_task(work) for work in (*stages, feeder.run())]
    try:
        await trainer.run()
        assert (await queue.ledger(run)).balanced
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        compute.close()
        await engine.close()
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def measure(name: str, world: World, steps: int, rows: int) -> dict[str, object]:
    """One algorithm."""
    common = [f"trainer.total_training_steps={steps}", "reward.mixed_versions=allow"]
    written = load_recipe(RECIPES / f"{name}.yaml", common)
    # Whole mini-batches: two where the recipe has several.
    half = max(1, rows // written.rollout.n // 2)
    several = written.actor.ppo_mini_batch_size is not None
    sizes = [f"data.train_batch_size={2 * half}"]
    sizes += [f"actor.ppo_mini_batch_size={half}"] if several else []
    recipe = load_recipe(RECIPES / f"{name}.yaml", [*common, *sizes])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        lines = asyncio.run(train(recipe, world, Path(directory)))
    still = recipe.critic.pretrain_steps + recipe.critic.warmup_steps
    alone = still if algorithm_needs(recipe).critic else 0
    # With dynamic sampling a batch holds mixed groups only: there the mean of all sampled rows is the measure.
    curve = [round(line.get("sampling/metric_mean", line["reward/mean"]), 4) for line in lines]
    moving = curve[alone:]
    return {
        "algorithm": name,
        "steps": len(curve),
        "start": round(sum(moving[:FIRST]) / FIRST, 4),
        "end": round(sum(moving[-LAST:]) / LAST, 4),
        "seconds": round(time.monotonic() - begin, 1),
        "curve": curve,
    }


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="algorithms; none runs all")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=96)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    prepare(ROOT / "runs" / "demo" / "assets", seed=0, report=lambda phase, progress: None)
    names = given.names or sorted(path.stem for path in RECIPES.glob("*.yaml"))
    world = World.start("cpu")
    results = []
    for name in names:
        found = measure(name, world, given.steps, given.rows)
        results.append(found)
        print(
            f"{name:22} {found['start']:.3f} -> {found['end']:.3f}   {found['seconds']:6.1f} s",
            flush=True,
        )
    world.close()
    print(json.dumps({"benchmark": "learning", "rows": given.rows, "results": results}))


if __name__ == "__main__":
    main()
