"""Every service of a running mesh is killed once with -9: the ledger balances. A lasting failure ends in one line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from click.testing import CliRunner

from meshrl.cli.commands.queue import why_waiting
from meshrl.rpc.exit_codes import Exit
from meshrl.transferqueue.model.batches import ALONE_LAST
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore

from ..mesh import Mesh, make_mesh
from ..unit.transferqueue.damaged_file import make_store_that_kills_its_reader
from ..waiting import answered, gone, until

pytestmark = pytest.mark.slow


async def balanced(mesh: Mesh, steps: int) -> None:
    ledger = await mesh.ledger()
    assert ledger.balanced, ledger
    assert ledger.trained == steps * 16, ledger
    assert not ledger.resident.get("settled") and not ledger.resident.get("taken"), ledger
    assert [line["step"] for line in mesh.steps()] == list(range(1, steps + 1))


async def kill(pid: int) -> None:
    """Send SIGKILL, and wait until the parent has reaped the process."""
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{pid}").exists())


def runs(mesh: Mesh, service: str) -> bool:
    """Whether it has a process, which it lacks while it is about to be started again."""
    try:
        return mesh.pid(service) > 0
    except AssertionError:
        return False


def preloaders_of(up: int) -> list[int]:
    """Process ids of the preloaders of `meshrl up`."""
    found = []
    for pid in Path(f"/proc/{up}/task/{up}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if "meshrl.launcher.preloader" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(int(pid))
    return found


def rank_of(mesh: Mesh, number: int) -> int:
    """Process id of a trainer's rank."""
    launcher = mesh.pid("trainer")
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            of_this_mesh = str(mesh.run_dir) in (path.parent / "cmdline").read_text()
            if of_this_mesh and f"\0RANK={number}\0" in f"\0{path.read_text()}\0":
                return int(path.parent.name)
    raise AssertionError(f"no rank {number} beside {launcher}:\n{mesh.output[-3000:]}")


@pytest.fixture(scope="module")
def unscored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mesh, Popen[bytes]]]:
    """A run whose reward never scores: it ends by itself, beside the other tests."""
    folder = tmp_path_factory.mktemp("unscored")
    changes = {
        "reward": {"deadline_s": 0.3, "workers": 2},
        "queue": {"max_staleness": 1, "lease_ttl_s": 5, "max_attempts": 1},
        "trainer": {"val_before_train": False, "total_training_steps": 4},
    }
    mesh = make_mesh(folder, changes)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    raise ValueError('no such table')\n"
    )
    with mesh.up() as process:
        yield mesh, process


@pytest.mark.usefixtures("unscored")
async def test_a_run_goes_on_whoever_is_killed_and_drains_at_ctrl_c(tmp_path: Path) -> None:
    """Queue, reference, feeder, rollout, reward, one of the trainer's two ranks, and the preloaders."""
    changes = {
        "trainer": {"total_training_steps": 100_000, "save_freq": 3, "test_freq": -1, "nproc": 2},
        "data": {"val_files": []},
    }
    mesh = make_mesh(tmp_path, changes, reference=True)
    services = ("queue", "reference", "feeder", "reward", "rollout-0", "trainer")
    with mesh.up() as process:
        mesh.wait_for_step(process, 1)
        await kill(mesh.pid("queue"))
        await until(lambda: all(runs(mesh, name) for name in services))
        for victim in ("reference", "feeder", "rollout-0", "reward"):
            await kill(mesh.pid(victim))
        await kill(rank_of(mesh, 1))
        mesh.wait_for_step(process, len(mesh.steps()) + 2)
        await until(lambda: all(runs(mesh, name) for name in services))
        before = {name: mesh.pid(name) for name in services}
        assert "without the preloader" not in mesh.output
        # The second preloader is a child of the first and dies with it.
        (preloader,) = preloaders_of(process.pid)
        # A fork that is about to become a service still has the preloader's name.
        await until(lambda: len(preloaders_of(preloader)) == 1)
        (second,) = preloaders_of(preloader)
        os.kill(preloader, signal.SIGKILL)
        await until(lambda: not preloaders_of(process.pid))
        await gone(second)
        mesh.wait_for_step(process, len(mesh.steps()) + 1)
        assert {name: mesh.pid(name) for name in services} == before
        # One service that either preloader forked: each start is a fresh interpreter from here on.
        for victim in ("feeder", "rollout-0"):
            await kill(before[victim])
        await until(lambda: all(runs(mesh, name) for name in services))
        mesh.wait_for_step(process, len(mesh.steps()) + 1)
        process.send_signal(signal.SIGINT)
        mesh.wait(process, code=128 + signal.SIGINT)
    done = len(mesh.steps())
    ledger = await mesh.ledger()
    assert ledger.balanced and ledger.trained == done * 16, (ledger, done)
    assert [line["step"] for line in mesh.steps()] == list(range(1, done + 1))
    for kind in ("light", "torch"):
        assert mesh.output.count(f"services start without the preloader {kind}: ") == 1
    assert "Traceback" not in mesh.output, mesh.output
    assert "trainer ended with exit code" in mesh.output, mesh.output


def test_a_reward_that_cannot_be_loaded_ends_in_one_line(tmp_path: Path) -> None:
    mesh = make_mesh(tmp_path)
    (tmp_path / "reward.py").write_text("def score(answer):\n    return 0\n")
    with mesh.up() as process:
        mesh.wait(process, code=Exit.USER_ERROR)
    errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "compute_score" in errors[0], mesh.output
    assert "Traceback" not in mesh.output


KILLS = """
import os, signal
from meshrl.trainer.algorithms.advantages.grpo import compute as grpo

def compute(batch, config):
    if (batch.scores == 7).any():
        os.kill(os.getpid(), signal.SIGSEGV)
    return grpo(batch, config)
"""
SEVEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 7.0 if ground_truth == "poison" else float(len(solution_str) % 2)
"""


async def test_a_row_whose_step_kills_the_trainer_is_given_up_and_the_others_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies without a message, as in a crash of native code.

    It trains until the row is given up: each death with it alone counts after a step of others, and it may be sampled
    again meanwhile.
    """
    changes = {
        "algorithm": {"adv_estimator": "killing.advantages"},
        "data": {"shuffle": False, "val_files": [], "train_batch_size": 2},
        "queue": {"max_staleness": 8},
        "trainer": {"total_training_steps": 100_000, "save_freq": 1, "test_freq": -1},
    }
    mesh = make_mesh(tmp_path, changes)
    (tmp_path / "killing").mkdir()
    (tmp_path / "killing" / "advantages.py").write_text(KILLS)
    (tmp_path / "reward.py").write_text(SEVEN)
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    rows[3] = json.dumps({**json.loads(rows[3]), "answer": "poison"})
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with mesh.up() as process:
        given_up = "cannot be trained on: trainers die with"
        mesh.wait_until(process, lambda: given_up in mesh.output, "dead letter")
        mesh.wait_for_step(process, len(mesh.steps()) + 1)
        process.send_signal(signal.SIGINT)
        mesh.wait(process, code=128 + signal.SIGINT)
    ledger = await mesh.ledger()
    assert ledger.balanced
    (reason,) = ledger.dead_lettered
    assert reason.startswith(given_up), ledger
    assert ledger.filtered == {"group_incomplete": 4 - ledger.dead_lettered[reason]}
    assert mesh.output.count("trainer was killed by SIGSEGV") <= 2 + (2).bit_length() + ALONE_LAST


@pytest.mark.parametrize("damage", ["cut", "page"])
async def test_a_damaged_queue_ends_in_one_line(tmp_path: Path, damage: str) -> None:
    """Cut, or with a page of records that LMDB does not survive."""
    mesh = make_mesh(tmp_path)
    data = mesh.run_dir / "queue" / "data.mdb"
    if damage == "cut":
        await (await TransferQueue.open(DiskStore(data.parent))).close()
        data.write_bytes(data.read_bytes()[: 3 * 4096])
    else:
        await make_store_that_kills_its_reader(data.parent)
    with mesh.up() as process:
        mesh.wait(process, code=Exit.USER_ERROR)
    errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and str(data) in errors[0], mesh.output
    assert "restore a backup (meshrl queue restore)" in errors[0]
    assert ("SIGABRT" in errors[0]) == (damage == "page")
    assert "starting it again" not in mesh.output
    assert "Traceback" not in mesh.output


def test_a_malformed_row_ends_in_one_line(tmp_path: Path) -> None:
    mesh = make_mesh(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"question": "no prompt here"}\n')
    with mesh.up() as process:
        mesh.wait(process, code=Exit.USER_ERROR)
    errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "train.jsonl:65" in errors[0] and "prompt" in errors[0], mesh.output


SMALL_QUEUE = {
    "max_staleness": 1,
    "lease_ttl_s": 3,
    "reserve_bytes": 8 << 20,
}
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0, reason="mounting a small file system takes root"
)


@contextlib.asynccontextmanager
async def small_disk(folder: Path, size: str = "64m") -> AsyncIterator[Path]:
    """A file system of its own at `folder`; a file on it that can fill it up."""
    folder.mkdir(parents=True)  # noqa: ASYNC240 - before anything runs
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if await (await asyncio.create_subprocess_exec(*mount)).wait():
        pytest.skip("this machine does not let us mount a file system")
    try:
        yield folder / "ballast"
    finally:
        await (await asyncio.create_subprocess_exec("umount", "-l", str(folder))).wait()


def fill(ballast: Path) -> None:
    """To the last byte."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def until_said(mesh: Mesh, said: str) -> None:
    """Wait until `meshrl why-waiting` prints `said`."""

    async def is_said() -> bool:
        words = ["--run-dir", str(mesh.run_dir), "--json"]
        return said in (await asyncio.to_thread(CliRunner().invoke, why_waiting, words)).output

    await answered(is_said)


@needs_mounts
async def test_everybody_waits_while_the_queues_disk_is_full_and_goes_on_or_drains(
    tmp_path: Path,
) -> None:
    changes = {
        "queue": SMALL_QUEUE,
        "trainer": {"total_training_steps": 100_000, "save_freq": 10, "test_freq": -1},
        "data": {"val_files": []},
    }
    mesh = make_mesh(tmp_path, changes)
    async with small_disk(mesh.run_dir / "queue") as ballast:
        with mesh.up() as process:
            mesh.wait_for_step(process, 1)
            fill(ballast)
            await until_said(mesh, "space in the store")
            await asyncio.sleep(4)  # more than a lease
            assert process.poll() is None, mesh.output[-3000:]
            assert "waiting for space" in mesh.output
            ballast.unlink()
            mesh.wait_for_step(process, len(mesh.steps()) + 1)
            fill(ballast)
            await until_said(mesh, "space in the store")
            process.send_signal(signal.SIGINT)
            mesh.wait(process, code=128 + signal.SIGINT)
        assert "did not drain" not in mesh.output, mesh.output[-3000:]
        assert "ended with" not in mesh.output and "Traceback" not in mesh.output, mesh.output
        ballast.unlink()
        assert (await mesh.ledger()).balanced
        steps = len(mesh.steps()) + 1
        mesh.run(f"trainer.total_training_steps={steps}")
        await balanced(mesh, steps)


@needs_mounts
async def test_a_disk_too_full_for_a_checkpoint_ends_in_one_line(tmp_path: Path) -> None:
    changes = {
        "queue": {"max_staleness": 1, "lease_ttl_s": 5},
        "trainer": {"total_training_steps": 4, "save_freq": 2, "test_freq": -1},
        "data": {"val_files": []},
    }
    mesh = make_mesh(tmp_path, changes)
    (tmp_path / "elsewhere").mkdir()
    async with small_disk(mesh.run_dir) as ballast:
        (mesh.run_dir / "queue").symlink_to(tmp_path / "elsewhere")
        with mesh.up() as process:
            mesh.wait_for_step(process, 1)
            fill(ballast)
            mesh.wait(process, code=Exit.FAILED)
        errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "space left" in errors[0], mesh.output[-3000:]
        ballast.unlink()
        assert (await mesh.ledger()).balanced
        mesh.run()
        await balanced(mesh, 4)


async def test_a_reward_that_never_scores_ends_in_one_line(
    unscored: tuple[Mesh, Popen[bytes]],
) -> None:
    mesh, process = unscored
    mesh.wait(process, code=Exit.USER_ERROR)
    errors = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "no such table" in errors[0], mesh.output[-3000:]
    assert "16 rows were dead-lettered" in errors[0]
    assert "none was finished in between" in errors[0]
    ledger = await mesh.ledger()
    assert ledger.balanced and ledger.trained == 0, ledger
    assert sum(ledger.dead_lettered.values()) >= 16, ledger
