"""Several trainer ranks on this machine: one process each, started and ended together.

    serve trainer ──┬──▶ rank 0 ◀── SIGTERM (it tells the others in their next collective)
                    └──▶ rank 1 … N-1

A launcher of our own rather than torchrun: torchrun turns every exit code into 1, prints a page for a one-line
mistake, and kills ranks that drain for longer than 30 s. Its variables are the same, so ranks may also be started
by torchrun, on several machines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial

from meshrl.launcher.ports import free_port
from meshrl.rpc import credentials
from meshrl.rpc.parent_death import PARENT_VARIABLE


def is_rank() -> bool:
    """True in a process that a launcher made a rank."""
    return "RANK" in os.environ


async def run_ranks(count: int) -> int:
    """Run this very command `count` times, as ranks; the exit code of the first rank that failed, else 0."""
    world = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        PARENT_VARIABLE: str(os.getpid()),
    }
    ranks = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "meshrl.cli", *sys.argv[1:]),
            env={
                **os.environ,
                **credentials.own_environment(),
                **world,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(count)
    ]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(_forward, ranks[0], number))
    waits = {asyncio.ensure_future(rank.wait()) for rank in ranks}
    code = 0
    while waits and code == 0:
        done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        code = next((wait.result() for wait in done if wait.result()), 0)
    for rank in ranks:
        if rank.returncode is None:
            # Its siblings' collectives would hang without the rank that failed.
            rank.kill()
    await asyncio.gather(*waits)
    return code if code >= 0 else 128 - code


def _forward(rank: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if rank.returncode is None:
        rank.send_signal(number)
