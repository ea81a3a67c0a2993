"""Nothing of a box is left, whichever of its processes, or its worker, is killed."""

from __future__ import annotations

import pytest

from meshrl.sandbox.sandbox import no_bubblewrap
from tests.chaos import boxes

from ..integration.test_boxes import skip_without


@pytest.mark.skipif(no_bubblewrap() is not None, reason=str(no_bubblewrap()))
@pytest.mark.parametrize(
    ("episodes", "kills"),
    [(30, 6), pytest.param(1000, 200, marks=pytest.mark.nightly)],
)
async def test_no_process_mount_or_file_is_left_of_episodes_with_kills(
    episodes: int, kills: int
) -> None:
    await skip_without("bubblewrap")
    with boxes.open_folder() as store:
        ended = await boxes.campaign(episodes, kills, seed=1, store=store)
    assert ended["done"] > episodes // 2
    assert set(ended) <= {"done", "killed", "UnavailableError"}
