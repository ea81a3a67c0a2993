"""A disk store whose bytes were changed: the right data, or what is damaged is named; never a silent loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.errors import CorruptError, WaitTimeoutError
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore

from ..unit.transferqueue.rewritten import rewrite

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("FUZZ_SEED", "1")
TRIALS = int(os.environ.get("FUZZ_TRIALS", "12"))


def trials(folder: Path, *kinds: str) -> tuple[Mapping[str, str], list[dict[str, Any]]]:
    """The contents of the sound store, and each trial."""
    command = [sys.executable, "-m", "tests.fuzz.store_reader", str(folder), SEED, str(TRIALS)]
    ended = subprocess.run([*command, *kinds], cwd=ROOT, capture_output=True, text=True, check=True)
    sound, *rest = (json.loads(line) for line in ended.stdout.splitlines())
    assert sound["code"] == 0 and len(sound["contents"]) > 15, sound
    assert len(rest) == TRIALS
    return sound["contents"], rest


def wrong(sound: Mapping[str, str], contents: Mapping[str, str]) -> list[str]:
    """Answers that are neither right nor a clear error: empty when nothing is lost in silence."""
    if contents["open"]:
        return [] if contents["open"].startswith("error corrupt: ") else [contents["open"]]
    return [
        f"{name}: {contents.get(name, 'absent')}"
        for name in {*sound, *contents}
        if contents.get(name) != sound.get(name) and not _explained(name, contents)
    ]


def _explained(name: str, contents: Mapping[str, str]) -> bool:
    """A damaged row is a dead letter, which takes its siblings along; what is no row is an error."""
    kind, task, *_ = name.split()
    if kind in ("row", "dead"):
        letter = name if kind == "dead" else f"dead letter {task}"
        return contents.get(letter, "").startswith("damaged in the store: ")
    if kind == "fetch" and name not in contents:
        name = "take again"
    return contents.get(name, "").startswith("error corrupt: ")


@pytest.mark.parametrize("kind", ["bit", "bytes", "zeros", "truncate", "cut"])
def test_a_changed_value_or_a_cut_file_is_a_clear_error_or_the_right_data(
    tmp_path: Path, kind: str
) -> None:
    sound, spoiled = trials(tmp_path, kind)
    for trial in spoiled:
        assert trial["code"] == 0, trial
        assert not wrong(sound, trial["contents"]), (trial["kind"], wrong(sound, trial["contents"]))
    assert any(trial["contents"] != sound for trial in spoiled)


@pytest.mark.parametrize("kind", ["page", "swap", "stale"])
def test_a_changed_page_of_lmdb_is_never_an_error_that_nobody_has_foreseen(
    tmp_path: Path, kind: str
) -> None:
    """LMDB's pages have no checksums: it may crash, and which records there are is what its pages say."""
    _, spoiled = trials(tmp_path, kind)
    for trial in spoiled:
        crashed = trial["code"] in (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)
        said = trial["contents"].get("open", "")
        assert crashed or trial["code"] == 0 or said.startswith("raised CorruptError"), trial


async def test_payload_that_the_store_has_lost_is_named(tmp_path: Path) -> None:
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path)))
    await actors.start(spec(batch_groups=1, max_staleness=5.0, lease_ttl_s=1e6))
    await actors.feed(tasks(3))
    await actors.write(await actors.lease("rollout", limit=4))
    await actors.write(await actors.lease("reward", limit=2))
    batch = await actors.take(0, groups=1)
    await actors.queue.close()
    await rewrite(tmp_path, "payload", b"", None)
    actors.queue = await TransferQueue.open(DiskStore(tmp_path))
    with pytest.raises(CorruptError, match="payload of task t0"):
        await actors.queue.fetch_rows("run", [batch.rows[0].uid], ["tokens"])
    with pytest.raises(CorruptError, match="manifest of batch b0"):
        await actors.take(0, groups=1)
    for stage in ("reward", "rollout"):
        with pytest.raises(WaitTimeoutError):
            await actors.queue.lease(
                ["run"], stage, worker="w", limit=9, version=actors.version, wait_s=0
            )
    letters = await actors.queue.dead_letters("run")
    assert {each.uid.task for each in letters} == {"t1", "t2"}
    assert all(each.reason.startswith("damaged in the store: ") for each in letters)
    assert (await actors.queue.ledger("run")).balanced
    await actors.queue.close()


@pytest.mark.parametrize("gone", ["emptied", "removed"])
async def test_a_file_that_is_empty_or_gone_is_no_fresh_start(tmp_path: Path, gone: str) -> None:
    await (await TransferQueue.open(DiskStore(tmp_path))).close()
    data = tmp_path / "data.mdb"
    if gone == "emptied":
        data.write_bytes(b"")
    else:
        data.unlink()
    with pytest.raises(CorruptError, match="a queue was stored there"):
        await TransferQueue.open(DiskStore(tmp_path))


async def test_a_queue_that_was_killed_before_its_first_commit_starts_afresh(
    tmp_path: Path,
) -> None:
    (tmp_path / "data.mdb").write_bytes(b"")
    await (await TransferQueue.open(DiskStore(tmp_path))).close()
