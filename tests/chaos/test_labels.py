"""Every token says truly which weights sampled it, with updates in flight and a rollout service killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshrl.contract.types import Trajectory, Uid, Version, VersionSpan

from .labels import Labels, said_by


async def test_no_token_is_mislabelled_while_weights_change_and_a_rollout_service_dies(
    tmp_path: Path,
) -> None:
    report = await Labels(tmp_path, tokens=12_000, kills=1, seed=1).run()
    assert report["mislabelled"] == 0
    assert report["kills"] == 1 and report["mixed"], report


def test_a_wrong_label_is_noticed(tmp_path: Path) -> None:
    labels = Labels(tmp_path, tokens=1, kills=0, seed=1)
    labels.vocabulary = 100
    old, new = Version(1, 7), Version(1, 8)
    tokens = [50, 51, *[said_by(old, 100)] * 3, *[said_by(new, 100)] * 2]
    row = Trajectory(
        uid=Uid(run="labels", task="0", index=0, attempt=0),
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1, 1, 1], np.uint8),
        rollout_logprobs=np.zeros(7, np.float32),
        spans=(
            VersionSpan(version=old, start=2, end=4),
            VersionSpan(version=new, start=4, end=7),
        ),
    )
    labels._compare(row)
    assert labels.found["tokens"] == 5
    assert labels.found["mislabelled"] == 1
