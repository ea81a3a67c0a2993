"""deploy/compose.yaml under a dockerd of our own: trains, whatever is killed, through the engine's stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from tests.mesh import make_mesh

from .images import BASE, Docker, docker
from .pods import ROOT

STEPS: Final = 900
PORT: Final = "18800"
SAVE_EVERY: Final = 5
PROMETHEUS: Final = f"""\
FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["prometheus"]
"""
"""Debian's: the image that compose.yaml names is on a registry."""
PROMETHEUS_PORT: Final = "19090"
REWARD: Final = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if solution_str.strip().endswith(ground_truth) else 0.0
"""


class Project:
    """The mesh of compose.yaml, with more files over it, as one project of compose."""

    def __init__(self, engine: Docker, name: str, *more: str, **variables: str) -> None:
        self.engine, self.name = engine, name
        self.files = ["compose.yaml", *more]
        self.variables = {f"MESHRL_{key.upper()}": value for key, value in variables.items()}
        self.variables["MESHRL_REWARD_PORT"] = PORT
        self.variables["MESHRL_PROMETHEUS_PORT"] = PROMETHEUS_PORT
        self.variables["MESHRL_PROMETHEUS_IMAGE"] = "prometheus:debian"

    def run(self, *words: str, check: bool = True) -> str:
        files = [word for file in self.files for word in ("-f", str(ROOT / "deploy" / file))]
        self.engine.environment |= self.variables
        done = self.engine.run(
            "compose", *files, "-p", self.name, "--ansi=never", *words, check=check
        )
        return done.stdout + done.stderr

    def up(self, *words: str) -> None:
        """Start what does not run; `words` are more options."""
        self.run("up", "-d", "--no-build", "--no-recreate", *words)

    def operator(self, *words: str) -> str:
        """A command in the container of the operator."""
        return self.run("run", "--rm", "-T", "operator", *words)

    def containers(self, service: str) -> list[str]:
        filters = (f"project={self.name}", f"service={service}")
        words = [f"--filter=label=com.docker.compose.{each}" for each in filters]
        return self.engine.lines("ps", "-q", *words)

    def kill(self, service: str) -> None:
        """kill -9 of what the container runs, by the host: as a process that dies, not as a person's word."""
        pid = self.inspect(self.containers(service)[0], "{{.State.Pid}}")
        Path("/proc", pid, "task").resolve(strict=True)

        os.kill(int(pid), signal.SIGKILL)
        print(f"killed -9: {service}", flush=True)

    def inspect(self, container: str, field: str) -> str:
        return self.engine.lines("inspect", "-f", field, container)[0]

    def volume(self, name: str) -> Path:
        (path,) = self.engine.lines(
            "volume", "inspect", "-f", "{{.Mountpoint}}", f"{self.name}_{name}"
        )
        return Path(path)

    def metrics(self) -> list[dict[str, float]]:
        file = self.volume("runs") / "mesh/metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> list[int]:
        return [int(line["step"]) for line in self.metrics() if "reward/mean" in line]

    def until(self, what: str, condition: Callable[[], bool], patience_s: float = 600) -> None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > patience_s:
                raise SystemExit(
                    f"not within {patience_s:.0f} s: {what}\n{self.run('logs', '--tail=30')}"
                )
            time.sleep(1)
        print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)

    def trained(self, steps: int) -> None:
        self.until(f"step {steps}", lambda: len(set(self.steps())) >= steps)

    def done(self) -> None:
        ended = ["exited", "0"]
        self.until("the trainer ends with 0", lambda: self.trainer_state() == ended)

    def trainer_state(self) -> list[str]:
        words = ["-a", "-q", f"--filter=label=com.docker.compose.project={self.name}"]
        words.append("--filter=label=com.docker.compose.service=trainer")
        return self.inspect(
            self.engine.lines("ps", *words)[0], "{{.State.Status}} {{.State.ExitCode}}"
        ).split()

    def report(self) -> None:
        found = [line["val/score/mean"] for line in self.metrics() if "val/score/mean" in line]
        steps = self.steps()
        print(
            f"held-out {found[0]:.3f} -> {found[-1]:.3f}; {len(steps)} steps, {len(set(steps))} of them different"
        )
        assert set(steps) == set(range(1, max(steps) + 1)), steps
        print(self.operator("ledger"), flush=True)


def tiny_recipe(folder: Path) -> dict[str, str]:
    """A recipe of the tests with STEPS steps, and its files, as variables of compose."""
    shutil.rmtree(folder, ignore_errors=True)
    mesh = make_mesh(folder / "data")
    text = mesh.recipe.read_text().replace(str(mesh.directory), "data")
    recipe = yaml.safe_load(text)
    del recipe["run"]["dir"]
    recipe["trainer"] |= {
        "total_training_steps": STEPS,
        "save_freq": SAVE_EVERY,
        "test_freq": STEPS,
    }
    (folder / "recipes").mkdir()
    (folder / "recipes/tiny.yaml").write_text(yaml.safe_dump(recipe))
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    paths = {"recipes": f"{folder}/recipes", "data": f"{folder}/data"}
    return {"recipe": "recipes/tiny.yaml", **paths}


def demo(engine: Docker, folder: Path) -> None:
    """As the README says, on a machine that has the images: the demo's recipe to its end."""
    project = Project(engine, "demo")
    project.up()
    project.done()
    project.report()
    print(project.operator("status"))
    project.up()
    project.done()
    print("up once more: ends with 0 again")
    project.run("down", "--volumes")


def kills(engine: Docker, folder: Path) -> None:
    """Kill each service, scale the fleet, submit a reward from the host, stop the engine in mid-run."""
    project = Project(engine, "kills", "compose.rewards.yaml", **tiny_recipe(folder / "tiny"))
    alone = ("--scale", "reference=0")
    project.up(*alone)
    project.trained(4)
    for service in ("queue", "rollout", "reward", "feeder"):
        project.kill(service)
    project.trained(8)
    project.kill("trainer")
    project.trained(12)
    project.up(*alone, "--scale", "rollout=3")
    project.trained(16)
    project.up(*alone, "--scale", "rollout=1")
    project.trained(20)
    submit(project)
    project.trained(24)
    print(f"reward/hash of the last step: {project.metrics()[-1].get('reward/hash')}")
    monitor(project)
    steps = set(project.steps())
    took = engine.stop()
    saved = newest_checkpoint(project)
    print(
        f"engine stopped in {took:.0f} s after step {max(steps)}; newest checkpoint {saved}",
        flush=True,
    )
    engine.start()
    project.trained(max(steps) + 4)
    print(
        "after the engine's return, without any command:",
        project.run("ps", "--format", "{{.Service}} {{.Status}}"),
    )
    project.run("--profile", "monitoring", "down")
    project.up(*alone)
    project.done()
    project.report()
    project.run("down", "--volumes")


def newest_checkpoint(project: Project) -> int:
    """Its step; the engine does not run."""
    path = Path(
        project.engine.folder, "root/volumes", f"{project.name}_runs", "_data/mesh/checkpoints"
    )
    return max(int(each.name.split("-")[1]) for each in path.glob("step-*"))


def submit(project: Project) -> None:
    """Submit a reward over HTTP from this host: refused without a token, accepted with the submitter's."""
    url = f"http://127.0.0.1:{PORT}/v1/rewards"
    body = json.dumps({"name": "reward", "source": REWARD}).encode()
    token = (project.volume("credentials-operator") / "credentials/submitter").read_text().strip()
    for name, headers in (
        ("no token", {}),
        ("the submitter's", {"Authorization": f"Bearer {token}"}),
    ):
        request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                print(
                    f"POST /v1/rewards with {name}: {answer.status} {answer.read()[:200].decode()}",
                    flush=True,
                )
        except urllib.error.HTTPError as error:
            print(
                f"POST /v1/rewards with {name}: {error.code} {error.read()[:200].decode()}",
                flush=True,
            )


def monitor(project: Project) -> None:
    """Check that Prometheus of the profile scrapes all services and the dashboard's queries find series."""
    folder = project.engine.folder.parent / "prometheus"
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(PROMETHEUS)
    words = ["build", "--network=host", "--tag=prometheus:debian", str(folder)]
    project.engine.run(*words, timeout=600)
    project.run("--profile", "monitoring", "up", "-d", "--no-build", "prometheus")

    def health() -> list[tuple[str, str]]:
        try:
            found = asked("targets?state=active")["activeTargets"]
        except OSError:
            return []
        return sorted((each["labels"]["instance"], each["health"]) for each in found)

    def scraped() -> bool:
        up = {instance for instance, state in health() if state == "up"}
        return {f"{name}:9100" for name in ("queue", "trainer", "reward", "feeder")} <= up

    project.until("Prometheus scrapes all services", scraped, patience_s=120)
    print(health(), flush=True)
    for expression in expressions(json.loads((ROOT / "deploy/grafana/meshrl.json").read_text())):
        query = urllib.parse.quote(expression.replace("$run", ".*"))
        found = asked(f"query?query={query}")["result"]
        print(f"{len(found)} series: {expression}")
    rules = [rule for group in asked("rules")["groups"] for rule in group["rules"]]
    print("alerts:", {rule["name"]: (rule["health"], rule["state"]) for rule in rules}, flush=True)


def asked(path: str) -> Any:
    url = f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/{path}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


def expressions(part: Any) -> Iterator[str]:
    """Expressions of the dashboard's panels."""
    inside: list[Any] = part if isinstance(part, list) else []
    if isinstance(part, dict):
        inside = list(part.values())
        if "expr" in part:
            yield part["expr"]
    for each in inside:
        yield from expressions(each)


def wrong(engine: Docker, folder: Path) -> None:
    """Start a recipe that does not exist: reported once, not tried again."""
    project = Project(engine, "wrong", recipe="recipes/nothing.yaml")
    project.up("queue")
    time.sleep(15)
    (queue,) = project.containers("queue")
    state = project.inspect(queue, "{{.RestartCount}} restarts, {{.State.Status}}")
    print(f"queue: {state}")
    print(project.run("logs", "--no-log-prefix", "queue"))
    project.run("down", "--volumes")


STORIES: Final = {story.__name__: story for story in (demo, kills, wrong)}

if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    with docker(folder) as engine:
        for name in sys.argv[2:] or STORIES:
            print(f"== {name}: {STORIES[name].__doc__}", flush=True)
            STORIES[name](engine, folder)
