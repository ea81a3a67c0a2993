"""GRPO's advantages after a pause, so that a step takes its time: `adv_estimator: plan_bench.paced_training`."""

from __future__ import annotations

import os
import time

from meshrl.trainer.algorithms.advantages import grpo
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages
from meshrl.trainer.config import AlgorithmConfig

Options, GROUP_BASELINE = grpo.Options, grpo.GROUP_BASELINE
STEP_S = "PLAN_CHECK_STEP_S"
"""The environment variable that says how long the pause is."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Pause as a larger model's step would, then compute."""
    time.sleep(float(os.environ[STEP_S]))
    return grpo.compute(batch, config)
