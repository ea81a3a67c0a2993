"""Every service of a running mesh is killed with -9 once; the run completes and the ledger balances."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from meshrl.services.up.exits import Exit

from ..mesh import Mesh, make_mesh

STEPS = 10


async def balanced(mesh: Mesh, steps: int) -> None:
    ledger = await mesh.ledger()
    assert ledger.balanced, ledger
    assert ledger.trained == steps * 16, ledger
    assert not ledger.resident.get("settled") and not ledger.resident.get("taken"), ledger
    assert [line["step"] for line in mesh.steps()] == list(range(steps))


@pytest.mark.parametrize(
    "victims", [("rollout-0", "reward", "queue"), ("reference", "feeder", "trainer")]
)
async def test_a_run_survives_kill_9_of_its_services(
    tmp_path: Path, victims: tuple[str, ...]
) -> None:
    changes = {"trainer": {"total_training_steps": STEPS, "save_freq": 3, "test_freq": -1}}
    mesh = make_mesh(tmp_path, changes)
    with mesh.up() as process:
        for step, victim in enumerate(victims, start=1):
            mesh.wait_for_step(process, step, timeout_s=120)
            os.kill(mesh.pid(victim), signal.SIGKILL)
            # Until somebody has noticed: a victim found twice would be the same death.
            await asyncio.sleep(1.0)
        mesh.wait(process, timeout_s=240)
    await balanced(mesh, STEPS)


async def test_ctrl_c_drains_and_the_same_command_goes_on(tmp_path: Path) -> None:
    changes = {"trainer": {"total_training_steps": STEPS, "save_freq": 100, "test_freq": -1}}
    mesh = make_mesh(tmp_path, changes)
    with mesh.up() as process:
        mesh.wait_for_step(process, 2, timeout_s=120)
        process.send_signal(signal.SIGINT)
        mesh.wait(process, timeout_s=90, code=128 + signal.SIGINT)
    assert 2 <= len(mesh.steps()) < STEPS
    assert (await mesh.ledger()).balanced
    mesh.run()
    await balanced(mesh, STEPS)


def test_a_reward_that_cannot_be_loaded_ends_in_one_line(tmp_path: Path) -> None:
    mesh = make_mesh(tmp_path)
    (tmp_path / "reward.py").write_text("def score(answer):\n    return 0\n")
    with mesh.up() as process:
        mesh.wait(process, timeout_s=120, code=Exit.USER_ERROR)
    errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "compute_score" in errors[0], mesh.output
    assert "Traceback" not in mesh.output
