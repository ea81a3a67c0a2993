"""Reads a disk store after one corruption per trial, and prints what a queue on it returns: a JSON line per trial.

    python -m tests.fuzz.store_reader FOLDER SEED TRIALS [WAY...]

Each trial is a process of its own, forked here, because a spoiled memory map may take its reader with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrl.contract.errors import EndOfDataError, MeshError, WaitTimeoutError
from meshrl.contract.types import REWARD_STAGE, ROLLOUT_STAGE
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

from ..unit.transferqueue.damaged_file import OVERFLOW, PAGE, pages

GROUPS = 12
COMPLETE = 4
"""Groups that can be taken at the end of `write_store`."""
KINDS = ("bit", "bytes", "zeros", "truncate", "cut", "page", "swap", "stale")
"""A bit or 16 bytes of a long value change, or a page of it is zeroed; the end is cut off, at a page or anywhere; any
page is zeroed, changes places with another, or is as it was before (a write that the disk lost)."""
COLUMNS = [*ROLLOUT_STAGE.writes, *REWARD_STAGE.writes]


def opened(folder: Path) -> Any:
    return TransferQueue.open(stores.build(QueueConfig(), folder))


async def write_store(folder: Path, early: Path) -> None:
    """A closed store with rows in every state and frames of several pages; `early`: its file at earlier moments."""
    actors = Actors(await opened(folder))

    def keep() -> None:
        shutil.copy(folder / "data.mdb", early / f"{len(list(early.iterdir()))}.mdb")

    await actors.start(spec(max_staleness=50.0, lease_ttl_s=1e6))
    prompts = tasks(GROUPS, extra_info={"story": "once upon a time " * 400})
    assert await actors.feed(prompts, cursor="twelve") == GROUPS
    keep()
    await actors.write(await actors.lease("rollout", limit=18))
    keep()
    await actors.write(await actors.lease("reward", limit=14))
    keep()
    await actors.train(0)
    keep()
    await actors.commit(1)
    keep()
    await actors.take(1, groups=1)
    await actors.queue.close()


async def contents(folder: Path) -> Mapping[str, str]:
    """A digest, or `error code: message`, of everything that a queue on the store can read."""
    try:
        queue = await opened(folder)
    except MeshError as error:
        return {"open": _failed(error)}
    actors = Actors(queue)
    found: dict[str, str] = {"open": ""}

    async def tell(name: str, call: Any) -> Any:
        try:
            answer = await call
        except (EndOfDataError, WaitTimeoutError):
            return None
        except MeshError as error:
            found[name] = _failed(error)
            return None
        found[name] = _digest(answer)
        return answer

    await tell("ledger", queue.ledger("run"))
    await tell("state", queue.run_state("run"))
    batch = await tell("take again", actors.take(1, groups=1))
    for row in batch.rows if batch else ():
        await tell(f"fetch {row.uid}", queue.fetch_rows("run", [row.uid], COLUMNS))
    for stage in ("rollout", "reward"):
        with suppress(WaitTimeoutError):  # every row that waited is damaged
            for row in (await actors.lease(stage)).rows:
                found[f"row {row.uid.task} {row.uid.index} {stage}"] = _digest(row)
    with suppress(WaitTimeoutError):
        for taken in (await actors.take(2, groups=COMPLETE)).rows:
            found[f"row {taken.uid.task} {taken.uid.index} taken"] = _digest(taken)
    letters = await queue.dead_letters("run")
    for letter in letters:
        found[f"dead letter {letter.uid.task}"] = letter.reason
    await tell("counts", _counts(queue, len(letters)))
    await queue.close()
    return found


async def _counts(queue: TransferQueue, letters: int) -> str:
    """The sums of the ledger that damage must not change, and whether it counts the dead letters."""
    ledger = await queue.ledger("run")
    counted = ledger.balanced and sum(ledger.dead_lettered.values()) == letters
    return f"{ledger.admitted} admitted, {ledger.trained} trained, balanced {counted}"


def _failed(error: MeshError) -> str:
    return f"error {error.code}: {error}"


def _digest(answer: Any) -> str:
    if hasattr(answer, "__slots__") and not isinstance(answer, str):
        answer = asdict(answer)
    text = json.dumps(answer, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def value_pages(data: bytes) -> list[int]:
    """Offsets of pages that hold long values and nothing of LMDB's own, live or not."""
    found = []
    for at in pages(data, OVERFLOW):
        count = int.from_bytes(data[at + 12 : at + 16], "little")
        found += range(at + PAGE, at + count * PAGE, PAGE)
    return found


def spoil(path: Path, dice: random.Random, kinds: Sequence[str], early: Path) -> str:
    """Change the file in one of the `kinds`; returns a description of the change."""
    data = bytearray(path.read_bytes())
    end = len(data.rstrip(b"\0"))
    kind = dice.choice(kinds)
    page = dice.randrange(end // PAGE) * PAGE
    at = dice.randrange(end)
    if kind in ("bit", "bytes", "zeros"):
        page = dice.choice(value_pages(data))
        at = page + dice.randrange(PAGE - 16)
    if kind == "bit":
        data[at] ^= 1 << dice.randrange(8)
    elif kind == "bytes":
        data[at : at + 16] = dice.randbytes(16)
    elif kind in ("zeros", "page"):
        data[page : page + PAGE] = bytes(PAGE)
    elif kind == "swap":
        other = dice.randrange(end // PAGE) * PAGE
        one, two = data[page : page + PAGE], data[other : other + PAGE]
        data[page : page + PAGE], data[other : other + PAGE] = two, one
    elif kind == "stale":
        before = dice.choice(sorted(early.iterdir())).read_bytes()
        data[page : page + PAGE] = before[page : page + PAGE].ljust(PAGE, b"\0")
    elif kind == "truncate":
        del data[page:]
    else:
        del data[at:]
    path.write_bytes(data)
    return f"{kind} at {at if kind in ('bit', 'bytes', 'cut') else page} of {end}"


def trial(folder: Path, seed: str, kinds: Sequence[str]) -> dict[str, Any]:
    """One spoiled copy, read by one forked process."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "good", copy)
    kind = (
        spoil(copy / "data.mdb", random.Random(seed), kinds, folder / "early")
        if seed
        else "untouched"
    )
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            answer.write_text(json.dumps(asyncio.run(contents(copy))))
            code = 0
        except BaseException as error:
            answer.write_text(json.dumps({"open": f"raised {type(error).__name__}: {error}"}))
            code = 1
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = json.loads(answer.read_text()) if answer.exists() else {}
    return {"seed": seed, "kind": kind, "code": code, "contents": said}


def main() -> None:
    """The untouched store first."""
    folder, seed, trials = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    kinds = sys.argv[4:] or KINDS
    (folder / "early").mkdir(parents=True)
    asyncio.run(write_store(folder / "good", folder / "early"))
    print(json.dumps(trial(folder, "", kinds)), flush=True)
    for number in range(trials):
        print(json.dumps(trial(folder, f"{seed}.{number}", kinds)), flush=True)


if __name__ == "__main__":
    main()
