"""Files of lines: whole lines only, moved aside when full whoever is killed and whatever the disk refuses."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshrl.common.line_file import LineFile, moved_aside

LINES = [f"line {number:03}" for number in range(40)]
BYTES = 30
"""Room for three lines."""


def read(path: Path) -> list[str]:
    """Every line of a file and of those moved aside, in the order of writing."""
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda part: -int(part.suffix[1:]))
    return "".join(part.read_text() for part in (*older, path) if part.exists()).splitlines()


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """No file of this process may grow beyond `room` bytes, as on a disk without space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_file_is_moved_aside_and_the_newest_of_those_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = LineFile(path, max_bytes=BYTES, keep=2)
    for line in LINES:
        file.write(line)
    assert sorted(part.name for part in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    assert all(part.stat().st_size <= BYTES for part in tmp_path.iterdir())
    assert read(path) == LINES[-7:]


def test_without_a_number_to_keep_every_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = LineFile(path, max_bytes=BYTES, durable=True)
    for line in LINES:
        file.write(line)
    assert read(path) == LINES


class Killed(BaseException):
    """As kill -9: nothing after it runs."""


@pytest.mark.parametrize("survived", range(5))
def test_a_kill_between_any_two_renames_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    path = tmp_path / "x.log"
    for number in range(3, 0, -1):
        moved_aside(path, number).write_text(f"old {number}\n")
    path.write_text("".join(f"{line}\n" for line in LINES[:3]))
    replace, renames = Path.replace, 0

    def replace_or_die(source: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames > survived:
            raise Killed
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_or_die)
        try:
            LineFile(path, max_bytes=BYTES).write(LINES[3])
        except Killed:
            assert renames == survived + 1
    file = LineFile(path, max_bytes=BYTES)
    for line in LINES[3 + (renames == survived) :]:
        file.write(line)
    assert read(path) == ["old 3", "old 2", "old 1", *LINES]


def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("whole\nhal")
    LineFile(path).write("next")
    assert path.read_text() == "whole\nhal\nnext\n"


def test_a_full_disk_leaves_no_half_line_and_what_it_refused_is_written_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.log"
    file = LineFile(path, max_bytes=BYTES)
    file.write(LINES[0])
    with full_disk(room=12):
        for line in LINES[1:20]:
            refused = file.write_or_keep(line)
            assert refused is not None and refused.errno == errno.EFBIG
        assert path.read_text() == f"{LINES[0]}\n"
    assert file.write_or_keep(LINES[20]) is None
    assert read(path) == LINES[:21]


def test_a_file_that_cannot_be_moved_aside_grows_on(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    moved_aside(path, 1).mkdir()
    (moved_aside(path, 1) / "in the way").touch()
    file = LineFile(path, max_bytes=BYTES, keep=1)
    for line in LINES:
        file.write(line)
    assert path.read_text().splitlines() == LINES
    (moved_aside(path, 1) / "in the way").unlink()
    moved_aside(path, 1).rmdir()
    file.write("last")
    assert read(path) == [*LINES, "last"]


def test_a_next_file_that_cannot_be_opened_lets_the_last_one_grow_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.log"
    file = LineFile(path, max_bytes=BYTES)
    for line in LINES[:3]:
        file.write(line)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for line in LINES[3:10]:
            file.write(line)
    for line in LINES[10:]:
        file.write(line)
    assert read(path) == LINES
