"""The manifests of `meshrl kubernetes`, played: a run to its end, its queue and its trainer killed, its fleet grown.

pytest ──▶ unshare --net --mount python -m deploy.checks.test_pods FOLDER     the pods, and what is asked of them
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mesh import PATIENCE_S, Mesh, make_mesh

from .pods import ROOT, Cluster, Pod

STEPS = 12
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}
LACKING = [name for name in ("unshare", "ip", "ss", "bwrap") if not shutil.which(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(LACKING), reason=f"{', '.join(LACKING)}: not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def test_a_mesh_of_pods_trains_to_its_end_whoever_is_killed(tmp_path: Path) -> None:
    make_mesh(tmp_path / "assets")
    words = ["unshare", "--net", "--mount", sys.executable, "-m", "deploy.checks.test_pods"]
    done = subprocess.run(
        [*words, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    logs = (f"\n== {log.name}\n{log.read_text()[-1500:]}" for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + "".join(logs)


def printed(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Manifests that the command prints of the recipe, whose files lie on a claim at /assets."""
    written = yaml.safe_load((folder / "assets/recipe.yaml").read_text())
    text = json.dumps(written).replace(str(folder / "assets"), "/assets")
    recipe = json.loads(text)
    del recipe["run"]["dir"]
    recipe["rollout"]["workers"] = 1
    recipe["trainer"] |= {"total_training_steps": STEPS, "save_freq": 3}
    recipe["reward"]["custom_reward_function"]["path"] = str(folder / "assets/reward.py")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    row = [{"prompt": "1?", "answer": "1"}]
    data = recipe["data"]["train_files"] + recipe["data"]["val_files"]
    there = {"models": {"/assets/model": CONFIG}, "rows": dict.fromkeys(data, row)}
    (folder / "there.yaml").write_text(json.dumps(there))
    words = [sys.executable, "-m", "meshrl.cli", "kubernetes", "tiny.yaml", *options]
    done = subprocess.run(
        [*words, "--assume", "there.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


class Story:
    """The fate of the pods."""

    def __init__(self, folder: Path) -> None:
        self.mesh = Mesh(directory=folder, recipe=folder / "tiny.yaml")
        objects = [*printed(folder, "--mount", "assets:/assets"), *printed(folder, "--secrets")]
        self.cluster = Cluster(objects, folder, {"assets": folder / "assets"})
        self.seen: set[tuple[Pod, Pod, int]] = set()
        (self.trainer,) = self.cluster.of("trainer")
        self.metrics = folder / "claim-tiny-trainer/tiny/metrics.jsonl"

    def steps(self) -> list[int]:
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        read = [json.loads(line) for line in lines if line.endswith("}")]
        return [line["step"] for line in read if "reward/mean" in line]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.seen |= self.cluster.connections()
            assert time.monotonic() < deadline, self.steps()
            for pod in self.cluster.pods:
                # A container that ends with an error is started again, as by the kubelet.
                if pod is not self.trainer and pod.process and pod.process.poll():
                    self.cluster.start(pod)
            time.sleep(0.3)

    def trained(self, steps: int) -> Callable[[], bool]:
        return lambda: len(self.steps()) >= steps

    def tell(self) -> None:
        cluster = self.cluster
        for pod in cluster.pods:
            cluster.start(pod)
        self.until(self.trained(2))
        (queue,) = cluster.of("queue")
        queue.kill()
        self.until(self.trained(4))
        cluster.start(cluster.add(cluster.workload("tiny-rollout"), 1))
        self.trainer.kill()
        cluster.start(self.trainer)
        self.until(lambda: self.trainer.process is not None and self.trainer.process.poll() == 0)
        cluster.close()
        self.check()

    def check(self) -> None:
        assert sorted(set(self.steps())) == list(range(1, STEPS + 1)), self.steps()
        stored = Mesh(directory=self.mesh.directory / "stored", recipe=self.mesh.recipe)
        stored.directory.mkdir()
        stored.run_dir.symlink_to(self.mesh.directory / "claim-tiny-queue-0/tiny")
        lock = stored.run_dir / "queue" / "owner.lock"
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the killed container's process has it for a moment
        ledger = asyncio.run(stored.ledger())
        assert ledger.balanced, ledger
        forbidden = [
            (caller.name, called.name, port)
            for caller, called, port in self.seen
            if not self.cluster.may_call(caller, called, port)
        ]
        assert forbidden == []
        talked = {(caller.kind, called.kind) for caller, called, _ in self.seen}
        assert talked >= {("feeder", "queue"), ("trainer", "queue"), ("rollout", "trainer")}
        pairs = itertools.permutations(self.cluster.pods, 2)
        allowed = {
            (one.kind, other.kind)
            for one, other in pairs
            if self.cluster.may_call(one, other, 7001)
        }
        assert ("reward", "trainer") not in allowed and ("queue", "trainer") not in allowed
        print(sorted(talked), ledger)


if __name__ == "__main__":
    story = Story(Path(sys.argv[1]))
    try:
        story.tell()
    finally:
        story.cluster.close()
