"""A worker whose event loop is held ends with the place that holds it; one that is only busy goes on."""

from __future__ import annotations

import subprocess
import sys

HELD = """
import asyncio, logging, time
from meshrl.rollout.user_functions import LoopWatchdog
logging.basicConfig(format="%(message)s")

async def step():
    time.sleep(1000)  # an environment that computes without await

async def main():
    with LoopWatchdog(0.5):
        await asyncio.sleep(0.1)
        await step()

asyncio.run(main())
"""


def test_a_loop_that_is_held_ends_its_process_with_the_place() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "the event loop has run nothing for 0.5 s" in ended.stderr
    assert "it is held by <string>:7 step, called by <string>:12 main" in ended.stderr


BUSY = """
import asyncio, time
from meshrl.rollout.user_functions import LoopWatchdog

async def main():
    with LoopWatchdog(2.0):
        for _ in range(30):
            time.sleep(0.1)
            await asyncio.sleep(0)
    time.sleep(2.5)  # nobody watches any more

asyncio.run(main())
"""


def test_a_loop_that_is_busy_is_left_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", BUSY], timeout=120, check=False)
    assert ended.returncode == 0
