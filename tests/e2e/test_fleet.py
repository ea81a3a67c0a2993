"""A fleet that grows, shrinks, loses members and is replaced member by member while it is trained on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ..fleet import end, fleet, make_fleet, wait_for, working
from ..mesh import PATIENCE_S, Mesh

pytestmark = pytest.mark.slow


async def test_a_fleet_is_replaced_member_by_member_while_training(tmp_path: Path) -> None:
    mesh = make_fleet(tmp_path, workers=2)
    with mesh.up() as process:
        mesh.wait_for_step(process, 1)
        await wait_for(mesh, process, working("rollout-0", "rollout-1"), "at work")
        assert "rollout-2, rollout-3 start" in fleet(mesh, "add", "--count", "2")
        # Nobody is given rows before it serves a committed version.
        await wait_for(mesh, process, working("rollout-2", "rollout-3"), "joined by two")
        for name, remain in (("rollout-0", 3), ("rollout-1", 2)):
            assert f"{name} has left; {remain} of this `up` remain" in fleet(mesh, "drain", name)
        assert "has left already" in fleet(mesh, "drain", "rollout-0")
        mesh.wait_for_step(process, len(mesh.steps()) + 2)
        left = {found["name"]: found for found in json.loads(fleet(mesh, "--json"))["members"]}
        assert [left[name]["state"] for name in sorted(left)] == [
            "OUT",
            "OUT",
            "SERVING",
            "SERVING",
        ]
        assert [left[name]["reason"] for name in ("rollout-0", "rollout-1")] == ["drained"] * 2
        # That rows of such workers are continued, `test_rollout_kill.py` decides.
        assert "restart" not in mesh.output and "starting it again" not in mesh.output
        async with joined_by_hand(mesh, process):
            await lose_members(mesh, process)
        await end(mesh, process)


@asynccontextmanager
async def joined_by_hand(mesh: Mesh, process: subprocess.Popen[bytes]) -> AsyncIterator[None]:
    """A worker that no supervisor of ours keeps: its command is printed, and it is asked itself to leave."""
    command = fleet(mesh, "add", "--print").split()
    assert command[:3] == ["meshrl", "serve", "rollout"] and "rollout-4" in command
    with mesh.serve(*command[2:]) as joiner:
        await wait_for(mesh, process, working("rollout-4"), "joined by hand")
        yield
        assert "hands over" in fleet(mesh, "drain", "rollout-4")
        assert joiner.wait(PATIENCE_S) == 0
    await wait_for(
        mesh, process, lambda found: found["rollout-4"]["state"] == "OUT", "left by hand"
    )
    message = fleet(mesh, "drain", "rollout-9", code=2)
    assert message.count("\n") == 1 and "(it has: rollout-0, rollout-1, rollout-2" in message


async def lose_members(mesh: Mesh, process: subprocess.Popen[bytes]) -> None:
    """One is killed and one is stopped for longer than the trainer waits; both come back."""
    os.kill(mesh.pid("rollout-2"), signal.SIGKILL)
    stopped = mesh.pid("rollout-3")
    os.kill(stopped, signal.SIGSTOP)
    try:
        out = await wait_for(
            mesh, process, lambda found: found["rollout-3"]["state"] == "OUT", "rid of rollout-3"
        )
        assert out["rollout-3"]["answers"] is False
        mesh.wait_for_step(process, len(mesh.steps()) + 2)
    finally:
        os.kill(stopped, signal.SIGCONT)
    again = await wait_for(mesh, process, working("rollout-2", "rollout-3"), "whole again")
    assert again["rollout-2"]["restarts"] == 1 and again["rollout-3"]["restarts"] == 0
