"""Scores a checkpoint on held-out prompts in this process: the recipe's engine and reward, no mesh.

tasks ──▶ program ──▶ engine (the checkpoint's own weights) ──▶ Sample ──▶ judge ──▶ Report
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from meshrl.config.recipe import Recipe
from meshrl.contract.errors import ConfigError
from meshrl.contract.ports import Engine, Judge
from meshrl.contract.rows import column_posted
from meshrl.contract.types import POSTED_REWARD, Json, Outcome, Sample, Task, Uid, Version
from meshrl.http.gateway.serving import gateway_of
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.posted_rewards import POSTED, score_unposted
from meshrl.rollout.engines import build_engine
from meshrl.rollout.ports import Rollout
from meshrl.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from meshrl.rollout.worker import ProgramCache
from meshrl.rpc.runtime import ServerSettings

VERSION = Version(0, 1)
"""What the checkpoint's weights are served as: any version above the unserved one."""


@runtime_checkable
class CheckpointEngine(Protocol):
    """An engine that can serve the weights it was pointed at, without a trainer."""

    async def serve_checkpoint(self, version: Version) -> None:
        """Serve the model directory's own weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an evaluation found. Rows without a score, through no fault of the policy, count in no mean."""

    tasks: int
    rows: int
    score: float | None
    """Mean over the scored rows; None when there is none."""
    by_source: Mapping[str, float]
    """Mean score by data source."""
    components: Mapping[str, float]
    """Means of the reward's components."""
    length: float
    """Mean response length in tokens."""
    truncated: float
    """Share of rows that reached `data.max_response_length`."""
    unscored: Mapping[str, int] = field(default_factory=dict)
    """Rows without a score, by reason."""
    sample: str = ""
    """The first task's first answer."""


async def evaluate(recipe: Recipe, model: Path, tasks: Sequence[Task]) -> Report:
    """Answer and score `tasks` with the weights in `model`.

    Raises:
        ConfigError: the recipe's engine cannot serve a checkpoint by itself.
        UserError: the model, the tokenizer or the reward cannot be loaded.
    """
    tokenizer = load_tokenizer(recipe.tokenizer_dir)
    engine = build_engine(recipe.rollout, model=model, tokenizer=tokenizer)
    if not isinstance(engine, CheckpointEngine):
        raise ConfigError(
            f"meshrl eval needs an engine that serves a checkpoint by itself; {recipe.rollout.name} "
            "does not (rollout.name=torch does)"
        )
    judge = build_judge(recipe.reward)
    try:
        await engine.start()
        await engine.serve_checkpoint(VERSION)
        pairs = [(task, index) for task in tasks for index in range(task.group_size)]
        settings = ServerSettings(metrics_port=None)
        async with (
            gateway_of(recipe, tokenizer, settings, name="eval") as gateway,
            ProgramCache(
                recipe.rollout.program, recipe.rollout.program_options, gateway=gateway
            ) as programs,
        ):
            if getattr(await programs.start(), "external", False):
                raise ConfigError(
                    "meshrl eval has no agents from outside: name a function or a command"
                )
            answering = _Answering(cast(Engine, engine), tokenizer, programs, recipe.rollout.slots)
            rollouts = await asyncio.gather(*(answering.answer(*pair) for pair in pairs))
        return await _report(judge, [task for task, _ in pairs], rollouts)
    finally:
        await judge.close()
        await engine.close()


class _Answering:
    """Runs programs, as many at once as the engine has slots."""

    def __init__(
        self, engine: Engine, tokenizer: HuggingFaceTokenizer, programs: ProgramCache, slots: int
    ) -> None:
        self._engine = engine
        self._programs = programs
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(slots)

    async def answer(self, task: Task, index: int) -> Rollout:
        """One rollout of a task."""
        program = self._programs.get(task.program)
        async with self._slots:
            uid = Uid(task.run, task.task_id, index)
            return await program(task, uid, self._engine, self._tokenizer)


async def _report(judge: Judge, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> Report:
    lengths = [len(r.trajectory.tokens) - r.trajectory.prompt_length for r in rollouts]
    samples = [
        Sample(
            uid=rollout.trajectory.uid,
            data_source=task.data_source,
            solution=rollout.trajectory.response_text,
            ground_truth=task.ground_truth,
            extra_info={**task.extra_info, **_posted(rollout), "response_length": length},
            messages=task.conversation,
        )
        for task, rollout, length in zip(tasks, rollouts, lengths, strict=True)
    ]
    scores = await score_unposted(judge, samples)
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    components: defaultdict[str, list[float]] = defaultdict(list)
    unscored: defaultdict[str, int] = defaultdict(int)
    for sample, score in zip(samples, scores, strict=True):
        if not score.outcome.trainable:
            unscored[score.reason or score.outcome] += 1
            continue
        by_source[sample.data_source].append(score.score)
        for name, value in score.components.items():
            components[name].append(value)
    truncated = [rollout.outcome is Outcome.TRUNCATED for rollout in rollouts]
    return Report(
        tasks=len({task.task_id for task in tasks}),
        rows=len(rollouts),
        score=_mean([value for values in by_source.values() for value in values]),
        by_source={name: _mean(values) or 0.0 for name, values in sorted(by_source.items())},
        components={name: _mean(values) or 0.0 for name, values in sorted(components.items())},
        length=_mean(lengths) or 0.0,
        truncated=_mean(truncated) or 0.0,
        unscored=dict(unscored),
        sample=rollouts[0].trajectory.response_text if rollouts else "",
    )


def _posted(rollout: Rollout) -> Mapping[str, Json]:
    """What the row's agent says it is worth, if it does, for `score_unposted`."""
    column = rollout.columns.get(POSTED_REWARD)
    reward = None if column is None else column_posted(column)
    return {} if reward is None else {POSTED: reward.to_json()}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
