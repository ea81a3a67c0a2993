"""GDPO: every reward component is normalised within its group before they are added up.

Liu et al. 2026, https://arxiv.org/abs/2601.05242:

    A = whiten(Σ_k w_k GRPO(r^k))        over the trained tokens of the whole batch

With components added first, as GRPO has it, different combinations of components collapse into equal advantages.
"""

from __future__ import annotations

from pydantic import Field

from meshrl.common.config import Config
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    group_metrics,
)
from meshrl.trainer.algorithms.advantages.grpo import Options as GrpoOptions
from meshrl.trainer.algorithms.advantages.grpo import group_relative
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.algorithms.ragged import whiten


class Options(Config):
    """Keys of `algorithm`."""

    gdpo_reward_keys: list[str] = Field(default_factory=list)
    """Reward components that GDPO normalises one by one; none takes the reward itself."""
    gdpo_reward_weights: list[float] = Field(default_factory=list)
    """One weight per key; none weighs each 1."""


NEEDS = ("reward_components",)
GROUP_BASELINE = True


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Whitened advantages; without `gdpo_reward_keys` the reward itself is the only component.

    Raises:
        ConfigError: a key that no reward reports, or weights that do not match the keys.
    """
    own = options(config, Options)
    keys, weights = own.gdpo_reward_keys, own.gdpo_reward_weights
    missing = [key for key in keys if key not in batch.reward_components]
    if missing:
        known = ", ".join(sorted(batch.reward_components)) or "none"
        raise ConfigError(
            f"algorithm.gdpo_reward_keys: no component {missing[0]!r} (have: {known})"
        )
    if weights and len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(keys)} keys"
        )
    components = [batch.reward_components[key] for key in keys] or [batch.scores]
    w = weights if weights and keys else [1.0] * len(components)
    divide = options(config, GrpoOptions).norm_adv_by_std_in_grpo
    ragged = batch.ragged
    row_advantages = torch.zeros(ragged.num_rows, dtype=torch.float64, device=ragged.mask.device)
    for w_k, r_k in zip(w, components, strict=True):
        row_advantages += w_k * group_relative(
            ragged,
            r_k,
            divide_by_std=divide,
            conventions=config.conventions,
        )
    A = whiten(ragged, ragged.to_tokens(row_advantages).float())
    return Advantages(advantages=A, returns=A, metrics=group_metrics(batch))
