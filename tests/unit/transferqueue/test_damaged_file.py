"""A disk store whose file was changed, cut or written by another version: one clear error, or rows that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from meshrl.contract.errors import CorruptError, UserError, WaitTimeoutError
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.admin import restore_backup
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import FORMAT, Operation, Table
from meshrl.transferqueue.stores.disk import COMMITS, STAMP, DiskStore

from .damaged_file import OVERFLOW, PAGE, make_store_that_kills_its_reader, pages

LAST_PAGE = 136
"""Offset in a meta page of the number of the last page, followed by that of the commit."""
ARCHIVE = Path(__file__).parents[2] / "fixtures" / "run-0.1.tar.gz"


async def stored(folder: Path) -> bytes:
    """The file of a closed store with frames of several pages."""
    actors = Actors(await TransferQueue.open(DiskStore(folder)))
    await actors.start(spec(max_staleness=50.0, lease_ttl_s=1e6))
    await actors.feed(tasks(40, extra_info={"story": "once upon a time " * 400}))
    await actors.write(await actors.lease("rollout", limit=40))
    await actors.queue.close()
    return (folder / "data.mdb").read_bytes()


def last_page(folder: Path) -> int:
    """Its number, as LMDB's newest meta page says."""
    with (folder / "data.mdb").open("rb") as file:
        data = file.read(2 * PAGE)
    metas = [struct.unpack_from("<QQ", data, at + LAST_PAGE) for at in (0, PAGE)]
    return int(max(metas, key=lambda meta: meta[1])[0])


async def refused(folder: Path, why: str, error: type[Exception] = CorruptError) -> None:
    with pytest.raises(error, match=why) as raised:
        await TransferQueue.open(DiskStore(folder))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("place", ["another's", "one bit"])
async def test_damaged_rows_leave_and_the_others_reach_their_workers(
    tmp_path: Path, place: str
) -> None:
    """Values in each other's place in the file, or with another bit: those of tasks, and those of frames."""
    data = bytearray(await stored(tmp_path))
    one, other, *_ = pages(data, OVERFLOW, b"once upon")
    if place == "another's":
        data[one : one + PAGE], data[other : other + PAGE] = (
            data[other : other + PAGE],
            data[one : one + PAGE],
        )
    else:
        data[one + PAGE // 2] ^= 1
        for at in range(len(data)):
            if data.startswith(b"answer to run/t3/", at):
                data[at] ^= 1
    (tmp_path / "data.mdb").write_bytes(data)
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path)))
    actors.version = (await actors.queue.run_state("run")).published
    before = await actors.queue.ledger("run")
    leased = 0
    for stage in ("rollout", "reward"):
        with contextlib.suppress(WaitTimeoutError):
            lease = await actors.queue.lease(
                ["run"], stage, worker="w", limit=99, version=actors.version, wait_s=0
            )
            leased += sum(len(group.indices) for group in lease.blocks)
    letters = await actors.queue.dead_letters("run")
    assert letters and leased, "the damaged rows leave, the others reach their workers"
    for letter in letters:
        assert re.search(
            r"damaged in the store: .*(do not match their checksum|the store returns)",
            letter.reason,
        )
    if place == "one bit":
        assert any(letter.uid.task == "t3" for letter in letters)
    after = await actors.queue.ledger("run")
    assert after.balanced and after.admitted == before.admitted
    await actors.queue.close()


async def test_a_frame_with_another_byte_leaves_the_batch_and_the_step_goes_on(
    tmp_path: Path,
) -> None:
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path)))
    await actors.start(spec(max_staleness=3.0, batch_groups=3))
    await actors.feed(tasks(6))
    await actors.work()
    await actors.queue.close()
    file = tmp_path / "data.mdb"
    data = file.read_bytes()
    assert b"answer to run/t1/1" in data
    file.write_bytes(data.replace(b"answer to run/t1/1", b"answer to run/t1/9"))
    actors.queue = await TransferQueue.open(DiskStore(tmp_path))
    batch = await actors.take(0, groups=3)
    assert [group.task for group in batch.groups] == ["t0", "t2"]
    assert (
        len(await actors.queue.fetch_rows("run", [row.uid for row in batch.rows], ["tokens"])) == 4
    )
    await actors.settle(0)
    await actors.publish(1)
    await actors.commit(1)
    letters = await actors.queue.dead_letters("run")
    assert {letter.uid.task for letter in letters} == {"t1"}
    assert all(letter.reason.startswith("damaged in the store: task t1, ") for letter in letters)
    ledger = await actors.ledger()
    assert (ledger.trained, sum(ledger.dead_lettered.values())) == (4, len(letters))
    await actors.queue.close()


@pytest.mark.parametrize("left", ["a page less", "a byte less", "half", "three pages"])
async def test_a_file_that_is_shorter_than_its_meta_page_says_is_refused(
    tmp_path: Path, left: str
) -> None:
    await stored(tmp_path)
    end = (last_page(tmp_path) + 1) * PAGE
    sizes = {"a page less": end - PAGE, "a byte less": end - 1, "half": end // 2}
    data = tmp_path / "data.mdb"
    os.truncate(data, sizes.get(left, 3 * PAGE))
    before = data.read_bytes()
    why = rf"{data} is cut short: .* says {end}: restore a backup \(meshrl queue restore\)"
    await refused(tmp_path, why)
    assert data.read_bytes() == before


@pytest.mark.parametrize("durability", ["always", "none"])
async def test_no_commit_leaves_a_file_that_is_shorter_than_its_meta_page_says(
    tmp_path: Path, durability: str
) -> None:
    """LMDB does so in one commit of ten: it counts pages that it takes and frees in the same transaction."""
    dice = random.Random(0)
    store = DiskStore(tmp_path, durability=durability)
    await store.load()
    data = tmp_path / "data.mdb"
    live: list[bytes] = []
    for step in range(60):
        keys = [b"%d %d" % (step, number) for number in range(dice.choice((1, 5, 40, 200)))]
        operations = [
            Operation(table, key, bytes(dice.choice((50, 400, 1500))))
            for key in keys
            for table in Table
        ]
        gone = live[: dice.choice((3, 50, 300))] if dice.random() < 0.6 else []
        operations += [Operation(table, key, None) for key in gone for table in Table]
        live = [*live[len(gone) :], *keys]
        await store.apply(operations)
        assert data.stat().st_size >= (last_page(tmp_path) + 1) * PAGE, f"commit {step}"
    await store.close()
    await (again := DiskStore(tmp_path)).load()
    await again.close()


async def test_a_page_that_ends_its_reader_is_what_the_supervisor_is_told_of(
    tmp_path: Path,
) -> None:
    await make_store_that_kills_its_reader(tmp_path)
    program = (
        "import asyncio, sys; from pathlib import Path;"
        "from meshrl.transferqueue.stores.disk import DiskStore;"
        "asyncio.run(DiskStore(Path(sys.argv[1])).load())"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGABRT


async def test_a_store_whose_tables_are_gone_is_no_fresh_one(tmp_path: Path) -> None:
    await stored(tmp_path / "kept")
    lmdb.open(str(tmp_path / "empty"), max_dbs=2).close()
    shutil.copy(tmp_path / "empty" / "data.mdb", tmp_path / "kept")
    await refused(tmp_path / "kept", "no readable .* restore a backup")


def stamp(folder: Path, number: int) -> None:
    with lmdb.open(str(folder), max_dbs=2) as environment:
        meta = environment.open_db(b"meta")
        with environment.begin(db=meta, write=True) as transaction:
            transaction.put(STAMP, json.dumps({"format": number}).encode())


def stamped(folder: Path) -> object:
    with lmdb.open(str(folder), max_dbs=2, readonly=True, lock=False) as environment:
        meta = environment.open_db(b"meta", create=False)
        with environment.begin(db=meta) as transaction:
            return json.loads(transaction.get(STAMP))["format"]


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "lock.mdb"}


@pytest.mark.parametrize("frames", [True, False])
async def test_a_store_with_long_rows_beside_lmdb_is_refused_as_it_is(
    tmp_path: Path, frames: bool
) -> None:
    """Format 5, or the backup of one: its file of frames may be lost, and its values may be places in it."""
    await stored(tmp_path / "queue")
    stamp(tmp_path / "queue", 5)
    if frames:
        (tmp_path / "queue" / "frames.dat").write_bytes(bytes(PAGE))
    before = contents(tmp_path / "queue")
    why = "format 5, with long rows in frames.dat, .* only meshrl at commit c6584707 reads it"
    await refused(tmp_path / "queue", why, UserError)
    target = DiskStore(tmp_path / "new")
    with pytest.raises(UserError, match=why):
        await restore_backup(tmp_path / "queue", target)
    await target.close()
    assert contents(tmp_path / "queue") == before
    assert not (tmp_path / "new").exists()


async def test_a_store_of_0_1_is_read_as_it_is_and_changes_with_the_first_commit(
    tmp_path: Path,
) -> None:
    shutil.unpack_archive(ARCHIVE, tmp_path)
    folder = tmp_path / "old-run" / "run" / "queue"
    data = folder / "data.mdb"
    before = data.read_bytes()
    queue = await TransferQueue.open(DiskStore(folder))
    ledger = await queue.ledger("tiny")
    await queue.close()
    assert data.read_bytes() == before and stamped(folder) == FORMAT
    queue = await TransferQueue.open(DiskStore(folder))
    await queue.acquire("tiny", "trainer")
    await queue.close()
    assert stamped(folder) == 6
    assert not (folder / COMMITS).exists()
    queue = await TransferQueue.open(DiskStore(folder))
    assert await queue.ledger("tiny") == ledger
    await queue.close()


async def test_a_sound_store_of_0_1_may_be_shorter_than_its_meta_page_says(tmp_path: Path) -> None:
    shutil.unpack_archive(ARCHIVE, tmp_path)
    folder = tmp_path / "old-run" / "run" / "queue"
    data = bytearray((folder / "data.mdb").read_bytes())
    for at in (LAST_PAGE, PAGE + LAST_PAGE):
        (last,) = struct.unpack_from("<Q", data, at)
        struct.pack_into("<Q", data, at, last + 40)
    (folder / "data.mdb").write_bytes(data)
    assert len(data) < (last_page(folder) + 1) * PAGE
    queue = await TransferQueue.open(DiskStore(folder))
    assert (await queue.ledger("tiny")).balanced
    await queue.acquire("tiny", "trainer")
    await queue.close()
    await (await TransferQueue.open(DiskStore(folder))).close()
