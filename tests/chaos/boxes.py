"""Short episodes in boxes of bubblewrap, with kills of their workers and of the boxes' own processes.

    python -m tests.chaos.boxes EPISODES KILLS [SEED]

A worker plays episodes, eight at a time, each in a box with processes in the background and files; it says the start
and the end of each. Whoever runs this kills one of its processes at a time: the worker, bubblewrap outside or inside,
or whoever enters. A killed worker is replaced. Nothing may be left after a
death and the sweep of the next worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshrl.contract.errors import MeshError
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.box import Image
from meshrl.rollout.containers.bubblewrap import Bubblewrap
from meshrl.rollout.containers.pool import Pool, build_backend

AT_ONCE = 8
SCRIPT = "echo x > /root/x; (setsid sleep 1000 &) ; sleep 1000 & head -c 100000 /dev/zero > /tmp/y"


async def play(store: Path, episodes: int, warm: int) -> None:
    """A worker: plays so many episodes, and prints a line for each."""
    config = ContainersConfig(boxes=AT_ONCE, warm=warm, store=store)
    pool, image = Pool(build_backend(config), config), Image(name="host")
    await pool.start()

    async def episode(number: int) -> None:
        began = time.monotonic()
        try:
            async with pool.box(image, row=str(number)) as box:
                waited = time.monotonic() - began
                ran = await box.run(["sh", "-c", SCRIPT], timeout_s=60)
                await box.stop_processes()
                told = await box.run(["cat", "/root/x"], timeout_s=60)
                killed = 137 in (ran.exit_code, told.exit_code)
                ended = "killed" if killed else "done" if told.output == b"x\n" else repr(told)
        except MeshError as error:
            waited, ended = 0.0, type(error).__name__
        print(json.dumps({"ended": ended, "waited": waited}), flush=True)

    numbers = iter(range(episodes))

    async def lane() -> None:
        for number in numbers:
            await episode(number)

    await asyncio.gather(*(lane() for _ in range(AT_ONCE)))
    await pool.close()


def family(store: Path) -> list[int]:
    """Every process of a box whose images are in `store`, and of whoever enters one now."""
    seen: dict[int, Path] = {}
    own: set[int] = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            seen[int(path.name)] = (path / "ns/mnt").readlink()
            if f"{store}/mounted".encode() in (path / "cmdline").read_bytes():
                own.add(int(path.name))
        except OSError:
            continue  # it has ended
    spaces = {seen[pid] for pid in own} - {Path("/proc/self/ns/mnt").readlink()}
    return [pid for pid, space in seen.items() if pid in own or space in spaces]


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder for images that the user of boxes may pass through."""
    with tempfile.TemporaryDirectory(prefix="meshrl-boxes-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def left(store: Path) -> dict[str, int]:
    """Number of processes, mounts and files of boxes."""
    mounts = Path("/proc/self/mountinfo").read_text().count(str(store))
    files = len([*(store / "mounted").iterdir()]) + len([*store.glob("*.part")])
    return {"processes": len(family(store)), "mounts": mounts, "files": files}


async def campaign(episodes: int, kills: int, seed: int, store: Path) -> Counter[str]:
    """Play so many episodes under so many kills; how they ended. Raises AssertionError: something is left."""
    drawn, ended = random.Random(seed), Counter[str]()
    waits: list[float] = []
    command = [sys.executable, "-m", "tests.chaos.boxes", "play", str(store)]
    killed = workers = swept = 0
    while ended.total() < episodes:
        count = str(episodes - ended.total())
        worker = await asyncio.create_subprocess_exec(
            *command, count, "2", stdout=asyncio.subprocess.PIPE
        )
        assert worker.stdout is not None
        next_kill = drawn.randrange(1, 2 * episodes // max(1, kills))
        while line := await worker.stdout.readline():
            told = json.loads(line)
            ended[told["ended"]] += 1
            waits.append(told["waited"])
            next_kill -= 1
            if next_kill <= 0 and killed < kills:
                next_kill = drawn.randrange(1, 2 * episodes // kills)
                killed += 1
                await asyncio.sleep(drawn.random() * 0.05)
                victims = family(store)
                with suppress(ProcessLookupError):
                    if drawn.random() < 0.3 or not victims:
                        os.kill(worker.pid, signal.SIGKILL)
                        workers += 1
                    else:
                        os.kill(drawn.choice(victims), signal.SIGKILL)
        await worker.wait()
        swept += await Bubblewrap(store).sweep()  # as the next worker does
        for _ in range(6000):
            if not any((remains := left(store)).values()):
                break
            await asyncio.sleep(0.01)
        assert not any(remains.values()), remains
    ordered = sorted(waits)
    print(
        f"{episodes} episodes, {killed} kills ({workers} of workers): {dict(ended)};"
        f" {swept} swept; left: {left(store)}"
    )
    print(
        f"wait for a box: p50 {statistics.median(ordered) * 1e3:.0f} ms,"
        f" p99 {ordered[len(ordered) * 99 // 100] * 1e3:.0f} ms"
    )
    return ended


def main() -> None:
    """Play, or run the campaign."""
    if sys.argv[1] == "play":
        asyncio.run(play(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
        return
    episodes, kills, *seed = map(int, sys.argv[1:])
    with open_folder() as store:
        asyncio.run(campaign(episodes, kills, seed[0] if seed else 0, store))


if __name__ == "__main__":
    main()
