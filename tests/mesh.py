"""A small real mesh for tests: a tiny random model, a dozen programs, `meshrl up` as a child process."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshrl.cli.demo.prepare import programs
from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.common.process_guard import PARENT_VARIABLE
from meshrl.contract.types import Ledger
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

# A reward that a random model earns now and then: the share of digits in its answer.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))
"""


PATIENCE_S = 400
"""A wait for a mesh that is longer fails and shows its output. Processes on a busy machine take minutes to start."""


def waiting(pid: int) -> str:
    """Commands of a process and its descendants, and the kernel call in which each of their threads sleeps."""
    here = Path("/proc", str(pid))
    try:
        command = (here / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        calls = [(task / "wchan").read_text() for task in (here / "task").iterdir()]
        below = [
            child
            for task in (here / "task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError as error:
        return f"{pid}: {error}"
    return "\n".join([f"{pid} {calls} {command[:200]}", *[waiting(int(one)) for one in below]])


@dataclass(frozen=True)
class Mesh:
    """The files of one run."""

    directory: Path
    recipe: Path

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def export(self) -> Path:
        return self.run_dir / "export"

    @property
    def output(self) -> str:
        """Output of `up` so far."""
        return (self.directory / "up.log").read_text()

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        return [json.loads(line) for line in lines]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics() if "reward/mean" in line]

    def command(self, *overrides: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "meshrl.cli",
            "up",
            str(self.recipe),
            "--plain",
            *overrides,
        ]

    @contextmanager
    def up(self, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
        """`meshrl up` in a process group of its own, output in up.log; killed at the end if it still runs."""
        with (self.directory / "up.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(*overrides),
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    @contextmanager
    def serve(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """`meshrl serve …` as a process of its own, output in serve.log; killed at the end if it still runs."""
        with (self.directory / "serve.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "meshrl.cli", "serve", *arguments],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())},
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def run(self, *overrides: str) -> None:
        """Run `up` to its end; fails with its output unless it exits with 0."""
        with self.up(*overrides) as process:
            self.wait(process)

    def wait(self, process: subprocess.Popen[bytes], code: int = 0) -> None:
        """Wait for the end of `up`; fails with its output unless it exits with `code`."""
        try:
            found = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"up did not end in {PATIENCE_S} s:\n{self.output[-6000:]}\n{waiting(process.pid)}"
            ) from None
        assert found == code, f"exit code {found}:\n{self.output[-6000:]}"

    def wait_for_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        """Wait until so many training steps are in metrics.jsonl."""
        self.wait_until(process, lambda: len(self.steps()) >= step, f"step {step}")

    def wait_until(
        self, process: subprocess.Popen[bytes], met: Callable[[], bool], what: str
    ) -> None:
        """Wait until `met` while `up` runs; fails with its output when it ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not met():
            assert process.poll() is None, f"up ended early:\n{self.output[-6000:]}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.output[-6000:]}"
            time.sleep(0.1)

    def pid(self, service: str) -> int:
        """Process id of a running service of this mesh."""
        wanted = re.compile(rf"serve\0.*{re.escape(str(self.run_dir))}.*--name\0{service}\0")
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if wanted.search(path.read_text()):
                    return int(path.parent.name)
            except OSError:
                continue
        raise AssertionError(f"no process of {service}:\n{self.output[-3000:]}")

    async def ledger(self, run: str = "tiny") -> Ledger:
        """The ledger as the queue's files tell it, after the queue has ended."""
        config = QueueConfig.model_validate({"store": "disk"})
        queue = await TransferQueue.open(stores.build(config, self.run_dir / "queue"))
        try:
            return await queue.ledger(run)
        finally:
            await queue.close()


def make_mesh(
    directory: Path,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    head_dim: int = 24,
    reference: bool = False,
) -> Mesh:
    """Model, prompts and recipe under `directory`; `changes` are merged into the recipe's sections.

    A KL loss, and with it the service of the reference model, costs a process that imports torch: `reference` asks.
    """
    write_tiny_model(directory / "model", head_dim=head_dim)
    (directory / "reward.py").write_text(REWARD)
    for name, held_out, count in (("train", False, 64), ("held_out", True, 6)):
        rows = itertools.islice(programs(0, held_out=held_out, longest=3), count)
        lines = (json.dumps({"prompt": row.prompt, "answer": row.answer}) for row in rows)
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    recipe: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "dir": str(directory / "run")},
        "model": {"path": str(directory / "model")},
        "data": {
            "train_files": [str(directory / "train.jsonl")],
            "val_files": [str(directory / "held_out.jsonl")],
            "max_prompt_length": 64,
            "max_response_length": 16,
            "train_batch_size": 4,
        },
        "actor": {"optim": {"lr": 1e-3}, "use_kl_loss": reference},
        "rollout": {"n": 4, "slots": 16},
        "reward": {"custom_reward_function": {"path": str(directory / "reward.py")}},
        "queue": {"max_staleness": 1, "lease_ttl_s": 5},
        "trainer": {"total_training_steps": 4, "save_freq": 2, "test_freq": 2},
    }
    for section, values in (changes or {}).items():
        recipe.setdefault(section, {}).update(values)
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return Mesh(directory=directory, recipe=path)
