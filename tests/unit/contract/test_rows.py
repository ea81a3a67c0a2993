"""What a stage writes back of a trajectory."""

from __future__ import annotations

import numpy as np

from meshrl.contract.rows import rollout_write
from meshrl.contract.types import Outcome, Trajectory, Uid, Version, VersionSpan


def test_the_oldest_version_of_a_row_is_that_of_the_earliest_step() -> None:
    before, after = Version(1, 3), Version(2, 0)  # the trainer went back to its start in between
    trajectory = Trajectory(
        uid=Uid("run", "task", 0, 0),
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=np.ones(6, np.uint8),
        rollout_logprobs=np.zeros(6, np.float32),
        spans=(
            VersionSpan(version=before, start=0, end=4),
            VersionSpan(version=after, start=4, end=6),
        ),
    )
    facts = rollout_write(trajectory, Outcome.OK, "stop", after).facts
    assert facts is not None
    assert (facts.oldest, facts.newest) == (after, after)
