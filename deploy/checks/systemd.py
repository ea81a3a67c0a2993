"""deploy/systemd under a systemd that is PID 1 of a container: trains, killed and stopped; attacks on the unit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import yaml

from tests.mesh import make_mesh

from .images import Docker, docker
from .pods import ROOT

STEPS: Final = 100
CONTROLLERS: Final = ("systemd", "memory", "pids")
"""Controllers of version 1."""
IMAGE: Final = """\
FROM meshrl:cpu
USER root
RUN apt-get update && apt-get install -y --no-install-recommends systemd dbus procps && rm -rf /var/lib/apt/lists/*
RUN mkdir -p /opt/meshrl/bin && ln -s /usr/local/bin/meshrl /opt/meshrl/bin/meshrl
"""
UNITS: Final = ("queue", "reward", "trainer", "feeder", "rollout@01", "rollout@02")
CREDENTIAL: Final = "MESHRL_CREDENTIAL_FILE=/etc/meshrl/credentials"
ATTACKED: Final = """\
[Service]
Type=oneshot
Restart=no
ExecStart=
ExecStart=/usr/bin/python3 -m tests.adversarial
WorkingDirectory=/opt/checks
TimeoutStartSec=900
"""
REWARD: Final = "def compute_score(solution_str, **_): return float(len(solution_str) > 3)\n"


class Machine:
    """The container."""

    def __init__(self, engine: Docker) -> None:
        self.engine = engine
        self.name = "machine"
        self.recipe = ""

    def start(self, folder: Path) -> None:
        (folder / "systemd").mkdir(exist_ok=True)
        (folder / "systemd/Dockerfile").write_text(IMAGE)
        words = ["build", "--network=host", "--tag=meshrl:systemd", str(folder / "systemd")]
        self.engine.run(*words, timeout=600)
        self.engine.run("rm", "-f", self.name, check=False)
        assets = folder / "srv"
        shutil.rmtree(assets, ignore_errors=True)
        mesh = make_mesh(assets)
        recipe = yaml.safe_load(mesh.recipe.read_text().replace(str(assets), "/srv"))
        del recipe["run"]["dir"]
        recipe["trainer"] |= {"total_training_steps": STEPS, "save_freq": 5, "test_freq": STEPS}
        self.recipe = yaml.safe_dump(recipe)
        subprocess.run(["chmod", "-R", "a+rX", str(assets)], check=True)
        # systemd makes namespaces and control groups for its units; this machine's root may lack one capability.
        words = ["run", "-d", f"--name={self.name}", "--cap-add=ALL", "--cap-drop=SYS_RESOURCE"]
        words += ["--security-opt=seccomp=unconfined", "--security-opt=systempaths=unconfined"]
        # It gets the control groups that it needs, and not the folder of all, which it would rearrange.
        words += ["--cgroupns=host", "--tmpfs=/sys/fs/cgroup"]
        words += [
            f"--volume={each}:{each}" for each in map("/sys/fs/cgroup/{}".format, CONTROLLERS)
        ]
        words += [
            "--tmpfs=/run",
            "--tmpfs=/run/lock",
            f"--volume={ROOT}/tests:/opt/checks/tests:ro",
        ]
        words += [f"--volume={ROOT}/deploy/systemd:/opt/units:ro", "--network=none"]
        words += [f"--volume={assets}:/srv:ro"]
        self.engine.run(*words, "--entrypoint=/lib/systemd/systemd", "meshrl:systemd")
        # As on a machine, where systemd's mounts of credentials are seen by the services.
        self.tell("mount --make-rshared /")
        self.until(
            "systemd runs",
            lambda: "running" in self.tell("systemctl is-system-running", check=False),
        )

    def tell(self, command: str, check: bool = True, timeout: float = 900) -> str:
        words = ["exec", self.name, "sh", "-ec", command]
        done = self.engine.run(*words, check=False, timeout=timeout)
        if check and done.returncode:
            journal = self.engine.run(
                "exec", self.name, "journalctl", "--no-pager", "-n60", check=False
            )
            raise SystemExit(f"{command}: {done.stdout}{done.stderr}\n{journal.stdout[-5000:]}")
        return done.stdout + done.stderr

    def until(self, what: str, condition: Callable[[], bool], patience_s: float = 600) -> None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > patience_s:
                raise SystemExit(
                    f"not within {patience_s:.0f} s: {what}\n{self.tell('journalctl --no-pager -n40', False)}"
                )
            time.sleep(1)
        print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)

    def metrics(self) -> list[dict[str, float]]:
        text = self.tell("cat /var/lib/meshrl/runs/tiny/metrics.jsonl", check=False)
        return [
            json.loads(line)
            for line in text.splitlines()
            if line.startswith("{") and line.endswith("}")
        ]

    def steps(self) -> list[int]:
        return [int(line["step"]) for line in self.metrics() if "reward/mean" in line]

    def trained(self, steps: int) -> None:
        self.until(f"step {steps}", lambda: len(set(self.steps())) >= steps)

    def states(self) -> str:
        units = " ".join(f"meshrl-{unit}" for unit in UNITS)
        return " ".join(self.tell(f"systemctl is-active {units} || true").split())


def install(machine: Machine) -> None:
    """Run the README's commands; the recipe's files are in /srv."""
    machine.tell("install -m 644 -t /etc/systemd/system /opt/units/*.service /opt/units/*.target")
    machine.tell("install -D -m 644 -t /etc/meshrl /opt/units/mesh.env")
    machine.tell("meshrl credentials /etc/meshrl")
    for name, content in (("recipe.yaml", machine.recipe), ("submitted.py", REWARD)):
        machine.tell(f"cat > /etc/meshrl/{name} <<'END'\n{content}\nEND")
    machine.tell("systemctl daemon-reload")
    units = " ".join(f"meshrl-{unit}.service" for unit in UNITS)
    machine.tell(f"systemctl enable meshrl.target {units}")


def exposure(machine: Machine) -> None:
    """Print systemd's judgement of each unit."""
    for unit in UNITS:
        text = machine.tell(f"systemd-analyze security --no-pager meshrl-{unit} | tail -1")
        print(f"meshrl-{unit}: {' '.join(re.findall(r'[0-9.]+ [A-Z]+', text))}")


def train(machine: Machine) -> None:
    """Train a small run to its end: killed, a reward submitted, all stopped in mid-run and started again."""
    machine.tell("systemctl start meshrl.target")
    machine.trained(4)
    print(machine.states())
    for unit in ("queue", "rollout@01", "reward"):
        machine.tell(f"systemctl kill -s KILL meshrl-{unit}")
        print(f"killed -9: {unit}", flush=True)
    machine.trained(8)
    submit = (
        "meshrl reward submit /etc/meshrl/submitted.py --name trial --hold --reward 127.0.0.1:7002"
    )
    print(machine.tell(f"{CREDENTIAL}/submitter {submit}"))
    began, before = time.monotonic(), len(set(machine.steps()))
    machine.tell("systemctl stop meshrl.target")
    print(
        f"stop of the target after step {before}: {time.monotonic() - began:.0f} s, then {machine.states()}",
        flush=True,
    )
    machine.tell("systemctl start meshrl.target")
    machine.trained(STEPS)
    machine.until("the trainer ends", lambda: machine.states().split()[2] == "inactive")
    steps = machine.steps()
    print(f"{len(steps)} steps, {len(set(steps))} of them different")
    assert set(steps) == set(range(1, STEPS + 1)), steps
    print(machine.tell(f"{CREDENTIAL}/operator meshrl ledger --queue 127.0.0.1:7001 --run tiny"))
    print(
        machine.tell(
            "systemctl show -p NRestarts meshrl-queue meshrl-reward meshrl-rollout@01 meshrl-trainer"
        ).split()
    )
    machine.tell("systemctl stop meshrl.target")


def wrong(machine: Machine) -> None:
    """Start a recipe that does not exist: exit code 2, not tried again."""
    machine.tell(
        "systemctl set-environment X=; sed -i s,recipe.yaml,nothing.yaml, /etc/meshrl/mesh.env"
    )
    machine.tell("systemctl start meshrl-queue", check=False)
    time.sleep(6)
    print(
        machine.tell("systemctl show -p NRestarts -p Result -p ExecMainStatus meshrl-queue").split()
    )


def attacks(machine: Machine) -> None:
    """Run the adversarial suite as the reward unit's own process."""
    machine.tell(
        "cp /etc/systemd/system/meshrl-reward.service /etc/systemd/system/attacked.service"
    )
    machine.tell(
        "cd /etc/systemd/system; mkdir -p attacked.service.d;"
        f" cat > attacked.service.d/a.conf <<'END'\n{ATTACKED}END"
    )
    machine.tell("systemctl daemon-reload")
    machine.tell("systemctl start attacked", check=False)
    print(machine.tell("journalctl --no-pager -o cat -u attacked | tail -400"))
    print(machine.tell("systemctl show -p Result -p ExecMainStatus attacked").split())


STORIES: Final = {story.__name__: story for story in (exposure, train, wrong, attacks)}

if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    with docker(folder) as engine:
        machine = Machine(engine)
        machine.start(folder)
        install(machine)
        for name in sys.argv[2:] or STORIES:
            print(f"== {name}: {STORIES[name].__doc__}", flush=True)
            STORIES[name](machine)
        engine.run("rm", "-f", machine.name)
