"""Each durability of the disk store keeps its promise under kill -9 and under a power cut."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import xxhash

from meshrl.contract.errors import ConfigError, CorruptError
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.stores import _lmdb
from meshrl.transferqueue.stores.disk import DiskStore

from .durable_writer import check, commit
from .power_cut import Disk, mounted

WRITER = Path(__file__).with_name("durable_writer.py")
COMMITS = 60


class Writer:
    """The process, and the number of its last acknowledged commit."""

    def __init__(self, folder: Path, durability: str) -> None:
        self.acknowledged = 0
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), str(folder), durability],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def until(self, commits: int) -> None:
        """Read until that many commits are acknowledged."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.acknowledged = int(line)
            if self.acknowledged >= commits:
                return
        raise AssertionError("the writer ended early")

    def kill(self) -> None:
        self.process.kill()
        rest, _ = self.process.communicate()
        for line in rest.splitlines(keepends=True):
            if line.endswith("\n"):
                self.acknowledged = int(line)


@pytest.fixture
def disk() -> Iterator[Disk]:
    with TemporaryDirectory() as folder:
        try:
            opened = mounted(Path(folder))
            found = opened.__enter__()
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no loop device can be mounted here: {error}")
        try:
            yield found
        finally:
            opened.__exit__(None, None, None)


def another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has started again: its boot has another id."""
    monkeypatch.setattr(_lmdb, "boot_id", lambda: b"another boot".ljust(36))


async def commit_at(folder: Path, durability: str) -> int:
    store = DiskStore(folder, durability=durability)
    try:
        return await check(store)
    finally:
        await store.close()


@pytest.mark.parametrize("durability", ["always", "none"])
async def test_kill_9_costs_nothing_that_was_acknowledged(tmp_path: Path, durability: str) -> None:
    for round_ in range(1, 4):
        writer = Writer(tmp_path / "queue", durability)
        writer.until(writer.acknowledged + round_ * COMMITS)
        writer.kill()
        at = await commit_at(tmp_path / "queue", durability)
        assert at in (writer.acknowledged, writer.acknowledged + 1)


async def test_a_power_cut_costs_nothing_that_was_acknowledged(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = disk.mount_point / "queue"
    for _ in range(3):
        writer = Writer(folder, "always")
        writer.until(COMMITS)
        disk.cut_power()
        writer.kill()
        disk.unmount()
        disk.mount()
        with monkeypatch.context() as patched:
            another_boot(patched)
            at = await commit_at(folder, "always")
        assert writer.acknowledged <= at <= writer.acknowledged + 1


async def test_a_power_cut_under_none_is_reported_and_a_process_kill_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, "none")
    writer.until(COMMITS)
    writer.kill()
    with monkeypatch.context() as patched:
        another_boot(patched)
        with pytest.raises(CorruptError, match="when the machine went down"):
            await commit_at(tmp_path, "none")
    assert await commit_at(tmp_path, "none") >= COMMITS
    another_boot(monkeypatch)
    assert await commit_at(tmp_path, "none") >= COMMITS


async def test_a_store_goes_from_one_durability_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, "none")
    writer.until(COMMITS)
    writer.kill()
    at = await commit_at(tmp_path, "always")
    assert at >= writer.acknowledged
    another_boot(monkeypatch)
    assert await commit_at(tmp_path, "always") == at


@pytest.mark.parametrize("rebooted", [False, True])
async def test_a_store_that_0_1_wrote_under_everysec_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rebooted: bool
) -> None:
    """Its mark holds the boot and LMDB's meta pages of the last sync, to which a power cut takes the store back."""
    store = DiskStore(tmp_path)
    await store.load()
    for number in range(1, 6):
        await store.apply(commit(number))
    with (tmp_path / "data.mdb").open("rb") as data:
        pages = data.read(2 * mmap.PAGESIZE)
    await store.apply(commit(6))
    await store.close()
    (tmp_path / "unsynced").write_bytes(_lmdb.boot_id() + xxhash.xxh3_64_digest(pages) + pages)
    if rebooted:
        another_boot(monkeypatch)
    assert await commit_at(tmp_path, "always") == (5 if rebooted else 6)
    assert not (tmp_path / "unsynced").exists()


def test_the_old_name_is_refused_with_the_right_one() -> None:
    with pytest.raises((ConfigError, ValueError), match='"process" is spelled "none"'):
        QueueConfig(durability="process")  # type: ignore[arg-type]
