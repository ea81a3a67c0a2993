"""From `meshrl fleet add` to the first trained token of the worker that it started, in a real `meshrl up`.

Every service is a process of its own; the engine echoes (it loads in no time, so what is measured is ours:
process start, joining the weight plane, the newest version, the first lease, the way of the rows through reward
and queue to the trainer).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.cli.find_mesh import FleetMember, MeshAddress, read_membership
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook
from meshrl.launcher.control import ask_up

REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n"
)
NAME = "rollout-1"
PATIENCE_S = 180.0


def write_recipe(directory: Path) -> Path:
    """A tiny model, twelve prompts, one worker, no end."""
    write_tiny_model(directory / "model")
    (directory / "reward.py").write_text(REWARD)
    prompts = [json.dumps({"prompt": f"{n} plus {n} is", "answer": str(2 * n)}) for n in range(12)]
    (directory / "train.jsonl").write_text("\n".join(prompts) + "\n")
    recipe = {
        "run": {"name": "join", "dir": str(directory / "run")},
        "model": {"path": str(directory / "model")},
        "data": {
            "train_files": [str(directory / "train.jsonl")],
            "max_prompt_length": 64,
            "max_response_length": 16,
            "train_batch_size": 4,
        },
        "actor": {"optim": {"lr": 1e-5}},
        "rollout": {
            "name": "echo",
            "n": 4,
            "slots": 8,
            "engine": {"tokens_per_s": 80, "response_tokens": 16},
        },
        "reward": {"custom_reward_function": {"path": str(directory / "reward.py")}},
        "queue": {"max_staleness": 1},
        "trainer": {"total_training_steps": 1_000_000, "save_freq": 100_000, "test_freq": -1},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def steps(directory: Path) -> int:
    """Optimizer steps so far."""
    path = directory / "run" / "metrics.jsonl"
    return path.read_text().count("reward/mean") if path.exists() else 0


async def until(met: Callable[[], bool]) -> None:
    """Look ten times a second."""
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.1)


async def seen(run_dir: Path, met: Callable[[FleetMember], bool]) -> None:
    """Wait until the worker is as wanted."""
    address_book = AddressBook.load(run_dir / ADDRESS_BOOK_NAME)
    address = MeshAddress(trainer=address_book.address("trainer"), run_dir=run_dir)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            by_name = (await read_membership(address)).members
            if NAME in by_name and met(by_name[NAME]):
                return
            await asyncio.sleep(0.1)


def has_written(member: FleetMember) -> bool:
    """Its first row is in the queue."""
    return member.report is not None and member.report.worker.rows.written > 0


async def measure() -> dict[str, Any]:
    """Seconds from asking for a worker to each thing that follows."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        recipe = write_recipe(directory)
        with (directory / "up.log").open("wb") as log:
            up = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
                [sys.executable, "-m", "meshrl.cli", "up", str(recipe), "--plain"],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            run_dir = directory / "run"
            await until(lambda: steps(directory) > 2)
            began = time.monotonic()
            await ask_up(run_dir, "add", timeout_s=30, count=1)
            await seen(run_dir, lambda member: member.state == "SERVING")
            serving = time.monotonic() - began
            await seen(run_dir, has_written)
            written = time.monotonic() - began
            # The rows written first are trained with the next batch but one at the latest (staleness 1).
            done = steps(directory)
            await until(lambda: steps(directory) >= done + 2)
            return {
                "serving_s": serving,
                "first_row_s": written,
                "trained_s_at_most": time.monotonic() - began,
            }
        finally:
            up.send_signal(signal.SIGINT)
            await asyncio.to_thread(up.wait)
