"""Work that follows a durable checkpoint: a copy under a URL, and a function of the user's, in a process of its own.

    commit ──add──▶ AfterCheckpoint ──▶ process: copy to trainer.copy_checkpoints_to ─▶ trainer.after_checkpoint
                    one at a time; of those that wait the newest

consumes: durable checkpoints, on rank 0. waits for: its process, whose failure is a warning. unblocked by: its end;
the trainer's end, which waits LAST_S for it. produces: `.afterwards`, the checkpoint that it was last done for. A
trainer that is killed takes the process with it; the next one does it again for its newest checkpoint, so it happens
at least once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from meshrl.common.files import replace_file
from meshrl.common.object_store import ObjectStore
from meshrl.common.plain_text import say
from meshrl.common.process_guard import guarded_command
from meshrl.common.python_process import PYTHON
from meshrl.common.user_functions import load_function
from meshrl.contract.errors import MeshError, UserError
from meshrl.trainer.checkpoint.kept import Keep, version_of

log = logging.getLogger(__name__)

FUNCTION = "trainer.after_checkpoint"
COPIES = "trainer.copy_checkpoints_to"
DONE = ".afterwards"
LAST_S = 240.0
"""How long the end of a trainer waits for the work after its last checkpoint."""
GRACE_S = 5.0
LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Work after each checkpoint of a run."""

    run: str
    function: str | None
    """`package.module.function` or `path/to/file.py:function`."""
    copies: str | None
    """A path or URL, where each run has a folder of its own."""
    keep_newest: int
    keep_every: int | None


class AfterCheckpoint:
    """Does it, one checkpoint at a time. Belongs to one event loop."""

    def __init__(self, root: Path, wishes: Wishes) -> None:
        self._root = root
        self._wishes = wishes
        self._next: str | None = None
        self._task: asyncio.Task[None] | None = None

    def resume(self, newest: str) -> None:
        """Do it for the newest checkpoint, unless an earlier trainer did."""
        done = ""
        with suppress(OSError):
            done = (self._root / DONE).read_text()
        if done != newest:
            self.add(newest)

    def add(self, name: str) -> None:
        """Do it for a checkpoint, in place of one that still waits."""
        if self._next is not None:
            log.warning("%s is passed over: the work after checkpoints takes too long", self._next)
        self._next = name
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def close(self, wait_s: float = LAST_S) -> None:
        """Wait for what is under way, `wait_s` at most; idempotent."""
        if self._task is None:
            return
        await asyncio.wait({self._task}, timeout=wait_s)
        if not self._task.done():
            log.warning("the work after the last checkpoint is ended after %g s", wait_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while (name := self._next) is not None:
            self._next = None
            try:
                await self._do(name)
            except OSError as error:
                log.warning("no work after checkpoint %s: %s", name, error)

    async def _do(self, name: str) -> None:
        asked = json.dumps({"checkpoint": str(self._root / name), **asdict(self._wishes)})
        process = await asyncio.create_subprocess_exec(
            *guarded_command([*PYTHON, __name__, asked], grace_s=GRACE_S, line_bytes=LINE_BYTES),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=2 * LINE_BYTES,
        )
        last = ""
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                last = line.decode(errors="replace").rstrip()
                log.info("after %s: %s", name, last)
            code = await process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise
        if code:
            log.warning("the work after checkpoint %s failed (exit code %d): %s", name, code, last)
        else:
            replace_file(self._root / DONE, name)


def copy(checkpoint: Path, store: ObjectStore, run: str, keep: Keep) -> None:
    """Copy a checkpoint into the run's folder, `state.json` last, and remove those that do not stay.

    Raises:
        UnavailableError: the store fails. CapacityError: it refuses.
    """
    folder = quote(run, safe="")
    target = f"{folder}/{checkpoint.name}"
    if not store.has(f"{target}/state.json"):
        files = [file for file in sorted(checkpoint.rglob("*")) if file.is_file()]
        for file in sorted(files, key=lambda file: file.name == "state.json"):
            store.upload(f"{target}/{file.relative_to(checkpoint)}", file)
    names = {version_of(name): name for name in store.entries(folder)}
    versions = sorted((version for version in names if version is not None), reverse=True)
    for version in keep.drops(versions):
        store.remove(f"{folder}/{names[version]}")


def main() -> int:
    """Copy the checkpoint that the argument names and call the function; its exit code."""
    asked = json.loads(sys.argv[1])
    checkpoint, function, copies = Path(asked["checkpoint"]), asked["function"], asked["copies"]
    version = version_of(checkpoint.name)
    try:
        if version is None or not checkpoint.is_dir():
            raise UserError(f"{checkpoint} is gone: trainer.max_ckpt_to_keep keeps too few")
        if copies is not None:
            keep = Keep(newest=asked["keep_newest"], every=asked["keep_every"])
            copy(checkpoint, ObjectStore(copies, COPIES), asked["run"], keep)
        if function is not None:
            load_function(function, FUNCTION)(path=str(checkpoint), step=version.step)
    except (MeshError, OSError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
