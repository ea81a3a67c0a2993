"""A mesh in one process around a trainer: the real queue, a sampler that serves published weights, a judge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from meshrl.contract.ports import Queue, WeightSource
from meshrl.contract.rows import reward_write, rollout_write, text_column
from meshrl.contract.stage_worker import Intake, StageResult, StageWorker
from meshrl.contract.types import (
    DATA_SOURCE,
    REFERENCE_STAGE,
    REWARD_STAGE,
    ROLLOUT_STAGE,
    LeasedRow,
    Outcome,
    RowWrite,
    RunSpec,
    SamplingParams,
    Score,
    Task,
    Trajectory,
    Version,
    VersionSpan,
)
from meshrl.trainer.algorithms.needs import needs_of
from meshrl.trainer.checkpoint.resume import resume
from meshrl.trainer.config import (
    ActorConfig,
    AlgorithmConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
)
from meshrl.trainer.learner.learner import Learner, RowContents, StepSettings
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.loop.context import RunContext, TrainerSettings
from meshrl.trainer.loop.evaluation import Evaluator
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.metrics.log import MetricsLog
from meshrl.trainer.model.policy import build_policy, open_hf, random_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import Compute, World
from meshrl.trainer.reference.model import ReferenceModel
from meshrl.trainer.reference.stage import ReferenceStage
from meshrl.trainer.trajectories.files import FOLDER
from meshrl.trainer.trajectories.log import TrajectoryLog
from meshrl.weights.messages import whole

VOCABULARY = 23
LUCKY = 7
"""The token that the judge likes."""
GROUPS, GROUP_SIZE = 4, 4


def save_model(path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=24, max_position_embeddings=64,
    )  # fmt: skip
    random_hf(config, seed=0).save_pretrained(path)
    return path


def spec(run: str = "run", **changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "group_size": GROUP_SIZE, "batch_groups": GROUPS, "max_staleness": 0.0
    }  # fmt: skip
    return RunSpec(run=run, **{**fields, **changes})


def eval_spec(run: str = "run") -> RunSpec:
    return spec(
        f"{run}.eval", group_size=1, batch_groups=1, max_staleness=float("inf"),
        resident_batches=1 << 20, gated=False, priority=1,
    )  # fmt: skip


def tasks(count: int, run: str = "run", *, greedy: bool = False, extra_rows: int = 0) -> list[Task]:
    draw = np.random.default_rng(5)
    return [
        Task(
            run=run,
            task_id=f"{index:06d}",
            prompt_ids=draw.integers(0, VOCABULARY, 4).astype(np.int32),
            data_source=f"s{index % 2}",
            sampling=SamplingParams(
                temperature=0.0 if greedy else 1.0, max_tokens=6, greedy_siblings=extra_rows
            ),
            group_size=1 if greedy else GROUP_SIZE + extra_rows,
        )
        for index in range(count)
    ]


class Sampler:
    """A Publisher and a rollout stage in one: what is published is what samples next."""

    def __init__(self, queue: Queue, model: Path, run: str = "run") -> None:
        self.version: Version | None = None
        self.published: list[Version] = []
        self.fail_at: int | None = None
        """Publishing this step raises: the trainer dies after it has settled."""
        self._queue = queue
        self._run = run
        self._hf = AutoModelForCausalLM.from_pretrained(model)
        self._serving = asyncio.Event()

    async def publish(self, source: WeightSource) -> None:
        manifest = source.manifest
        if manifest.version.step == self.fail_at:
            raise ConnectionError("killed")
        await whole(source)
        state = {}
        for tensor in manifest.tensors:
            data = source.bucket(tensor.bucket)[tensor.offset : tensor.offset + tensor.nbytes]
            kind = getattr(torch, tensor.dtype)
            state[tensor.name] = torch.from_numpy(data.copy()).view(kind).view(tensor.shape)
        self._hf.load_state_dict(state, strict=False)
        self.version = manifest.version
        self.published.append(manifest.version)
        self._serving.set()
        await self._queue.publish(self._run, manifest.version)

    async def drained(self) -> None:
        return

    async def serve(self) -> None:
        await self._serving.wait()
        loop = StageWorker(
            self._queue, [f"{self._run}.eval", self._run], ROLLOUT_STAGE, self._answer,
            worker="sampler",
            intake=Intake(limit=64, per_call=16, version=lambda: self.version or Version(0, 0)),
        )  # fmt: skip
        loop.lease_wait_s = (
            1.0  # one that asks under the version of a trainer that is gone notices soon
        )
        await loop.run()

    async def _answer(self, rows: Sequence[LeasedRow]) -> list[StageResult]:
        return [self._sample(row) for row in rows]

    @torch.no_grad()
    def _sample(self, row: LeasedRow) -> RowWrite:
        """Depends on the weights, the prompt and the uid, on nothing else."""
        assert self.version is not None
        prompt = row.task.prompt_ids
        params = row.task.sampling.of_row(row.uid.index, row.task.group_size)
        tokens = prompt.tolist()
        logprobs = [0.0] * len(tokens)
        seed = f"{row.uid.task}/{row.uid.index}"
        draw = np.random.default_rng(list(seed.encode()))
        for _ in range(2 + int(draw.integers(0, params.max_tokens - 1))):
            log_p = self._hf(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            noise = draw.gumbel(size=VOCABULARY) if params.temperature else 0.0
            token = int((log_p.double() + torch.as_tensor(noise)).argmax())
            tokens.append(token)
            logprobs.append(float(log_p[token]))
        trajectory = Trajectory(
            uid=row.uid,
            tokens=np.array(tokens, dtype=np.int32),
            loss_mask=np.array(
                [0] * len(prompt) + [1] * (len(tokens) - len(prompt)), dtype=np.uint8
            ),
            rollout_logprobs=np.array(logprobs, dtype=np.float32),
            spans=(VersionSpan(version=self.version, start=len(prompt), end=len(tokens)),),
            response_text=" ".join(map(str, tokens[len(prompt) :])),
        )
        return rollout_write(trajectory, Outcome.OK, "stop", self.version)


async def judge(rows: Sequence[LeasedRow]) -> list[StageResult]:
    """The share of lucky tokens."""
    written: list[StageResult] = []
    for row in rows:
        words = row.columns["response_text"].tobytes().decode().split()
        share = words.count(str(LUCKY)) / len(words)
        write = reward_write(
            Score(uid=row.uid, outcome=Outcome.OK, score=share, components={"lucky": share})
        )
        named = {DATA_SOURCE: text_column(row.task.data_source)}
        written.append(replace(write, columns={**write.columns, **named}))
    return written


@dataclass
class Mesh:
    """Everything around the trainer of one run."""

    queue: Queue
    model: Path
    directory: Path
    sampler: Sampler
    world: World
    actor: ActorConfig = field(
        default_factory=lambda: ActorConfig(
            optim=OptimConfig(lr=2e-2), ppo_max_token_len_per_gpu=48
        )
    )
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    stages: list[asyncio.Task[None]] = field(default_factory=list)
    changes: dict[str, object] = field(default_factory=dict)
    reader: VisionReader | None = None
    """The vision reader of the model's config, if it has one."""

    def learner(self) -> Learner:
        config = ModelConfig.model_validate({"path": self.model, **self.changes})
        policy = build_policy(open_hf(self.model), self.world, config)
        learner = Learner(
            policy,
            Optimizers(policy, self.actor.optim),
            PolicyGradient(self.algorithm, self.actor, max_response_length=6),
            self.world,
            StepSettings(actor=self.actor),
            RowContents(reader=self.reader),
        )
        # The place of a picture is a token, too, which this model does not have.
        learner.vocabulary += self.reader is not None
        return learner

    @property
    def extra_rows(self) -> int:
        return needs_of(self.algorithm, self.actor).extra_rows

    def settings(self, total_steps: int | None, **trainer: Any) -> TrainerSettings:
        return TrainerSettings(
            run="run",
            directory=self.directory,
            owner="test",
            seed=0,
            trainer=TrainerConfig(**{"take_wait_s": 0.5, "device": "cpu", **trainer}),
            tokenizer=self.model,
            batch_groups=GROUPS,
            group_size=GROUP_SIZE + self.extra_rows,
            extra_rows=self.extra_rows,
            filter_groups=self.algorithm.filter_groups,
            total_steps=total_steps,
            blocking_evaluation=True,
        )

    @asynccontextmanager
    async def trainer(
        self, total_steps: int | None, *, held_out: int = 0, **config: Any
    ) -> AsyncIterator[Trainer]:
        """A trainer that has taken the run over."""
        settings = self.settings(total_steps, **config)
        compute = Compute(self.world.device)
        learner = self.learner()
        metrics = MetricsLog(self.directory / "metrics.jsonl")
        kept = TrajectoryLog(self.directory / FOLDER)
        try:
            context = RunContext(
                settings=settings, queue=self.queue, learner=learner, compute=compute
            )
            state = await resume(context)
            evaluator = None
            if held_out:
                evaluator = Evaluator(
                    self.queue,
                    eval_spec(),
                    tasks(held_out, greedy=True),
                    owner="test",
                    take_wait_s=0.5,
                    trajectories=kept,
                )
            yield Trainer(
                context,
                state,
                self.sampler,
                evaluator=evaluator,
                metrics=metrics,
                trajectories=kept,
            )
        finally:
            await asyncio.to_thread(kept.close)
            metrics.close()
            compute.close()

    async def train(self, total_steps: int | None, **config: Any) -> int:
        """Take the run over and train; returns the step reached."""
        async with self.trainer(total_steps, **config) as trainer:
            return (await trainer.run()).step

    async def feed(self, count: int, start: int = 0, *, close: bool = False) -> None:
        waiting = tasks(start + count, extra_rows=self.extra_rows)[start:]
        while waiting:
            done = await self.queue.admit("run", waiting, cursor=waiting[-1].task_id, wait_s=60.0)
            del waiting[:done]
        if close:
            await self.queue.close_feed("run")

    def lines(self) -> list[dict[str, Any]]:
        text = (self.directory / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def logged(self, name: str) -> list[dict[str, Any]]:
        """The rows of one file of `trajectories`."""
        rows: list[dict[str, Any]] = parquet.read_table(self.directory / FOLDER / name).to_pylist()
        return rows

    def weights(self) -> dict[str, torch.Tensor]:
        hf = AutoModelForCausalLM.from_pretrained(self.directory / "export")
        return dict(hf.state_dict())


@asynccontextmanager
async def mesh(
    queue: Queue,
    model: Path,
    directory: Path,
    world: World,
    *,
    reference: bool = False,
    **changes: Any,
) -> AsyncIterator[Mesh]:
    """A mesh whose stages work until the context ends."""
    runs = ["run.eval", "run"]
    made = Mesh(queue, model, directory, Sampler(queue, model), world)
    stages = (
        (ROLLOUT_STAGE, REWARD_STAGE, REFERENCE_STAGE)
        if reference
        else (ROLLOUT_STAGE, REWARD_STAGE)
    )
    await queue.open_run(spec(stages=stages, **changes))
    judging = StageWorker(
        queue, runs, REWARD_STAGE, judge, worker="judge", intake=Intake(limit=64, per_call=16)
    )
    made.stages = [asyncio.create_task(made.sampler.serve()), asyncio.create_task(judging.run())]
    referee = ReferenceModel(model, device="cpu", deterministic=True) if reference else None
    if referee:
        stage = ReferenceStage(queue, ["run"], referee.judged, worker="reference")
        made.stages.append(asyncio.create_task(stage.run()))
    try:
        yield made
    finally:
        for task in made.stages:
            task.cancel()
        await asyncio.gather(*made.stages, return_exceptions=True)
        if referee:
            referee.close()
