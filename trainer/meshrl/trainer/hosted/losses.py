"""The losses that Tinker names, in the workshop's own functions: sums over tokens, never means.

Position i of `tokens` predicts `target_tokens[i]`, so each input has one number for each position:

    cross_entropy        -Σ w log p
    importance_sampling  -Σ ρ A                                    ρ = p / q, q = exp(logprobs)
    ppo                  -Σ min(ρ A, clip(ρ, low, high) A)
    cispo                -Σ sg(clip(ρ, low, high)) A log p
    dro                  -Σ (A log p - β/2 (log p - log q)²)       at every position, those of the prompt too
    gspo                 ppo with one ratio of a row: exp of the mean log ratio where `sequence_ratio_mask` is not 0
    stable_reinforce     -Σ m (A log p - κ/2 (log p - log q)²)

Log ratios beyond 20 (a row's: above 10) count as that. Of `stable_reinforce` we found no formula: Tinker's pages call
it a REINFORCE variant with a `kl_coeff` that is stable where the sampler differs. This one has no ratio to explode,
and a quadratic penalty, at sampled tokens alone (m), that pulls to the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from meshrl.contract.errors import UserError
from meshrl.contract.types import LossName, Pass, TrainingExample
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses import cispo, dro, gspo, reinforce, vanilla
from meshrl.trainer.algorithms.losses._types import LossInputs, PolicyLoss
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import ActorConfig, PolicyLossConfig

TARGETS = "target_tokens"
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
_RATIO = ("logprobs", "advantages")
_NO_DUAL_CLIP = 1e30
_MOST_TARGETS = 256
"""Targets of one position: their log-probs are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """Names that a loss reads."""

    wants: tuple[str, ...] = _RATIO
    may: tuple[str, ...] = ()
    settings: Mapping[str, float] = field(default_factory=dict)
    """Their defaults."""


_LOSSES: Mapping[LossName, _Loss] = {
    "cross_entropy": _Loss(wants=(), may=("weights",)),
    "importance_sampling": _Loss(),
    "ppo": _Loss(may=(LOW, HIGH), settings={LOW: 0.8, HIGH: 1.2}),
    "cispo": _Loss(may=(LOW, HIGH), settings={LOW: 0.0, HIGH: 4.0}),
    "dro": _Loss(settings={"beta": 0.1}),
    "gspo": _Loss(
        wants=(*_RATIO, "sequence_ratio_mask"),
        may=(LOW, HIGH),
        settings={LOW: 1 - 3e-4, HIGH: 1 + 4e-4},
    ),
    "stable_reinforce": _Loss(wants=(*_RATIO, "mask"), settings={"kl_coeff": 0.01}),
}


class _EveryToken(Aggregator):
    """The plain sum: a mask is a loss's own affair."""

    def __call__(self, loss: torch.Tensor, ragged: Ragged) -> torch.Tensor:
        return loss.sum()


def check(request: Pass, *, vocabulary: int, longest: int) -> None:
    """Refuse what cannot be computed, whatever the model's weights are.

    Raises:
        UserError: names the example and what it lacks, has too much of, or has in a wrong shape.
    """
    known = _LOSSES.get(request.loss)
    if known is None:
        raise UserError(
            f"loss_fn {request.loss!r} is not known; want one of {', '.join(_LOSSES)}. Losses of your own are"
            " computed by Tinker's SDK (forward_backward_custom)"
        )
    if not request.examples:
        raise UserError("a pass over no examples; want at least one")
    _check_settings(request.loss, known, request.loss_settings)
    first = request.examples[0].loss_inputs
    for index, example in enumerate(request.examples):
        fault = _fault(example, request.loss, known, vocabulary, longest)
        if not fault and example.loss_inputs.keys() != first.keys():
            fault = f"has {', '.join(example.loss_inputs)}, and example 0 {', '.join(first)}"
        if not fault and example.loss_inputs[TARGETS].shape[1:] != first[TARGETS].shape[1:]:
            fault = f"{TARGETS} has another number of targets of each token than in example 0"
        if fault:
            raise UserError(f"example {index}: {fault}")


def _check_settings(name: str, known: _Loss, given: Mapping[str, float]) -> None:
    for key, value in given.items():
        if key not in known.settings:
            wanted = ", ".join(known.settings) or "no setting"
            raise UserError(f"loss_fn_config: {name} knows no {key!r}; it takes {wanted}")
        if not isinstance(value, float | int) or not 0 <= value < math.inf:
            raise UserError(f"loss_fn_config: {key} is {value!r}; want a number of at least 0")
    low, high = (given.get(key, known.settings.get(key, 0.0)) for key in (LOW, HIGH))
    if low > high:
        raise UserError(f"loss_fn_config: {LOW} {low} is above {HIGH} {high}")


def _fault(example: TrainingExample, name: str, known: _Loss, vocabulary: int, longest: int) -> str:
    """Why an example cannot be computed; mostly empty."""
    tokens, given = example.tokens, example.loss_inputs
    if tokens.ndim != 1 or tokens.dtype != np.int32 or not len(tokens):
        return f"tokens is {_form(tokens)}; want int32 and at least one"
    if len(tokens) > longest:
        return f"{len(tokens)} tokens; the model reads at most {longest}"
    for key in (TARGETS, *known.wants):
        if key not in given:
            return f"{name} wants {key}"
    for key in given:
        if key not in (TARGETS, *known.wants, *known.may):
            return f"{name} does not read {key}"
    targets = given[TARGETS]
    several = targets.ndim == 2 and name == "cross_entropy"
    if several and not 1 <= targets.shape[1] <= _MOST_TARGETS:
        return f"{targets.shape[1]} targets of each token; want 1 to {_MOST_TARGETS}"
    if targets.dtype.kind not in "iu" or len(targets) != len(tokens) or targets.ndim > 1 + several:
        return f"{TARGETS} is {_form(targets)}; want int64[{len(tokens)}], one of each token"
    for key, values in given.items():
        if key != TARGETS and (values.shape != targets.shape or values.dtype.kind not in "iuf"):
            return f"{key} is {_form(values)}; want float32{list(targets.shape)} as {TARGETS}"
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return f"{key} has a number that is not finite"
    for key, ids in {"tokens": tokens, TARGETS: targets}.items():
        if ids.min() < 0 or ids.max() >= vocabulary:
            return f"{key} has a token outside the vocabulary, which has {vocabulary}"
    if name == "gspo" and not given["sequence_ratio_mask"].any():
        return "sequence_ratio_mask is 0 everywhere; want 1 at sampled tokens"
    if LOW in given and HIGH in given and (given[LOW] > given[HIGH]).any():
        return f"{LOW} is above {HIGH} somewhere"
    return ""


def _form(values: np.ndarray[Any, Any]) -> str:
    return f"{values.dtype}{list(values.shape)}"


def loss_of(
    request: Pass, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], lengths: torch.Tensor
) -> torch.Tensor:
    """The sum over a pack's tokens.

    Args:
        request: A pass that `check` has let through.
        logprobs: float32[N], or [N, K], of the targets of the pack's rows, one after the other; has the gradient.
        inputs: float32 of the same shape, the rows' loss inputs.
        lengths: int64[B]: tokens of each row.
    """
    if request.loss == "cross_entropy":
        weights = inputs.get("weights")
        return -(logprobs if weights is None else logprobs * weights).sum()
    name, mask = request.loss, inputs.get("sequence_ratio_mask")
    every = torch.ones(len(logprobs), dtype=torch.bool, device=logprobs.device)
    given = LossInputs(
        ragged=Ragged.from_lengths(lengths, every if mask is None else mask != 0),
        logprobs=logprobs,
        old_logprobs=inputs["logprobs"],
        advantages=inputs["advantages"],
        rollout_is_weights=inputs.get("mask"),
    )
    settings: dict[str, Any] = {**_LOSSES[name].settings, **request.loss_settings}
    settings |= {key: inputs[key] for key in (LOW, HIGH) if key in inputs}
    penalty = settings.get("beta", settings.get("kl_coeff", 0.0))
    # Not validated: a threshold may be a tensor, one of each token.
    config = ActorConfig.model_construct(
        clip_ratio_low=1 - settings.get(LOW, 0.0),
        clip_ratio_high=settings.get(HIGH, math.inf) - 1,
        clip_ratio_c=_NO_DUAL_CLIP,
        policy_loss=PolicyLossConfig(**({"dro_beta": penalty} if penalty else {})),
    )
    plain: PolicyLoss = dro if penalty else reinforce
    formula: Mapping[str, PolicyLoss] = {
        "importance_sampling": vanilla,
        "ppo": vanilla,
        "cispo": cispo,
        "gspo": gspo,
    }
    return formula.get(name, plain).compute(given, config, _EveryToken()).loss
