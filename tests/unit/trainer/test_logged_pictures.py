"""Pictures of logged rows: kept once, bounded, and shown as thumbnails that are drawn anew."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from meshrl.contract import codec
from meshrl.contract.errors import UserError
from meshrl.contract.rows import row_media_column
from meshrl.contract.types import Media, Task, Trajectory, Uid, Version
from meshrl.http.view import rows as view
from meshrl.trainer.trajectories.files import (
    PICTURES,
    SHOWN,
    SIDE,
    PictureFiles,
    described,
    read_back,
)
from meshrl.trainer.trajectories.log import TrajectoryLog

from ...pictures import picture

A, B = picture(0, 320, 80), picture(1)
NOT_KEPT = "0" * 64
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='document.title=1'></svg>"


def evaluated(folder: Path) -> TrajectoryLog:
    """A row of an evaluation that observed B after its prompt with A."""
    log = TrajectoryLog(folder, pictures=True)
    tokens = np.arange(4, dtype=np.int32)
    task = Task(run="run.eval", task_id="t", prompt_ids=tokens[:2], media=(A,))
    row = Trajectory(
        uid=Uid("run.eval", "t", 0),
        tokens=tokens,
        loss_mask=np.array([0, 0, 1, 1], dtype=np.uint8),
        rollout_logprobs=np.zeros(4, dtype=np.float32),
        spans=(),
        reward=1.0,
        row_media=codec.unpack_media(row_media_column([A, B, A], [A]), names=True),
    )
    log.evaluated(Version(1, 0), {"t": task}, [row])
    log.close()
    return log


def test_a_row_of_an_evaluation_names_its_pictures_and_each_is_kept_once(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    evaluated(folder)
    (row,) = parquet.read_table(folder / "eval-0.parquet").to_pylist()
    assert row["pictures"] == [A.sha256, B.sha256, A.sha256]
    assert {path.name for path in (folder / PICTURES).iterdir()} == {A.sha256, B.sha256}
    assert read_back(folder, row["pictures"]) == (A, B, A)
    with pytest.raises(UserError, match=r"this picture was not kept \(trainer.log_bytes\)"):
        read_back(folder, [NOT_KEPT])
    with pytest.raises(UserError, match="was not kept"):
        read_back(folder, ["../eval-0.parquet"])
    shown = view.row_of(tmp_path, "eval", 0, 0)["pictures"]
    assert [each["name"] for each in shown] == row["pictures"]
    assert (shown[0]["width"], shown[0]["height"], shown[0]["bytes"]) == (320, 80, len(A.data))
    drawn = base64.b64decode(shown[0]["thumbnail"].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(drawn)).size == (SIDE, SIDE // 4)


def test_a_thumbnail_has_pixels_alone_and_what_is_no_picture_is_said(tmp_path: Path) -> None:
    (tmp_path / PICTURES).mkdir()
    hostile = Media.of(A.data + b"<script>document.title='owned'</script>")
    swapped = Media.of(b"swapped")
    (tmp_path / PICTURES / swapped.sha256).write_bytes(B.data)
    for each in (hostile, Media.of(SVG)):
        (tmp_path / PICTURES / each.sha256).write_bytes(each.data)
    names = [hostile.sha256, Media.of(SVG).sha256, swapped.sha256, NOT_KEPT, "../../etc/passwd"]
    found = described(tmp_path, names, thumbnails=True)
    assert b"script" not in base64.b64decode(found[0]["thumbnail"].partition(",")[2])
    assert [each["thumbnail"] for each in found[1:]] == [None] * 4
    assert "want PNG, JPEG" in found[1]["problem"]
    assert [each["problem"] for each in found[2:]] == [
        "the file has other data than its name says",
        "not kept",
        "no name of a picture",
    ]
    many = described(tmp_path, [hostile.sha256] * (SHOWN + 4), thumbnails=True)
    assert sum(each["thumbnail"] is not None for each in many) == SHOWN
    assert {each["bytes"] for each in many} == {len(hostile.data)}


def test_those_that_no_row_had_for_longest_go(tmp_path: Path) -> None:
    folder, media = tmp_path / PICTURES, [picture(n) for n in range(4)]
    size = max(len(each.data) for each in media)
    files = PictureFiles(folder, 3 * size)
    files.keep(media[:3])
    files.keep(media[:1])
    files.keep(media[3:])
    assert {path.name for path in folder.iterdir()} == {media[n].sha256 for n in (0, 2, 3)}
    (folder / f".{NOT_KEPT}.writing").write_bytes(b"killed")
    (folder / "a note").write_bytes(bytes(9 * size))
    time.sleep(0.01)
    PictureFiles(folder, size).keep([media[1]])
    assert sorted(path.name for path in folder.iterdir()) == sorted([media[1].sha256, "a note"])
