"""Every service of a running mesh is killed with -9 once; the run completes and the ledger balances."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from meshrl.services.exits import Exit

from ..mesh import Mesh, make_mesh
from ..waiting import until

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
            mesh.wait_for_step(process, step)
            pid = mesh.pid(victim)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not Path(f"/proc/{pid}").exists())  # noqa: B023 - its supervisor has noticed
        mesh.wait(process)
    await balanced(mesh, STEPS)


def rank_of(mesh: Mesh, number: int) -> int:
    """Process id of a trainer's rank."""
    launcher = mesh.pid("trainer")
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            of_this_mesh = str(mesh.run_dir) in (path.parent / "cmdline").read_text()
            if of_this_mesh and f"\0RANK={number}\0" in f"\0{path.read_text()}\0":
                return int(path.parent.name)
    raise AssertionError(f"no rank {number} beside {launcher}:\n{mesh.output[-3000:]}")


async def test_a_run_survives_kill_9_of_one_trainer_rank(tmp_path: Path) -> None:
    steps = 4
    changes = {
        "trainer": {"total_training_steps": steps, "save_freq": 2, "test_freq": 2, "nproc": 2},
    }
    mesh = make_mesh(tmp_path, changes)
    with mesh.up() as process:
        mesh.wait_for_step(process, 3)
        os.kill(rank_of(mesh, 1), signal.SIGKILL)
        mesh.wait(process)
    await balanced(mesh, steps)
    assert "Traceback" not in mesh.output, mesh.output
    assert "trainer ended with exit code" in mesh.output, mesh.output


async def test_ctrl_c_drains_and_the_same_command_goes_on(tmp_path: Path) -> None:
    changes = {"trainer": {"total_training_steps": STEPS, "save_freq": 100, "test_freq": -1}}
    mesh = make_mesh(tmp_path, changes)
    with mesh.up() as process:
        mesh.wait_for_step(process, 2)
        process.send_signal(signal.SIGINT)
        mesh.wait(process, code=128 + signal.SIGINT)
    assert 2 <= len(mesh.steps()) < STEPS
    assert (await mesh.ledger()).balanced
    mesh.run()
    await balanced(mesh, STEPS)


def test_a_reward_that_cannot_be_loaded_ends_in_one_line(tmp_path: Path) -> None:
    mesh = make_mesh(tmp_path)
    (tmp_path / "reward.py").write_text("def score(answer):\n    return 0\n")
    with mesh.up() as process:
        mesh.wait(process, code=Exit.USER_ERROR)
    errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "compute_score" in errors[0], mesh.output
    assert "Traceback" not in mesh.output


HOPELESS = {
    "raises": ("raise ValueError('no such table')", "no such table"),
    "hangs": ("while True: pass", "no score after"),
}


@pytest.mark.parametrize("fault", HOPELESS)
async def test_a_reward_that_never_scores_ends_in_one_line(tmp_path: Path, fault: str) -> None:
    body, said = HOPELESS[fault]
    changes = {
        "reward": {"deadline_s": 0.3, "workers": 2},
        "queue": {"max_staleness": 1, "lease_ttl_s": 5, "max_attempts": 1},
        "trainer": {"val_before_train": False, "take_wait_s": 3, "total_training_steps": 4},
    }
    mesh = make_mesh(tmp_path, changes)
    source = f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
    (tmp_path / "reward.py").write_text(source)
    with mesh.up("reward.custom_reward_function.path=" + str(tmp_path / "reward.py")) as process:
        mesh.wait(process, code=Exit.USER_ERROR)
    errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0].lower(), mesh.output[-3000:]
    assert "rows were given up" in errors[0]
    ledger = await mesh.ledger()
    assert ledger.balanced and ledger.trained == 0, ledger
    assert sum(ledger.dead_lettered.values()) >= 16, ledger


def test_a_malformed_row_ends_in_one_line(tmp_path: Path) -> None:
    mesh = make_mesh(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"question": "no prompt here"}\n')
    with mesh.up() as process:
        mesh.wait(process, code=Exit.USER_ERROR)
    errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "train.jsonl:65" in errors[0] and "prompt" in errors[0], mesh.output


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
async def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_once_there_is_space(
    tmp_path: Path,
) -> None:
    changes = {
        "queue": {
            **{"max_staleness": 1, "lease_ttl_s": 5},
            **{"reserve_bytes": 8 << 20, "grow_bytes": 4 << 20},
        },
        "trainer": {"total_training_steps": 6, "save_freq": 2, "test_freq": -1},
        "data": {"val_files": []},
    }
    mesh = make_mesh(tmp_path, changes)
    mesh.run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mesh.run_dir)]
    if await (await asyncio.create_subprocess_exec(*mount)).wait():
        pytest.skip("this machine does not let us mount a file system")
    try:
        ballast = mesh.run_dir / "ballast"
        with mesh.up() as process:
            mesh.wait_for_step(process, 1)
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(16384))
            mesh.wait(process, code=Exit.FAILED)
        errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
        # Whichever gives up first, the trainer with its checkpoint or a stage with its rows, says what it was.
        assert len(errors) == 1, mesh.output[-3000:]
        assert "space left" in errors[0] or "bytes free on disk" in errors[0], errors[0]
        ballast.unlink()
        assert (await mesh.ledger()).balanced
        mesh.run()
        await balanced(mesh, 6)
    finally:
        await (await asyncio.create_subprocess_exec("umount", "-l", str(mesh.run_dir))).wait()
