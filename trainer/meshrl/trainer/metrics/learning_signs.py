"""Signs that a run does not learn: what shows each, what it means, what to change. No torch.

One table for everything that warns: the trainer's log, the view on a terminal, the page of `meshrl view`, and
docs/how-to/learning-fails.md, which `make docs` writes from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import fmean
from typing import TypeAlias

PAGE = "docs/how-to/learning-fails.md"
WINDOW = 5
"""Steps that a sign looks at: one step alone is noise."""
ENTROPY_SHARE = 0.1
"""Share of the entropy at the start; the demo, which ends certain of its answers, comes to 0.25."""
KL_NATS = 1.0
"""A token, on average: at 1 the reference gives the policy's tokens a third of the probability."""
MISMATCH_NATS = 0.1
"""A token, on average. In float32 it is below 0.01 on policy, in bfloat16 some 0.02."""
LENGTH_FACTOR = 3.0

Values: TypeAlias = Callable[[str], Sequence[float]]
"""All values of a metric, step after step; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One way in which training goes wrong."""

    title: str
    metrics: tuple[str, ...]
    """Metrics in metrics.jsonl that show it."""
    command: str
    """Command that shows more."""
    means: str
    """Meaning and cause."""
    change: tuple[str, ...]
    """Remedies, the likeliest first."""
    check: Callable[[Values], str] | None = None
    """Warning while the sign holds, else empty; None: no metric shows it."""

    @property
    def key(self) -> str:
        """Anchor of its paragraph in PAGE."""
        return self.title.lower().replace(" ", "-")

    @property
    def paragraph(self) -> str:
        """Link to its paragraph."""
        return f"{PAGE}#{self.key}"


@dataclass(frozen=True, slots=True)
class LearningWarning:
    """A sign that holds now."""

    sign: Sign
    text: str

    def __str__(self) -> str:
        return f"{self.text} ({self.sign.paragraph})"


def warnings_of(values: Values) -> list[LearningWarning]:
    """The signs that hold at the newest step."""
    found = ((sign, sign.check(values)) for sign in SIGNS if sign.check is not None)
    return [LearningWarning(sign, text) for sign, text in found if text]


def _in_a_row(values: Sequence[float], holds: Callable[[float], bool]) -> int:
    """How many of the newest values `holds` is true of, one after the other."""
    return sum(1 for _ in takewhile(holds, reversed(values)))


def _zero(value: float) -> bool:
    return value == 0


def _means(values: Sequence[float]) -> list[float]:
    """The mean of each WINDOW neighbours."""
    return [fmean(values[at : at + WINDOW]) for at in range(len(values) - WINDOW + 1)]


def _no_reward(values: Values) -> str:
    least, most = values("reward/min"), values("reward/max")
    steps = min(_in_a_row(least, _zero), _in_a_row(most, _zero))
    return f"no row had a reward in the last {steps} steps" if steps >= WINDOW else ""


def _equal_groups(values: Values) -> str:
    steps = _in_a_row(values("advantages/rows_in_equal_groups"), lambda share: share == 1)
    if steps < WINDOW or _no_reward(values):
        return ""
    reward = values("reward/mean")
    mean = f" (mean {reward[-1]:.3f})" if reward else ""
    return (
        f"nothing is learned: in each of the last {steps} steps all rows of each group had the same reward{mean};"
        " is the reward constant, or the task too easy or too hard?"
    )


def _no_gradient(values: Values) -> str:
    steps = _in_a_row(values("actor/grad_norm"), _zero)
    if steps < WINDOW or _equal_groups(values) or _no_reward(values):
        return ""
    return f"nothing is learned: the gradient was 0 in each of the last {steps} steps"


def _collapse(values: Values) -> str:
    rewards = values("reward/mean")
    if len(rewards) < 2 * WINDOW:
        return ""
    means = _means(rewards)
    first, best, now = means[0], max(means), means[-1]
    noise = fmean(abs(b - a) for a, b in pairwise(rewards))
    if best - now <= max(0.5 * (best - first), 3 * noise) or best <= first:
        return ""
    return (
        f"the reward fell from {best:.3f} to {now:.3f}: more than half of what was learned is lost"
    )


def _entropy(values: Values) -> str:
    entropy = values("actor/entropy")
    if len(entropy) < 2 * WINDOW:
        return ""
    first, now = fmean(entropy[:WINDOW]), fmean(entropy[-WINDOW:])
    if first <= 0 or now >= ENTROPY_SHARE * first:
        return ""
    return f"the entropy fell from {first:.3g} to {now:.3g}: the policy hardly explores"


def _kl(values: Values) -> str:
    for name in ("actor/kl_loss", "reward/kl"):
        kl = values(name)[-WINDOW:]
        if len(kl) == WINDOW and fmean(kl) > KL_NATS:
            return f"{name} is {fmean(kl):.2f} a token: the policy is far from its reference"
    return ""


def _hacking(values: Values) -> str:
    scores = [score for score in values("val/score/mean") if math.isfinite(score)]
    means = _means(values("reward/mean"))
    if len(scores) < 3 or len(means) < WINDOW:
        return ""
    best, now = max(scores), scores[-1]
    rises = means[-1] > means[0] and means[-1] >= 0.98 * max(means)
    if not rises or now >= best - 0.1 * abs(best):
        return ""
    return f"the reward rises to {means[-1]:.3f} while the held-out score fell from {best:.3f} to {now:.3f}"


def _length(values: Values) -> str:
    lengths, longest = values("response/length_mean"), values("response/length_max")
    if len(lengths) < 2 * WINDOW:
        return ""
    first, now = fmean(lengths[:WINDOW]), fmean(lengths[-WINDOW:])
    at_limit = len(set(longest[-WINDOW:])) == 1 and longest[-1] == max(longest)
    if not at_limit or now <= LENGTH_FACTOR * first:
        return ""
    return f"responses grew from {first:.0f} to {now:.0f} tokens, and reach the limit of {longest[-1]:.0f}"


def _mismatch(values: Values) -> str:
    gaps = values("mismatch/logprob_abs_mean")[-WINDOW:]
    if len(gaps) < WINDOW or fmean(gaps) <= MISMATCH_NATS:
        return ""
    return f"log-probs of trainer and sampler differ by {fmean(gaps):.2f} a token"


def _not_finite(values: Values) -> str:
    skipped = values("actor/skipped_updates")[-WINDOW:]
    losses = values("actor/loss")[-1:]
    if any(skipped):
        return (
            f"{sum(skipped):.0f} updates of the last {len(skipped)} steps were left out: "
            f"their gradient is not finite"
        )
    return "the loss is not finite" if losses and not math.isfinite(losses[0]) else ""


SIGNS: tuple[Sign, ...] = (
    Sign(
        title="No reward",
        metrics=("reward/min", "reward/max", "reward_component/<name>"),
        command="meshrl rows RUN --best",
        means="Every row scores 0. Either no answer is right yet, or the reward function never finds "
        "one: it looks for "
        "another format, or compares with the wrong column.",
        change=(
            "Read some responses beside `ground_truth`. Are there right ones that score 0? Then mend the reward; "
            "`meshrl reward submit` does it during the run.",
            "Is the format never met? Say it in the prompt, reward the format by itself, or warm up "
            "with `meshrl sft`.",
            "Is the task too hard? Use easier prompts first (`data.curriculum`), a larger `rollout.n`, "
            "a stronger model.",
        ),
        check=_no_reward,
    ),
    Sign(
        title="Equal groups",
        metrics=("advantages/rows_in_equal_groups", "reward/std"),
        command="meshrl rows RUN --step all --where 'advantage == 0'",
        means="All rows of a group have the same reward, so their advantages are 0: such a group teaches nothing.",
        change=(
            "Leave such groups out: `algorithm.filter_groups.enable: true` takes others for them.",
            "More rows a prompt (`rollout.n`), a higher `rollout.temperature`.",
            "Prompts of other difficulty, or a reward with more than two values.",
        ),
        check=_equal_groups,
    ),
    Sign(
        title="No gradient",
        metrics=("actor/grad_norm", "advantages/abs_mean", "actor/lr"),
        command="meshrl rows RUN --where 'advantage != 0'",
        means="The gradient is exactly 0 though rewards differ: rows are alone in their groups, or all "
        "tokens are masked.",
        change=(
            "`rollout.n` of at least 2 with a group estimator (`advantages/rows_alone` is then 0).",
            "Look at `algorithm.rollout_correction`: it may reject every row (`rollout_corr/*`).",
        ),
        check=_no_gradient,
    ),
    Sign(
        title="Collapse",
        metrics=("reward/mean", "val/score/mean", "actor/grad_norm", "actor/pg_clipfrac"),
        command="meshrl rows RUN --worst",
        means="The reward rose and fell again. Mostly the updates are too large, or too far off policy.",
        change=(
            "Go back: `meshrl export TARGET --checkpoint CHECKPOINT` with one of before, and start from TARGET.",
            "Half of `actor.optim.lr`, or more warm-up (`actor.optim.lr_warmup_steps`); fewer `actor.ppo_epochs`.",
            "Less staleness (`queue.max_staleness`), or `algorithm.rollout_correction`.",
            "A KL term (`actor.use_kl_loss`) holds the policy near its reference.",
        ),
        check=_collapse,
    ),
    Sign(
        title="Entropy collapse",
        metrics=("actor/entropy",),
        command="meshrl rows RUN --json --limit 0 | jq .response | sort | uniq -c | sort -rn | head",
        means="The policy is certain of nearly every token, so the rows of a group are the same, and "
        "nothing is learned "
        "any more. Late in an easy task it is no fault.",
        change=(
            "A higher upper clip (`actor.clip_ratio_high: 0.28`, DAPO), `actor.policy_loss.loss_mode: "
            "clip_cov` or `kl_cov`.",
            "An entropy bonus (`actor.entropy_coeff: 0.001`); a smaller `actor.optim.lr`.",
            "`rollout.temperature: 1.0`: a lower one sharpens what is learned from.",
        ),
        check=_entropy,
    ),
    Sign(
        title="KL blow-up",
        metrics=("actor/kl_loss", "reward/kl", "actor/ppo_kl"),
        command="meshrl view RUN",
        means="The policy is far from its reference: what the model could do before is probably lost.",
        change=(
            "A larger `actor.kl_loss_coef`, or `algorithm.kl_ctrl` that adapts it.",
            "A smaller `actor.optim.lr`; `actor.optim.clip_grad: 1.0`.",
            "`actor.kl_loss_type: low_var_kl`: the plain estimator explodes first.",
        ),
        check=_kl,
    ),
    Sign(
        title="Reward hacking",
        metrics=(
            "reward/mean",
            "val/score/mean",
            "reward_component/<name>",
            "response/length_mean",
        ),
        command="meshrl rows RUN --best",
        means="The reward rises, and what it stands for does not: the held-out score falls, or the best "
        "rows are no good "
        "answers when a person reads them.",
        change=(
            "Read the best rows of the newest step, and score with a stricter reward; compare both on live rows with "
            "`meshrl reward compare`.",
            "Split the reward into components and look which one rises.",
            "A KL term; stop earlier, at the best held-out score.",
        ),
        check=_hacking,
    ),
    Sign(
        title="Length runaway",
        metrics=("response/length_mean", "response/length_max"),
        command="meshrl rows RUN --where 'outcome == \"truncated\"'",
        means="Responses grow until `data.max_response_length` cuts them: the loss or the reward "
        "prefers long rows, or the "
        "policy has forgotten how to end.",
        change=(
            "`algorithm.overlong_buffer.enable: true` makes long answers cost something.",
            "`actor.loss_agg_mode: seq-mean-token-sum-norm` with `algorithm.adv_estimator: dr_grpo`: no length bias.",
            "Is the end token in the policy's tokenizer, and not masked?",
        ),
        check=_length,
    ),
    Sign(
        title="Mismatch",
        metrics=("mismatch/logprob_abs_mean", "mismatch/kl", "mismatch/replica_<name>/kl"),
        command="meshrl rows RUN --where 'mismatch > 0.1'",
        means="Trainer and engine compute other probabilities for the same tokens. Some comes from staleness "
        "(`mismatch/version_<step>/kl` tells it apart); the rest is numerics, another sampling "
        "distribution, or one bad "
        "replica.",
        change=(
            "Which replica is it (`mismatch/replica_<name>/kl`)? `meshrl fleet drain` it.",
            "`algorithm.rollout_correction` weights rows by it; `weights.dtype: float32` on both sides "
            "shows whether it is "
            "numerics.",
            "The trainer knows of samplers the temperature only (not `rollout.top_p`, `top_k`, `min_p` …): "
            "see engines.md.",
        ),
        check=_mismatch,
    ),
    Sign(
        title="Not finite",
        metrics=("actor/skipped_updates", "actor/loss", "actor/grad_norm"),
        command="meshrl replay RUN --step N",
        means="A loss or a gradient is infinite or no number. The update is left out, and the weights "
        "stay as they were.",
        change=(
            "A reward that is not finite is refused by the reward service; look at `importance_weights` of the rows.",
            "`algorithm.rollout_correction` with a threshold; a smaller `actor.optim.lr`; "
            "`model.param_dtype: float32` as a trial.",
        ),
        check=_not_finite,
    ),
    Sign(
        title="Out of memory",
        metrics=("batch/tokens", "response/length_max"),
        command="tail runs/NAME/logs/trainer.log; meshrl status",
        means="A service is killed (exit code 137), or says `out of memory`; `up` starts it again, and "
        "it dies at the same "
        "place.",
        change=(
            "The trainer: a smaller `actor.ppo_max_token_len_per_gpu` (tokens of one forward pass), "
            "`model.enable_gradient_checkpointing: true`, more `trainer.nproc`, LoRA.",
            "The engine: fewer `rollout.slots`, a shorter `data.max_response_length`.",
            "The queue: `queue.resident_batches` bounds what it holds.",
        ),
    ),
    Sign(
        title="Nothing moves",
        metrics=("time/waiting_s", "time/step_s"),
        command="meshrl why-waiting",
        means="No step is made. The queue and the workers can say what waits, and for which service: see stuck.md.",
        change=("[Find out why a run is stuck](stuck.md).",),
    ),
)
"""In the order in which a person should look."""

WATCHED = frozenset(name for sign in SIGNS for name in sign.metrics if "<" not in name)
"""Every metric that a check reads."""
