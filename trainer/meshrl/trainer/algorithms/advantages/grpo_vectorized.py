"""GRPO under the name of verl's vectorised version: the same numbers as `grpo`.

    A_i = (s_i - mean_g(s)) / (std_g(s) + ε)

It exists so that `algorithm.adv_estimator: grpo_vectorized` of a verl recipe works unchanged.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages import grpo
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages
from meshrl.trainer.config import AlgorithmConfig

NEEDS: tuple[str, ...] = ()
GROUP_BASELINE = True


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """The advantages that `grpo` computes."""
    return grpo.compute(batch, config)
