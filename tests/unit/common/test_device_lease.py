"""Turns on a device: the kernel frees what a dead process had, once its servers are dead too."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common.device_lease import DeviceLease, inherited
from meshrl.contract.errors import WaitTimeoutError

HOLDER = """
import asyncio, subprocess, sys
from pathlib import Path
from meshrl.common import device_lease
lease = device_lease.DeviceLease(Path(sys.argv[1]))
asyncio.run(lease.acquire(10))
null = subprocess.DEVNULL
server = subprocess.Popen(["sleep", "60"], pass_fds=device_lease.inherited(), stdout=null)
print(server.pid, flush=True)
sys.stdin.read()
"""


async def test_engines_share_the_device_and_the_trainer_has_it_alone(tmp_path: Path) -> None:
    trainer, engine, other = (DeviceLease(tmp_path / "lease") for _ in range(3))
    await engine.share()
    await other.share()
    training = asyncio.create_task(trainer.acquire(10))
    await asyncio.gather(engine.wanted(), other.wanted())
    engine.release()
    sharing = asyncio.create_task(engine.share())
    done, _ = await asyncio.wait({training, sharing}, timeout=0.2)
    assert not done  # one still has it, and who wants it alone comes first
    other.release()
    await training
    assert not sharing.done()
    trainer.release()
    await sharing
    for lease in (trainer, engine, other):
        lease.close()
        lease.close()


async def test_who_does_not_give_the_device_up_is_named(tmp_path: Path) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HOLDER,
        tmp_path / "lease",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    server = int(await holder.stdout.readline())
    lease = DeviceLease(tmp_path / "lease")
    try:
        with pytest.raises(WaitTimeoutError, match=rf"^pid {holder.pid} did not give up .* 0\.2 s"):
            await lease.acquire(0.2)
        assert lease.holders().startswith(f"pid {holder.pid}")
        holder.kill()
        await holder.wait()
        with pytest.raises(WaitTimeoutError):  # its server still has the memory
            await lease.acquire(0.2)
    finally:
        os.kill(server, 9)
    await lease.acquire(10)
    assert inherited()
    lease.close()
