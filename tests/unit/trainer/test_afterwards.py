"""Work after a durable checkpoint: copies, the user's function, and what a failure or an end leaves."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from meshrl.contract.types import Version
from meshrl.trainer.checkpoint.afterwards import DONE, AfterCheckpoint, Wishes
from meshrl.trainer.checkpoint.kept import name_of
from meshrl.trainer.checks import check_after_checkpoint
from meshrl.trainer.config import TrainerConfig

HOOK = """
import json, pathlib, time
def note(path, step):
    with open(pathlib.Path(path).parent / "noted.jsonl", "a") as file:
        file.write(json.dumps([pathlib.Path(path).name, step]) + "\\n")
def fails(path, step):
    note(path, step)
    raise ValueError(f"no room for step {step}")
def hangs(path, step):
    note(path, step)
    time.sleep(600)
"""


def made(root: Path, step: int) -> str:
    """A directory like a checkpoint's."""
    name = name_of(Version(1, step))
    (root / name / "tensors").mkdir(parents=True)
    (root / name / "tensors" / "a").write_bytes(bytes(9) * step)
    (root / name / "state.json").write_text(json.dumps({"step": step}))
    return name


def work(root: Path, function: str | None, copies: Path | None = None) -> AfterCheckpoint:
    (root / "hook.py").write_text(HOOK)
    wishes = Wishes(
        run="a/b",
        function=None if function is None else f"{root / 'hook.py'}:{function}",
        copies=None if copies is None else str(copies),
        keep_newest=2,
        keep_every=10,
    )
    return AfterCheckpoint(root, wishes)


def noted(root: Path) -> list[object]:
    return [json.loads(line) for line in (root / "noted.jsonl").read_text().splitlines()]


async def test_each_checkpoint_is_copied_whole_and_told_and_as_many_stay_as_here(
    tmp_path: Path,
) -> None:
    root, copies = tmp_path / "checkpoints", tmp_path / "copies"
    root.mkdir()
    names = [made(root, step) for step in (10, 11, 12, 13)]
    for name in names:
        after = work(root, "note", copies)
        after.add(name)
        await after.close()
    assert noted(root) == [[name, step] for name, step in zip(names, (10, 11, 12, 13), strict=True)]
    (run,) = copies.iterdir()
    assert run.name == "a%2Fb"
    assert sorted(each.name for each in run.iterdir()) == [names[0], names[2], names[3]]
    assert (run / names[3] / "tensors" / "a").read_bytes() == bytes(9) * 13
    assert (run / names[3] / "state.json").read_text() == '{"step": 13}'
    assert (root / DONE).read_text() == names[3]


async def test_a_failure_is_a_warning_and_is_tried_again_by_the_next_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = made(tmp_path, 7)
    after = work(tmp_path, "fails")
    after.add(name)
    await after.close()
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "no room for step 7" in warning.getMessage() and name in warning.getMessage()
    again = work(tmp_path, "note")
    again.resume(name)
    await again.close()
    assert noted(tmp_path) == [[name, 7], [name, 7]]
    third = work(tmp_path, "note")
    third.resume(name)
    await third.close()
    assert len(noted(tmp_path)) == 2


async def test_a_function_that_hangs_is_ended_with_the_trainer(tmp_path: Path) -> None:
    name, newer = made(tmp_path, 1), made(tmp_path, 2)
    after = work(tmp_path, "hangs")
    after.add(name)
    await after.close(wait_s=1.0)
    after.add(newer)
    await after.close(wait_s=0.0)
    assert not (tmp_path / DONE).exists()


async def test_of_checkpoints_that_wait_the_newest_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [made(tmp_path, step) for step in (1, 2, 3)]
    after = work(tmp_path, "note")
    for name in names:
        after.add(name)
    await after.close()
    assert noted(tmp_path) == [[names[2], 3]]
    assert sum("is passed over" in each.getMessage() for each in caplog.records) == 2


async def test_a_checkpoint_that_is_gone_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    after = work(tmp_path, "note")
    after.add(name_of(Version(1, 4)))
    await after.close()
    assert any("keeps too few" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"after_checkpoint": "nowhere.py:f"},
            "trainer.after_checkpoint: no such file: nowhere.py",
        ),
        ({"after_checkpoint": "f"}, "names no function"),
        ({"copy_checkpoints_to": "what://ever"}, "trainer.copy_checkpoints_to: what://ever"),
    ],
)
def test_wrong_wishes_are_told_before_anything_starts(settings: dict[str, str], line: str) -> None:
    (problem,) = check_after_checkpoint(TrainerConfig.model_validate(settings))
    assert line in problem[1]
