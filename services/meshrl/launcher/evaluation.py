"""Scores a checkpoint on held-out prompts in this process: the recipe's engine and reward, no mesh.

tasks ──▶ program ──▶ engine (the checkpoint's own weights) ──▶ Sample ──▶ judge ──▶ Report
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from meshrl.config.recipe import Recipe
from meshrl.contract.errors import ConfigError
from meshrl.contract.ports import Engine, Judge
from meshrl.contract.rows import column_posted
from meshrl.contract.types import (
    POSTED_REWARD,
    Json,
    Message,
    Outcome,
    Sample,
    Score,
    Task,
    Uid,
    Version,
)
from meshrl.http.gateway.serving import gateway_of
from meshrl.launcher.prompts import image_processor
from meshrl.rewardd.estimates import (
    Estimate,
    ScoredAnswer,
    final_answer,
    ks_of,
    majority_at,
    mean_score,
    pass_at,
)
from meshrl.rewardd.judge import POSTED, build_judge, score_unposted
from meshrl.rollout.engines import build_engine
from meshrl.rollout.ports import Rollout
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from meshrl.rpc.runtime import ServerSettings

VERSION = Version(0, 1)
"""The version of the checkpoint's weights: any above the unserved one."""


@runtime_checkable
class CheckpointEngine(Protocol):
    """An engine that can serve the weights it was pointed at, without a trainer."""

    async def serve_checkpoint(self, version: Version) -> None:
        """Serve the model directory's own weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """One answer and its score."""

    uid: str
    task: str
    index: int
    data_source: str
    messages: tuple[Message, ...]
    """The prompt."""
    ground_truth: Json
    response: str
    final: str
    """The text that majority voting compares; see `final_answer`."""
    score: float | None
    """None: it has no score, through no fault of the policy."""
    right: bool
    components: Mapping[str, float]
    outcome: str
    length: int
    """In tokens."""
    reason: str
    """Why it has no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """The tasks of one data source."""

    tasks: int
    rows: int
    score: Estimate | None
    pass_at: Mapping[int, Estimate]
    majority_at: Mapping[int, Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The result of an evaluation. Rows without a score, through no fault of the policy, count in no mean."""

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
    interval: tuple[float, float] | None = None
    """95 % interval of the score, over tasks."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """How likely one of k answers is right."""
    majority_at: Mapping[int, Estimate] = field(default_factory=dict)
    """How often the commonest of k final answers is right."""
    sources: Mapping[str, SourceReport] = field(default_factory=dict)
    answers: tuple[JudgedAnswer, ...] = field(default=(), repr=False)
    """All answers, by task and index."""


async def evaluate(
    recipe: Recipe,
    model: Path,
    tasks: Sequence[Task],
    *,
    right: float = 1.0,
    answered: Callable[[int], None] = lambda rows: None,
) -> EvaluationReport:
    """Answer and score `tasks` with the weights in `model`.

    Args:
        recipe: Its engine, program and reward.
        model: A Hugging Face directory.
        tasks: What to answer.
        right: The least score of an answer that counts as right.
        answered: Told how many answers there are, with each.

    Raises:
        ConfigError: the recipe's engine cannot serve a checkpoint by itself.
        UserError: the model, the tokenizer or the reward cannot be loaded.
    """
    tokenizer = load_tokenizer(
        recipe.tokenizer_dir, recipe.data.apply_chat_template_kwargs, image_processor(recipe)
    )
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
                recipe.rollout.program,
                recipe.rollout.program_options,
                gateway=gateway,
                containers=recipe.rollout.containers,
            ) as programs,
        ):
            await programs.start()
            if programs.demand is not None:
                raise ConfigError(
                    "meshrl eval has no agents from outside: name a function or a command"
                )
            answering = _Answering(engine, tokenizer, programs, recipe.rollout.slots, answered)
            rollouts = await asyncio.gather(*(answering.answer(*pair) for pair in pairs))
        return await _report(judge, [task for task, _ in pairs], rollouts, right)
    finally:
        await judge.close()
        await engine.close()


class _Answering:
    """Runs programs, as many at once as the engine has slots."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: HuggingFaceTokenizer,
        programs: ProgramCache,
        slots: int,
        answered: Callable[[int], None],
    ) -> None:
        self._answered = answered
        self._count = 0
        self._engine = engine
        self._programs = programs
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(slots)

    async def answer(self, task: Task, index: int) -> Rollout:
        """One rollout of a task."""
        program = self._programs.get(task.program)
        async with self._slots:
            uid = Uid(task.run, task.task_id, index)
            rollout = await program(task, uid, self._engine, self._tokenizer)
        self._count += 1
        self._answered(self._count)
        return rollout


async def _report(
    judge: Judge, tasks: Sequence[Task], rollouts: Sequence[Rollout], right: float
) -> EvaluationReport:
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
    answers = tuple(
        _answer(*row, right) for row in zip(samples, scores, rollouts, lengths, strict=True)
    )
    components: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        for name, value in answer.components.items():
            components[name].append(value)
    names = sorted({answer.data_source for answer in answers})
    sources = {name: _source([a for a in answers if a.data_source == name]) for name in names}
    whole = _source(answers)
    return EvaluationReport(
        tasks=whole.tasks,
        rows=whole.rows,
        score=whole.score.mean if whole.score else None,
        by_source={name: part.score.mean for name, part in sources.items() if part.score},
        components={name: _mean(values) or 0.0 for name, values in sorted(components.items())},
        length=_mean(lengths) or 0.0,
        truncated=_mean([rollout.outcome is Outcome.TRUNCATED for rollout in rollouts]) or 0.0,
        unscored=dict(Counter(answer.reason for answer in answers if answer.score is None)),
        sample=rollouts[0].trajectory.response_text if rollouts else "",
        interval=(whole.score.low, whole.score.high) if whole.score else None,
        pass_at=whole.pass_at,
        majority_at=whole.majority_at,
        sources=sources,
        answers=answers,
    )


def _answer(
    sample: Sample, score: Score, rollout: Rollout, length: int, right: float
) -> JudgedAnswer:
    scored = score.outcome.trainable
    return JudgedAnswer(
        uid=str(sample.uid),
        task=sample.uid.task,
        index=sample.uid.index,
        data_source=sample.data_source,
        messages=sample.messages,
        ground_truth=sample.ground_truth,
        response=sample.solution,
        final=final_answer(sample.solution),
        score=score.score if scored else None,
        right=scored and score.score >= right,
        components=score.components if scored else {},
        outcome=str(rollout.outcome),
        length=length,
        reason="" if scored else score.reason or str(score.outcome),
    )


def _source(answers: Sequence[JudgedAnswer]) -> SourceReport:
    """The figures of some tasks."""
    tasks: dict[str, list[ScoredAnswer]] = {answer.task: [] for answer in answers}
    for a in answers:
        if a.score is not None:
            tasks[a.task].append(ScoredAnswer(score=a.score, right=a.right, final=a.final))
    groups = list(tasks.values())
    ks = ks_of(max(map(len, groups), default=0))
    return SourceReport(
        tasks=len(tasks),
        rows=len(answers),
        score=mean_score(groups),
        pass_at={k: found for k in ks if (found := pass_at(groups, k))},
        majority_at={k: found for k in ks if (found := majority_at(groups, k))},
    )


def _posted(rollout: Rollout) -> Mapping[str, Json]:
    """The reward that the row's agent posted, if any, for `score_unposted`."""
    column = rollout.columns.get(POSTED_REWARD)
    reward = None if column is None else column_posted(column)
    return {} if reward is None else {POSTED: reward.to_json()}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
