"""A mesh whose engines echo at a given pace, and `meshrl fleet` about it, for tests of a changing fleet."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshrl.cli.commands.fleet import membership_json
from meshrl.cli.find_mesh import MeshAddress, read_membership
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook
from meshrl.rpc import credentials

from .mesh import PATIENCE_S, Mesh, make_mesh

Members = Mapping[str, Mapping[str, Any]]


def make_fleet(directory: Path, *, workers: int) -> Mesh:
    """A mesh that trains until it is stopped; a response takes two seconds."""
    changes: dict[str, dict[str, Any]] = {
        "rollout": {
            "name": "echo",
            "workers": workers,
            "slots": 4,
            "journal_tokens": 4,
            "engine": {
                "tokens_per_s": 8.0,
                "tokens_per_delta": 2,
                "response_tokens": 16,
            },
        },
        "actor": {"optim": {"lr": 1e-5}, "use_kl_loss": False},
        "queue": {"max_staleness": 2, "lease_ttl_s": 3},
        "weights": {"base_s": 2, "silence_s": 6},
        "trainer": {"total_training_steps": 100_000, "save_freq": 1_000, "test_freq": -1},
        "data": {"val_files": [], "max_response_length": 16},
    }
    return make_mesh(directory, changes)


def fleet(mesh: Mesh, *arguments: str, code: int = 0) -> str:
    """Output of `meshrl fleet` without the line that names the run; fails unless it exits with `code`."""
    command = [sys.executable, "-m", "meshrl.cli", "fleet", "--run-dir"]
    done = subprocess.run(
        [*command, str(mesh.run_dir), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=mesh.directory,
    )
    assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    said = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("run ")]
    return done.stdout + "".join(said)


async def members(mesh: Mesh) -> Members:
    """The workers by name, as `meshrl fleet --json` prints them, without a process for each call."""
    credentials.use_run_directory(mesh.run_dir)
    address_book = AddressBook.load(mesh.run_dir / ADDRESS_BOOK_NAME)
    membership = await read_membership(
        MeshAddress(trainer=address_book.address("trainer"), run_dir=mesh.run_dir)
    )
    return {member["name"]: member for member in membership_json(membership)["members"]}


async def wait_for(
    mesh: Mesh,
    process: subprocess.Popen[bytes],
    met: Callable[[Members], bool],
    what: str,
) -> Members:
    """The members as soon as they are as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    while not met(found := await members(mesh)):
        assert process.poll() is None, f"up ended early:\n{mesh.output[-6000:]}"
        assert time.monotonic() < deadline, f"never {what}: {found}\n{mesh.output[-4000:]}"
        await asyncio.sleep(0.2)
    return found


def working(*names: str) -> Callable[[Members], bool]:
    """All of `names` serve a committed version and have written rows."""

    def met(found: Members) -> bool:
        return all(
            found.get(name, {}).get("state") == "SERVING" and found[name].get("written", 0) > 0
            for name in names
        )

    return met


async def end(mesh: Mesh, process: subprocess.Popen[bytes]) -> None:
    """Stop the mesh as a person does; every row must be accounted for, and none given up."""
    process.send_signal(signal.SIGINT)
    mesh.wait(process, code=128 + signal.SIGINT)
    steps = [line["step"] for line in mesh.steps()]
    ledger = await mesh.ledger()
    assert ledger.balanced, ledger
    assert ledger.dead_lettered == {}, ledger
    assert ledger.trained == 16 * len(steps), (ledger, steps)
    assert steps == list(range(1, len(steps) + 1))
