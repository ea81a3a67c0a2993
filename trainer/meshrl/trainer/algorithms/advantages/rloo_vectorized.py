"""RLOO under the name of verl's vectorised version, which gives a row without siblings 0.

    A_i = (n s_i - Σ_g s) / (n - 1)

Equal to `rloo` of this package; verl's own `rloo` returns the reward of a lone row instead.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, broadcast
from meshrl.trainer.algorithms.advantages.rloo import leave_one_out
from meshrl.trainer.config import AlgorithmConfig

NEEDS: tuple[str, ...] = ()
GROUP_BASELINE = True


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses; nothing in `config` is read."""
    return broadcast(batch, leave_one_out(batch.ragged, batch.scores))
