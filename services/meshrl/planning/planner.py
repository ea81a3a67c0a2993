"""How to divide GPUs between rollout and training, and what to expect: splits of one recipe in virtual time."""

from __future__ import annotations

import ast
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from meshrl.common.config import Config
from meshrl.common.plugins import find
from meshrl.config.recipe import Recipe
from meshrl.config.stages import train_spec
from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.held_rows import RENEWALS
from meshrl.contract.stage_worker import Intake
from meshrl.planning.scale import FEWEST_STEPS, Outlook, run_setting
from meshrl.planning.setting import P99, Lengths, Seats, Setting
from meshrl.rewardd.config import JudgeConfig, RewardConfig
from meshrl.rewardd.judges._remote import RemoteJudgeConfig
from meshrl.rewardd.pool.rule import find_function, read_rule
from meshrl.rewardd.reward_stage import INTAKE
from meshrl.trainer.config import ModelConfig, RewardModelJudgeConfig

PARAMS: Final = 8e9
"""Parameters of a model that is not on this machine."""
READ_BYTES_PER_S: Final = 0.5 * 3.35e12
"""Memory bandwidth of a GPU in a decode step: half of an H100's peak."""
TRAIN_FLOPS: Final = 0.4 * 989e12
"""Speed of training on a GPU: 40 % of an H100's dense bf16 peak."""
BANDWIDTH: Final = 10e9
"""Bytes per second into each rollout GPU: four fifths of a 100 Gb/s link."""
ROWS: Final = 2000
"""About as many rows are simulated of each split; larger batches are simulated at a fraction of the size."""
FEWEST_GROUPS: Final = 8
"""The fewest groups of a simulated batch, unless they are very large."""
SLACK: Final = 0.05
"""A side that idles less than this is busy."""
SHARES: Final = (0.6, 1.0, 1.6)
"""Trainer GPUs that are tried, as multiples of the balance without waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """Hardware, model and data, as a person gives them. None: assumed, and printed as an assumption."""

    gpus: int
    rollout_gpus: int | None = None
    gpus_per_worker: int = 1
    tokens_per_s: float | None = None
    """Sampled by one GPU whose slots are all busy."""
    alone_speedup: float = 1.0
    step_s: float | None = None
    step_gpus: int = 8
    """The GPUs on which a step takes `step_s`."""
    train_tokens_per_s: float | None = None
    """Tokens a second that one GPU trains."""
    prompt_mean: float | None = None
    length_mean: float | None = None
    length_p99: float | None = None
    alike: float = 0.0
    params: float | None = None
    bandwidth: float = BANDWIDTH
    commit_s: float = 0.0
    reward_s: float = 0.0
    """Seconds of the functions for one sample."""
    judge_s: float = 0.0
    """Seconds of each judge for one sample (of a reward model: for a batch)."""
    tool_calls: int = 0
    tool_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSplit:
    """One division of the GPUs."""

    rollout_gpus: int
    trainer_gpus: int
    step_s: float
    outlook: Outlook

    @property
    def bottleneck(self) -> str:
        """The first bottleneck, in a few words."""
        seen = self.outlook
        if seen.queue_load > 0.8:
            return "queue"
        if seen.publish_wait > SLACK:
            return "weight transfer"
        if seen.trainer_idle <= SLACK:
            return "trainer"
        if seen.reward_load >= 1 - SLACK:
            return "reward"
        if seen.rollout_idle <= 2 * SLACK:
            return "rollout"
        if seen.slots_held >= 1 - SLACK:
            return "slots"
        return "long responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The answer."""

    best: GpuSplit
    tried: tuple[GpuSplit, ...]
    """All, from the fewest rollout GPUs to the most; `best` is one of them."""
    scale: int
    """Divisor of all sizes in the simulation."""
    advice: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scorer:
    """A part of the reward that takes time."""

    at_once: int
    """Samples that it scores at the same time."""
    seconds: float
    together: int = 1
    """Samples that are scored as one."""
    says: str

    def seats(self, scale: int) -> Seats:
        """Its places, at one part in `scale` of their number, or slower where that is less than one."""
        count = max(1, round(self.at_once / scale))
        every_s = self.seconds / self.together * count * scale / self.at_once
        return Seats(count=count, seconds=self.seconds, every_s=every_s)


def _reward(reward: RewardConfig, asked: PlanQuestion) -> Iterator[_Scorer]:
    """The parts of a recipe's reward to which the question gives time."""
    if asked.reward_s and reward.scorers:
        each = reward.concurrency if _is_async(reward) else 1
        how = f"{each} at once (`async def`)" if each > 1 else "one at a time"
        yield _Scorer(
            at_once=each * reward.workers,
            seconds=asked.reward_s,
            says=f"functions of {asked.reward_s:g} s, {how} in each of reward.workers {reward.workers}",
        )
    for judge in reward.judges if asked.judge_s else ():
        at_once, together = INTAKE.limit, 1
        if judge.kind == "model":
            at_once, together = 1, _option(judge, "batch_size", RewardModelJudgeConfig)
        elif judge.kind != "grpc":  # whose other end has places of its own
            at_once = _option(judge, "concurrency", RemoteJudgeConfig)
        yield _Scorer(
            at_once=at_once,
            seconds=asked.judge_s,
            together=together,
            says=f"judge {judge.component} of {asked.judge_s:g} s, {at_once} at once"
            + (f", each of {together} samples" if together > 1 else ""),
        )


def _option(judge: JudgeConfig, name: str, kind: type[Config]) -> int:
    """A count among a judge's options. Raises UserError."""
    count = judge.options.get(name, kind.model_fields[name].default)
    if not isinstance(count, int) or count < 1:
        raise UserError(
            f"reward.judges: {judge.component}: {name}: want a positive number, not {count!r}"
        )
    return count


def _is_async(reward: RewardConfig) -> bool:
    """Whether some function is a coroutine function, as far as its source says so; no for a file that is not here."""
    try:
        for function in read_rule(reward).functions:
            spec = find(function.module) if function.module else None
            source = Path(spec.origin).read_text() if spec and spec.origin else function.source
            found = find_function(source, function.name, function.name, function.module)
            if isinstance(found, ast.AsyncFunctionDef):
                return True
    except (MeshError, OSError, ValueError):
        pass
    return False


class _Case:
    """A question about a recipe, with every gap filled in."""

    def __init__(self, recipe: Recipe, asked: PlanQuestion) -> None:
        self.asked = asked
        self.spec = spec = train_spec(recipe)
        self.slots = recipe.rollout.slots
        self.on_update = recipe.rollout.on_update
        self.renewals_per_s = RENEWALS / spec.lease_ttl_s
        most = recipe.data.max_response_length
        found = _params(recipe.model)
        params = asked.params or found or PARAMS
        mean = asked.length_mean or min(most / 2, (asked.length_p99 or most) / 2)
        p99 = asked.length_p99 or max(mean, min(most, 4 * mean))
        self.lengths = Lengths(mean=mean, p99=p99, most=most, alike=asked.alike)
        self._check()
        self.mean = sum(self.lengths.draw(asked.seed, task, 0) for task in range(2000)) / 2000
        self.prompt = asked.prompt_mean or recipe.data.max_prompt_length / 2
        rows = spec.batch_groups * spec.group_size
        self.batch_tokens = rows * (self.mean + self.prompt)
        read_s = 2 * params / asked.gpus_per_worker / READ_BYTES_PER_S
        self.tokens_per_s = asked.tokens_per_s or self.slots / read_s / asked.gpus_per_worker
        train = asked.train_tokens_per_s or TRAIN_FLOPS / (6 * params)
        self.step_gpu_s = (
            asked.step_s * asked.step_gpus if asked.step_s else self.batch_tokens / train
        )
        width = 2 if recipe.weights.dtype == "bfloat16" else 4
        self.weight_bytes = width * params
        self.transfer_s = self.weight_bytes / asked.gpus_per_worker / asked.bandwidth
        self.group = min(spec.group_size, ROWS // FEWEST_STEPS)
        fewest = self.group * max(1, min(FEWEST_GROUPS, ROWS // FEWEST_STEPS // self.group))
        self.scale = max(1, min(round(rows * FEWEST_STEPS / ROWS), rows // fewest))
        self.rows = rows
        row_bytes = 9 * (self.mean + self.prompt)
        bounds = [spec.resident_bytes / row_bytes / spec.group_size]
        if spec.resident_tokens:
            bounds.append(spec.resident_tokens / (self.mean + self.prompt) / spec.group_size)
        self.resident_groups = min(bounds)
        self.reward = tuple(_reward(recipe.reward, asked))
        self.sync_batches = recipe.rollout.is_deterministic(float(spec.max_staleness))
        of_model = "given" if asked.params else f"counted in {recipe.model.path}"
        if not (asked.params or found):
            of_model = f"assumed: {recipe.model.path} has no safetensors here"
        self.assumptions = tuple(self._assumptions(recipe, params, of_model))

    def _check(self) -> None:
        asked, lengths = self.asked, self.lengths
        if asked.gpus < asked.gpus_per_worker + 1:
            raise UserError(
                f"--gpus {asked.gpus}: want at least {asked.gpus_per_worker + 1}, one worker and one for the trainer"
            )
        if asked.rollout_gpus is not None:
            rest = asked.gpus - asked.rollout_gpus
            if rest < 1 or asked.rollout_gpus % asked.gpus_per_worker:
                raise UserError(
                    f"--rollout-gpus {asked.rollout_gpus}: want a multiple of --gpus-per-worker"
                    f" ({asked.gpus_per_worker}) below --gpus ({asked.gpus})"
                )
        if lengths.mean > lengths.most:
            raise UserError(
                f"--length-mean {lengths.mean:g}: no response is longer than data.max_response_length"
                f" ({lengths.most})"
            )
        if not 1 <= lengths.p99 / lengths.mean <= math.exp(P99**2 / 2):
            raise UserError(
                f"--length-p99 {lengths.p99:g}: want 1 to {math.exp(P99**2 / 2):.0f} times the mean"
                f" ({lengths.mean:g})"
            )

    def _assumptions(self, recipe: Recipe, params: float, of_model: str) -> Iterator[str]:
        asked, spec, lengths = self.asked, self.spec, self.lengths
        given = "given" if asked.length_mean and asked.length_p99 else "assumed in part"
        yield f"model: {params:.3g} parameters ({of_model}); whether it fits into memory is not checked"
        yield (
            f"responses: log-normal, mean {lengths.mean:g}, p99 {lengths.p99:g} ({given}), cut at"
            f" data.max_response_length {lengths.most}: {self.mean:.0f} tokens on average;"
            f" {asked.alike:.0%} of the variance belongs to the prompt"
        )
        yield f"prompts: {self.prompt:.0f} tokens on average ({_said(asked.prompt_mean)}); prefill takes no time"
        yield (
            f"sampling: {self.tokens_per_s:,.0f} tokens/s a GPU with all {self.slots} slots busy"
            f" ({_said(asked.tokens_per_s, 'weights are read once a token at 1.7 TB/s')});"
            f" one request alone is {asked.alone_speedup:g} times as fast as one of {self.slots}"
        )
        how = _said(asked.train_tokens_per_s, "40 % of an H100's peak")
        if asked.step_s:
            how = f"a step of {asked.step_s:g} s on {asked.step_gpus} GPUs is given"
        yield (
            f"training: {self.batch_tokens / self.step_gpu_s:,.0f} tokens/s a GPU ({how}); twice the GPUs"
            " take half the time"
        )
        yield (
            f"weights: {self.weight_bytes / 1e9:.3g} GB at {asked.bandwidth / 1e9:g} GB/s into every GPU at the same"
            f" time: {self.transfer_s:.2g} s beside the next step; an engine pauses {asked.commit_s:g} s"
        )
        if recipe.weights.carrier == "auto":
            yield recipe.weights.auto_says
        for part in self.reward:
            yield f"reward: {part.says}"
        if not self.reward:
            yield "reward: takes no time (--reward-s, --judge-s)"
        yield (
            f"a response makes {asked.tool_calls} calls of tools of {asked.tool_s:g} s, one after the other; it keeps"
            " its slot meanwhile"
        )
        yield "the processors of rewards, tools and of the reference are not among the GPUs; no worker fails"
        if recipe.algorithm.filter_groups.enable:
            yield "dynamic sampling: every group that a step takes is counted as trained"
        yield (
            f"queue: {spec.batch_groups} groups of {spec.group_size} a step, max_staleness {spec.max_staleness:g},"
            f" {recipe.rollout.on_update};"
            " processor time per call as measured"
        )
        if self.scale > 1:
            yield (
                f"simulated at 1/{self.scale} of the size, with {self.scale} times the queue's processor time a call:"
                " of fewer responses the longest is shorter, so waits for the last one are a little too short"
            )

    def splits(self) -> list[int]:
        """Rollout GPUs that are worth a try."""
        asked = self.asked
        if asked.rollout_gpus is not None:
            return [asked.rollout_gpus]
        sampling = self.batch_tokens / (self.mean + self.prompt) * self.mean / self.tokens_per_s
        balanced = asked.gpus * self.step_gpu_s / (self.step_gpu_s + sampling)
        return sorted({self.rollout_for(balanced * share) for share in SHARES})

    def rollout_for(self, trainer: float) -> int:
        """Rollout GPUs for about `trainer` trainer GPUs: whole workers, and at least one GPU on either side."""
        size = self.asked.gpus_per_worker
        most = (self.asked.gpus - 1) // size
        return size * min(most, max(1, round((self.asked.gpus - trainer) / size)))

    def try_split(self, rollout_gpus: int) -> GpuSplit:
        """Simulate it."""
        asked, spec, scale, per_call = self.asked, self.spec, self.scale, INTAKE.per_call
        assert isinstance(per_call, int)
        trainer_gpus = asked.gpus - rollout_gpus
        step_s = self.step_gpu_s / trainer_gpus
        # Scaled down, a fleet has fewer workers with shares of a slot's pace, so that no worker is lost to rounding.
        whole = rollout_gpus // asked.gpus_per_worker
        workers = max(1, round(whole / scale))
        # More workers than rows are idle, and need not be simulated.
        fleet, in_flight = workers, spec.admission_groups / scale * spec.group_size
        workers = min(workers, math.ceil(in_flight))
        slots = max(1, round(self.slots * whole / scale / fleet))
        groups = max(1, round(self.rows / scale / self.group))
        rate = self.tokens_per_s * asked.gpus_per_worker / self.slots
        setting = Setting(
            workers=workers,
            slots=slots,
            tokens_per_s=rate * slots,
            alone_speedup=asked.alone_speedup,
            lengths=self.lengths,
            group=self.group,
            batch_groups=groups,
            step_s=step_s,
            max_staleness=spec.max_staleness,
            resident_batches=spec.resident_batches,
            resident_groups=self.resident_groups * spec.group_size / scale / self.group,
            on_update=self.on_update,
            transfer_s=self.transfer_s,
            commit_s=asked.commit_s,
            sync_batches=self.sync_batches,
            reward=tuple(part.seats(scale) for part in self.reward),
            reward_intake=Intake(
                limit=math.ceil(INTAKE.limit / scale), per_call=math.ceil(per_call / scale)
            ),
            tool_calls=asked.tool_calls,
            tool_s=asked.tool_s,
            ranks=trainer_gpus,
            stages=len(spec.stages) - 1 - bool(self.reward),
            renewals_per_s=self.renewals_per_s,
            seed=asked.seed,
        )
        setting = replace(setting, call_s=setting.call_s * scale, row_s=setting.row_s * scale)
        seen = run_setting(setting)
        # Per unit of size: what the part does, the whole does as many times.
        larger = self.rows / (groups * self.group)
        seen = replace(
            seen,
            samples_per_h=seen.samples_per_h * larger,
            tokens_per_s=seen.tokens_per_s * larger,
            rollout_idle=1 - (1 - seen.rollout_idle) * workers / fleet,
            slots_held=seen.slots_held * workers / fleet,
        )
        return GpuSplit(
            rollout_gpus=rollout_gpus, trainer_gpus=trainer_gpus, step_s=step_s, outlook=seen
        )


def plan(
    recipe: Recipe, asked: PlanQuestion, tell: Callable[[int], None] = lambda rollout_gpus: None
) -> FleetPlan:
    """Try several splits, then those beside the best; `tell` hears of each before. Raises UserError for no answer."""
    case = _Case(recipe, asked)
    tried: dict[int, GpuSplit] = {}

    def attempt(rollout_gpus: int) -> None:
        tell(rollout_gpus)
        tried[rollout_gpus] = case.try_split(rollout_gpus)

    for rollout_gpus in case.splits():
        attempt(rollout_gpus)

    def best() -> GpuSplit:
        return max(tried.values(), key=lambda split: split.outlook.samples_per_h)

    ordered = sorted(tried)
    at = ordered.index(best().rollout_gpus)
    for beside in ordered[max(0, at - 1) : at] + ordered[at + 1 : at + 2]:
        between = case.rollout_for(asked.gpus - (beside + ordered[at]) / 2)
        if between not in tried:
            attempt(between)
    chosen = best()
    return FleetPlan(
        best=chosen,
        tried=tuple(tried[gpus] for gpus in sorted(tried)),
        scale=case.scale,
        advice=ADVICE[chosen.bottleneck],
        assumptions=case.assumptions,
    )


ADVICE: Final = {
    "queue": "the queue's processor is busy: a longer queue.lease_ttl_s, or fewer and larger groups",
    "weight transfer": "the trainer waits until a version has travelled: more bandwidth, bfloat16, or fewer steps",
    "trainer": "the trainer never waits: only more or faster trainer GPUs give more",
    "reward": "the reward scores as much at once as it can: more reward.workers, a higher concurrency, an `async def`"
    " function, or one that is faster",
    "slots": "every slot holds a row while engines idle, since tools work: more rollout.slots, or faster tools",
    "rollout": "the engines never idle: only more or faster rollout GPUs give more",
    "long responses": "both sides wait for the last responses of a batch: a higher queue.max_staleness, more"
    " prompts a batch, or a lower data.max_response_length",
}
"""Advice for each bottleneck."""


def _said(value: object, source: str = "assumed") -> str:
    if value:
        return "given"
    return source if source == "assumed" else f"assumed: {source}"


def _params(model: ModelConfig) -> float:
    """The parameters that the heads of the model's safetensors name; 0 if there are none."""
    total = 0
    for file in sorted(Path(model.path).glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                (size,) = struct.unpack("<Q", opened.read(8))
                head = json.loads(opened.read(min(size, 1 << 26)))
            total += sum(math.prod(each["shape"]) for name, each in head.items() if name[0] != "_")
        except (OSError, ValueError, struct.error, KeyError) as error:
            raise UserError(f"{file}: no safetensors file: {error}") from error
    return float(total)
