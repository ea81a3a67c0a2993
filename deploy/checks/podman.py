"""The output of `meshrl kubernetes`, played by podman with our image: a run to its end, with pods killed and added.

podman plays Pods, ConfigMaps and PersistentVolumeClaims, and nothing that makes pods: `rendered` stands for those
controllers. It enforces no NetworkPolicy; test_pods.py compares them with the connections of a mesh.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.mesh import make_mesh

from .images import docker

Manifest = dict[str, Any]
STEPS: Final = 300
CONTAINERS: Final = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=8192:8192", "nproc=4096:4096"]
"""
STORAGE: Final = """
[storage]
driver = "overlay"
graphroot = "{folder}/root"
runroot = "{folder}/run"
"""


class Podman:
    """A podman with storage of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "podman"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment = {**os.environ}
        for name, text in (("CONTAINERS", CONTAINERS), ("CONTAINERS_STORAGE", STORAGE)):
            file = self.folder / f"{name.lower()}.conf"
            file.write_text(text.format(folder=self.folder))
            self.environment[f"{name}_CONF"] = str(file)

    def run(self, *words: str, check: bool = True, text: str = "") -> str:
        done = subprocess.run(
            ["podman", *words],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
        )
        if check and done.returncode:
            raise SystemExit(f"podman {' '.join(words)}: {done.stderr[-3000:]}")
        return done.stdout + ("" if check else done.stderr)

    def inspect(self, container: str, field: str) -> str:
        return self.run("inspect", "-f", field, container, check=False).strip()

    def play(self, *objects: Manifest) -> None:
        self.run("kube", "play", "--network=mesh", "-", text=yaml.safe_dump_all(objects))


def rendered(owner: Manifest, number: int) -> Manifest:
    """The pod with this number of a StatefulSet, a Job or a Deployment."""
    spec, name = owner["spec"], owner["metadata"]["name"]
    template = copy.deepcopy(spec["template"])
    pod = template["spec"]
    host = f"{name}-{number}"
    for claim in spec.get("volumeClaimTemplates", []):
        volume = claim["metadata"]["name"]
        of_pod = {"claimName": f"{volume}-{host}"}
        pod["volumes"].append({"name": volume, "persistentVolumeClaim": of_pod})
    # podman's names have no Services: a pod is found by its own name.
    if subdomain := spec.get("serviceName") or pod.pop("subdomain", None):
        host = f"{host}.{subdomain}"
    elif name.endswith("-reward"):
        host = name
    (container,) = pod["containers"]
    for unplayed in ("startupProbe", "readinessProbe", "ports"):
        container.pop(
            unplayed
        )  # probes want timers of systemd: `healthy` asks; ports would be the host's
    for variable in container["env"]:
        if variable["name"] == "MESHRL_NAME":
            variable.pop("valueFrom", None)
            variable["value"] = f"{name}-{number}"
    labels = template["metadata"]["labels"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": host, "labels": labels},
        "spec": pod,
    }


class Story:
    """The pods of one run, and what happens to them."""

    def __init__(self, podman: Podman, folder: Path) -> None:
        self.podman, self.folder = podman, folder
        shutil.rmtree(folder, ignore_errors=True)
        make_mesh(folder / "assets")
        self.objects = [*self.printed("--mount", "assets:/assets"), *self.printed("--secrets")]
        podman.run("pod", "rm", "-fa", "-t0")
        podman.run("volume", "prune", "-f")
        podman.run("network", "create", "mesh", check=False)
        for claim in ("work-tiny-queue-0", "tiny-trainer", "assets"):
            podman.run("volume", "create", claim)
            self.given_to_group(self.volume(claim))
        shutil.copytree(folder / "assets", self.volume("assets"), dirs_exist_ok=True)
        self.given_to_group(self.volume("assets"))

    def given_to_group(self, path: Path, mode: int = 0) -> None:
        """Do as the kubelet does for a pod's `fsGroup`."""
        for each in [path, *path.rglob("*")]:
            os.chown(each, 1000, 1000)
            if mode and each.is_file():
                each.chmod(mode)

    def volume(self, claim: str) -> Path:
        words = ["volume", "inspect", "-f", "{{.Mountpoint}}", claim]
        path: str = self.podman.run(*words)
        return Path(path.strip())

    def printed(self, *options: str) -> list[Manifest]:
        """Manifests that the command prints of the recipe, whose files lie on a claim at /assets."""
        assets = self.folder / "assets"
        text = json.dumps(yaml.safe_load((assets / "recipe.yaml").read_text()))
        recipe = json.loads(text.replace(str(assets), "/assets"))
        del recipe["run"]["dir"]
        recipe["rollout"]["workers"] = 1
        recipe["trainer"] |= {"total_training_steps": STEPS, "save_freq": 5}
        recipe["reward"]["custom_reward_function"]["path"] = str(assets / "reward.py")
        (self.folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
        config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}
        data = recipe["data"]["train_files"] + recipe["data"]["val_files"]
        row = [{"prompt": "1?", "answer": "1"}]
        there = {"models": {"/assets/model": config}, "rows": dict.fromkeys(data, row)}
        (self.folder / "there.yaml").write_text(json.dumps(there))
        words = [sys.executable, "-m", "meshrl.cli", "kubernetes", "tiny.yaml", *options]
        words += ["--image", "localhost/meshrl:cpu", "--assume", "there.yaml"]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=True)
        return list(yaml.safe_load_all(done.stdout))

    def start(self, kind: str, number: int = 0) -> None:
        """Play the pod with this number of a workload."""
        (owner,) = [
            each
            for each in self.objects
            if each["metadata"]["name"] == f"tiny-{kind}" and "template" in each.get("spec", {})
        ]
        pod = rendered(owner, number)
        for volume in pod["spec"]["volumes"]:
            if secret := volume.pop("secret", None):
                volume["hostPath"] = {"path": str(self.secret(secret)), "type": "Directory"}
        held = [each for each in self.objects if each["kind"] == "ConfigMap"]
        self.podman.play(*held, pod)

    def secret(self, source: Mapping[str, Any]) -> Path:
        """Its files, as the kubelet mounts them: podman 4.3 knows neither `stringData` nor modes."""
        folder: Path = self.folder / "secrets" / source["secretName"]
        folder.mkdir(parents=True, exist_ok=True)
        for each in self.objects:
            if (each["kind"], each["metadata"]["name"]) == ("Secret", source["secretName"]):
                for name, text in each["stringData"].items():
                    (folder / name).write_text(text)
        self.given_to_group(folder, source["defaultMode"])
        return folder

    @staticmethod
    def pod(kind: str, number: int = 0) -> str:
        """Its name, which is its address."""
        if kind in ("queue", "trainer"):
            return f"tiny-{kind}-{number}.tiny-{kind}"
        return "tiny-reward" if kind == "reward" else f"tiny-{kind}-{number}"

    def state(self, kind: str, number: int = 0) -> str:
        container = f"{self.pod(kind, number)}-{kind}"
        return self.podman.inspect(container, "{{.State.Status}} {{.State.ExitCode}}")

    def kill(self, kind: str, number: int = 0) -> None:
        """kill -9 of what it runs, by the host."""
        pid = self.podman.inspect(f"{self.pod(kind, number)}-{kind}", "{{.State.Pid}}")
        os.kill(int(pid), signal.SIGKILL)
        print(f"killed -9: {kind}", flush=True)

    def replace(self, kind: str) -> None:
        """As a StatefulSet or a Job does for a pod that is gone: another one of the same name, on the same claims."""
        self.podman.run("pod", "rm", "-f", "-t0", self.pod(kind))
        self.start(kind)
        print(f"pod replaced: {kind}", flush=True)

    def steps(self) -> list[int]:
        file = self.volume("tiny-trainer") / "tiny/metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        read = [json.loads(line) for line in lines if line.endswith("}")]
        return [line["step"] for line in read if "reward/mean" in line]

    def until(self, what: str, condition: Callable[[], bool], patience_s: float = 600) -> None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > patience_s:
                logs = (
                    self.logs(kind) for kind in ("queue", "trainer", "rollout", "feeder", "reward")
                )
                raise SystemExit(f"not within {patience_s:.0f} s: {what}\n" + "\n".join(logs))
            time.sleep(1)
        print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)

    def logs(self, kind: str) -> str:
        return f"== {kind}\n" + self.podman.run(
            "logs", "--tail=15", f"{self.pod(kind)}-{kind}", check=False
        )

    def trained(self, steps: int) -> None:
        self.until(f"step {steps}", lambda: len(set(self.steps())) >= steps)

    def healthy(self, kind: str) -> bool:
        words = ["exec", f"{self.pod(kind)}-{kind}", "meshrl", "health", "127.0.0.1:7001"]
        return "is SERVING" in self.podman.run(*words, check=False)

    def ledger(self) -> str:
        infra = self.podman.run("pod", "inspect", "-f", "{{.InfraContainerID}}", self.pod("queue"))
        field = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        address = self.podman.inspect(infra.strip(), field)
        words = [sys.executable, "-m", "meshrl.cli", "ledger", "--run", "tiny"]
        credential = {"MESHRL_CREDENTIAL_FILE": str(self.folder / "runs/tiny/credentials/operator")}
        done = subprocess.run(
            [*words, "--queue", f"{address}:7001"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **credential},
        )
        return done.stdout + done.stderr

    def tell(self) -> None:
        for kind in ("queue", "reward", "feeder", "rollout", "trainer"):
            self.start(kind)
        self.trained(3)
        print({kind: self.healthy(kind) for kind in ("queue", "reward", "rollout", "trainer")})
        self.kill("queue")
        self.trained(8)
        self.replace("queue")
        self.trained(14)
        for number in (1, 2):
            self.start("rollout", number)
        self.trained(22)
        for number in (1, 2):
            self.podman.run("pod", "rm", "-f", "-t60", self.pod("rollout", number))
        print("rollout: 1, 3, 1", flush=True)
        self.trained(28)
        self.kill("trainer")
        self.until("the trainer's pod fails", lambda: self.state("trainer").startswith("exited"))
        self.replace("trainer")
        self.trained(36)
        for kind in ("reward", "rollout"):
            self.kill(kind)
        self.until("the trainer ends with 0", lambda: self.state("trainer") == "exited 0")
        steps = self.steps()
        print(
            f"{len(steps)} steps, {len(set(steps))} of them different; feeder {self.state('feeder')}"
        )
        assert set(steps) == set(range(1, STEPS + 1)), steps
        print(self.ledger())


def main(folder: Path) -> None:
    podman = Podman(folder)
    if not podman.run("images", "-q", "localhost/meshrl:cpu"):
        with docker(folder) as engine:
            save = subprocess.Popen(
                ["/usr/bin/docker", "save", "meshrl:cpu"],
                stdout=subprocess.PIPE,
                env=engine.environment,
            )
            words = ["podman", "load", "-q"]
            subprocess.run(words, stdin=save.stdout, check=True, env=podman.environment)
            save.wait()
    try:
        Story(podman, folder / "pods").tell()
    finally:
        podman.run("pod", "rm", "-fa", "-t0")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
