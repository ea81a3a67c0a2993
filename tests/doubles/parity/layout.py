"""Between verl's padded [B, T] arrays, labels and settings, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import ActorConfig, AggregationMode, RolloutCorrectionConfig
from tests.doubles.parity.cases import Array, Case

CORRECTION_DEFAULTS: Mapping[str, Any] = {"rollout_is": "sequence"}
ACTOR_DEFAULTS: Mapping[str, Any] = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
}
"""verl's defaults where ours differ."""
POLICY_LOSS_KEYS = frozenset({"tau_pos", "tau_neg", "rollout_correction"})
"""Recorded beside the actor's settings; ours stand with the policy loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """An adapter's results, by verl's names."""

    outputs: Mapping[str, Tensor | Array] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def group_numbers(labels: Array) -> Tensor:
    """int64[B]: integers and numeric strings are the numbers, other labels are counted off."""
    if labels.dtype.kind in "iub":
        return torch.from_numpy(labels.astype(np.int64))
    if labels.dtype.kind == "f" and np.allclose(labels, np.rint(labels), rtol=0, atol=1e-6):
        return torch.from_numpy(np.rint(labels).astype(np.int64))
    try:
        return torch.from_numpy(labels.astype(np.int64))
    except ValueError:
        return torch.from_numpy(np.unique(labels, return_inverse=True)[1].astype(np.int64))


def ragged_of(case: Case, mask: str = "response_mask", labels: str | None = "index") -> Ragged:
    """Rows of T tokens each, padding masked."""
    groups = None
    if labels is not None and labels in case.inputs:
        # Negative or huge labels are fine for us once they are counted off.
        groups = torch.unique(group_numbers(case.inputs[labels]), return_inverse=True)[1]
    return Ragged.from_padded(case.tensor(mask), groups)


def flat(case: Case, name: str) -> Tensor:
    """An input [B, T] as [B·T]."""
    return case.tensor(name).reshape(-1)


def optional_flat(case: Case, name: str) -> Tensor | None:
    """The same for an input that may be absent."""
    return flat(case, name) if name in case.inputs else None


def padded(values: Tensor, case: Case, mask: str = "response_mask") -> Tensor:
    """[B·T] as [B, T]."""
    return values.reshape(case.inputs[mask].shape)


def actor_config(case: Case) -> ActorConfig:
    """The recorded ActorConfig over verl's defaults, under verl's conventions."""
    fields = case.config()
    fields.pop("global_batch_info", None)
    policy_loss = {
        key: value
        for key, value in dict(fields.pop("policy_loss", None) or {}).items()
        if key != "_class"
    }
    for key in POLICY_LOSS_KEYS & set(fields):
        policy_loss[key] = fields.pop(key)
    correction = dict(policy_loss.pop("rollout_correction", None) or {})
    correction.pop("_class", None)
    policy_loss["rollout_correction"] = correction_config(correction)
    return ActorConfig.model_validate(
        {**ACTOR_DEFAULTS, **fields, "conventions": "verl", "policy_loss": policy_loss}
    )


def correction_config(fields: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """A recorded RolloutCorrectionConfig over verl's defaults."""
    return RolloutCorrectionConfig(**{**CORRECTION_DEFAULTS, **fields})


def aggregator(
    mode: AggregationMode, counts: Mapping[str, Any], width: int, ragged: Ragged
) -> Aggregator:
    """Verl's aggregation: the norm divides by the padded width, an empty batch by 0."""
    scale = counts.get("loss_scale_factor")
    tokens = counts.get("batch_num_tokens")
    rows = counts.get("global_batch_size")
    dp_size = counts.get("dp_size", 1)
    if dp_size == 1 and not bool(ragged.mask.any()):
        tokens, rows = tokens or float(ragged.num_valid), rows or 0.0
    return Aggregator(
        mode=mode,
        batch_num_tokens=tokens,
        global_batch_size=rows,
        loss_scale_factor=float(width) if scale is None else scale,
        dp_size=dp_size,
    )
