"""Several machines on this one: network namespaces with addresses of their own around a router that can swallow.

    queue, reward, feeder       trainer 0        trainer 1        rollout          each a namespace and a folder
          └──────────────────────┴────────┬───────┴────────────────┘
                                       router

Every service is started by the command of docs/how-to/several-machines.md, and again when it fails, as systemd would.

    python -m deploy.checks.machines [STORY ...] [--folder DIR]     plays stories as root; a line of JSON for each
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from meshrl.rpc.exit_codes import Exit
from tests.mesh import PATIENCE_S, Mesh, make_mesh

ROOT = Path(__file__).parents[2]
QUEUE_PORT, TRAINER_PORT = 7001, 7005
FILES = {"cert": "cert.pem", "key": "key.pem", "ca": "ca.pem", "client_ca": "ca.pem"}


NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Nothing that is started in them outlives the first process."""


def missing() -> str:
    """Why there can be no machines here; empty where there can."""
    lacking = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if lacking:
        return f"{', '.join(lacking)}: not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


@dataclass(eq=False)
class Program:
    """A command that is started again whenever it fails."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def kill(self) -> None:
        """Kill it with everything below it, as when the machine goes."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass(eq=False)
class Machine:
    """A namespace, an address, a folder, and what runs there."""

    name: str
    address: str
    folder: Path
    programs: dict[str, Program] = field(default_factory=dict)

    def run(self, name: str, *words: str, **environment: str) -> Program:
        """Start `meshrl WORDS`, to be started again when it fails."""
        program = Program(
            ["ip", "netns", "exec", self.name, sys.executable, "-P", *words],
            environment,
            self.folder.parent / f"{self.name}-{name}.log",
            self.folder,
        )
        self.programs[name] = program
        program.start()
        return program

    def kill(self) -> None:
        """All processes that run there."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        for pid in done.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for program in self.programs.values():
            program.kill()

    def told(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `meshrl WORDS` to its end."""
        return subprocess.run(
            ["ip", "netns", "exec", self.name, sys.executable, "-P", "-m", "meshrl.cli", *words],
            cwd=self.folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


class Lan:
    """Machines around a router. Run it in a network and a mount namespace of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        self.leaves = Exit.DONE
        """The exit code after which a service is not started again."""
        self.machines: dict[str, Machine] = {}
        # The names of namespaces are files there, which would stay behind.
        Path("/run/netns").mkdir(exist_ok=True)
        _run("mount", "-t", "tmpfs", "machines", "/run/netns")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        _run("ip", "link", "set", "lo", "up")

    def add(self, name: str, address: str = "") -> Machine:
        """One more machine, with an address that none had before unless one is given."""
        self._count += 1
        number = int(address.split(".")[2]) if address else self._count
        address, gate = f"10.78.{number}.2", f"10.78.{number}.1"
        _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            f"to{number}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            name,
        )
        _run("ip", "addr", "add", f"{gate}/24", "dev", f"to{number}")
        _run("ip", "link", "set", f"to{number}", "up")
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["route", "add", "default", "via", gate],
        ):
            _run("ip", "-n", name, *words)
        folder = self.folder / name
        folder.mkdir()
        self.machines[name] = Machine(name, address, folder)
        return self.machines[name]

    def cut(self, machine: Machine) -> None:
        """Drop its packets in both directions: neither end notices."""
        _run("ip", "route", "add", "blackhole", machine.address)
        _run("ip", "rule", "add", "from", machine.address, "blackhole")

    def heal(self, machine: Machine) -> None:
        """Forward again."""
        _run("ip", "route", "del", "blackhole", machine.address)
        _run("ip", "rule", "del", "from", machine.address, "blackhole")

    def lose(self, machine: Machine) -> None:
        """Cut a machine's power: it goes silent, and its connections do not end."""
        self.cut(machine)
        machine.kill()
        del self.machines[machine.name]
        _run("ip", "netns", "del", machine.name)
        _run("ip", "link", "del", f"to{machine.address.split('.')[2]}")
        self.heal(machine)

    def tend(self) -> None:
        """Start again what failed."""
        for machine in self.machines.values():
            for program in machine.programs.values():
                if program.code not in (None, self.leaves, Exit.USER_ERROR):
                    program.start()

    def close(self) -> None:
        for machine in self.machines.values():
            for program in machine.programs.values():
                program.kill()


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


@dataclass(kw_only=True)
class Setup:
    """The settings of one story."""

    carrier: Literal["gloo", "delta"]
    tls: bool = False
    trainers: int = 1
    steps: int = 12
    peer_timeout_s: float = 6.0


class Cluster:
    """A mesh on several machines."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.setup, self.folder = setup, folder
        self.lan = Lan(folder)
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.mesh = self._written(folder)
        self.front = self.lan.add("front")
        self.trainers = [self.lan.add(f"train-{n}") for n in range(setup.trainers)]
        self._authority: Any = None
        self.torchrun = False
        for machine in [self.front, *self.trainers]:
            self.equip(machine)
        # The trainer's machines share the folder of the run; the others have one each.
        for machine in self.trainers:
            (machine.folder / "run").symlink_to(self.shared)

    def _written(self, folder: Path) -> Mesh:
        tls = {"tls": {key: f"tls/{name}" for key, name in FILES.items()}} if self.setup.tls else {}
        trainer = {
            "total_training_steps": self.setup.steps,
            "save_freq": 3,
            "test_freq": -1,
            "val_before_train": False,
            "nnodes": self.setup.trainers,
            "peer_timeout_s": self.setup.peer_timeout_s,
        }
        weights = {"carrier": self.setup.carrier, "host": "10.78.2.2"}
        assets = folder / "assets"
        assets.mkdir()
        written = make_mesh(assets, {"trainer": trainer, "weights": weights, **tls})
        recipe = yaml.safe_load(written.recipe.read_text())
        recipe["run"]["dir"] = "run"
        (folder / "my.yaml").write_text(yaml.safe_dump(recipe))
        return Mesh(directory=folder, recipe=folder / "my.yaml")

    def equip(self, machine: Machine) -> None:
        """Give a machine its certificate."""
        if not self.setup.tls:
            return
        import trustme

        self._authority = self._authority or trustme.CA()
        issued = self._authority.issue_cert(machine.address)
        (machine.folder / "tls").mkdir()
        (machine.folder / "tls/key.pem").touch(0o600)
        issued.private_key_pem.write_to_path(machine.folder / "tls/key.pem")
        for number, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(machine.folder / "tls/cert.pem", append=number > 0)
        self._authority.cert_pem.write_to_path(machine.folder / "tls/ca.pem")

    def credentials(self, machine: Machine, role: str) -> dict[str, str]:
        """Copied from the machine that started first, as the page says."""
        here, there = machine.folder / "credentials", self.front.folder / "run/credentials"
        here.mkdir(exist_ok=True)
        for name in (role, "verifiers.json"):
            shutil.copy(there / name, here / name)
        return {
            "MESHRL_CREDENTIAL_FILE": str(here / role),
            "MESHRL_VERIFIERS_FILE": str(here / "verifiers.json"),
        }

    def open_words(self, needed: bool) -> list[str]:
        """Beyond loopback without encryption, or with gradients and gloo, the user must have allowed it."""
        return ["--allow-insecure-bind"] if needed else []

    def start(self) -> None:
        front, recipe = self.front, str(self.mesh.recipe)
        words = ["-m", "meshrl.cli", "serve"]
        listens = ["--host", "0.0.0.0", "--port", str(QUEUE_PORT)]
        insecure = self.open_words(not self.setup.tls)
        front.run("queue", *words, "queue", recipe, *listens, *insecure)
        self.until(lambda: (front.folder / "run/credentials/verifiers.json").exists())
        own = front.address if self.setup.tls else "127.0.0.1"
        for kind in ("reward", "feeder"):
            front.run(kind, *words, kind, recipe, "--queue", f"{own}:{QUEUE_PORT}")
        for node in range(self.setup.trainers):
            self.train(node)

    def train(self, node: int) -> Program:
        """Start the trainer on its machine of that number."""
        machine, words = (
            self.trainers[node],
            ["-m", "meshrl.cli", "serve", "trainer", str(self.mesh.recipe)],
        )
        insecure = not self.setup.tls or self.setup.trainers > 1 or self.setup.carrier == "gloo"
        words += ["--host", "0.0.0.0", "--port", str(TRAINER_PORT), *self.open_words(insecure)]
        words += ["--queue", f"{self.front.address}:{QUEUE_PORT}"]
        words += ["--node-rank", str(node)] if self.setup.trainers > 1 else []
        if self.torchrun:
            meeting = f"{self.trainers[0].address}:29500"
            agent = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "tiny"]
            agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting]
            # Torch would ask the name of this machine for its address, and a namespace has no name of its own.
            agent += ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", machine.address]
            words = ["-m", "torch.distributed.run", *agent, "--max-restarts", "5", *words]
        return machine.run("trainer", *words, **self.credentials(machine, "trainer"))

    def replace_trainer(self, node: int) -> None:
        """Another machine in the place of one that is lost; only the first one's address is in the recipe."""
        address = self.trainers[node].address if node == 0 else ""
        self.lan.lose(self.trainers[node])
        machine = self.lan.add(f"train-{node}-new", address)
        self.equip(machine)
        (machine.folder / "run").symlink_to(self.shared)
        self.trainers[node] = machine
        self.train(node)

    def sample(self, name: str, machine: Machine | None = None) -> Machine:
        """A rollout worker, on a machine of its own if none is given."""
        if machine is None:
            machine = self.lan.add(name)
            self.equip(machine)
        words = ["-m", "meshrl.cli", "serve", "rollout", str(self.mesh.recipe), "--name", name]
        words += ["--queue", f"{self.front.address}:{QUEUE_PORT}"]
        words += ["--trainer", f"{self.trainers[0].address}:{TRAINER_PORT}"]
        words += self.open_words(not self.setup.tls)
        machine.run(name, *words, **self.credentials(machine, "rollout"))
        return machine

    def steps(self) -> list[int]:
        """The steps in the run's metrics."""
        path = self.shared / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        read = [json.loads(line) for line in lines if line.endswith("}")]
        return [line["step"] for line in read if "reward/mean" in line]

    def trained(self, more: int) -> None:
        """Wait for a number of further steps."""
        wanted = len(self.steps()) + more
        self.until(lambda: len(self.steps()) >= wanted or self.done)

    @property
    def done(self) -> bool:
        return all(machine.programs["trainer"].code == self.lan.leaves for machine in self.trainers)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.told()
            wrong = [
                f"{machine.name}: {name}"
                for machine in self.lan.machines.values()
                for name, program in machine.programs.items()
                if program.code == Exit.USER_ERROR
            ]
            assert not wrong, f"{wrong}\n{self.told()}"
            self.lan.tend()
            time.sleep(0.2)

    def stop(self) -> dict[str, Any]:
        """Stop the trainer's first machine: it saves, and the others end with it."""
        process = self.trainers[0].programs["trainer"].process
        assert process is not None
        self.lan.leaves = Exit.DRAINED
        process.terminate()
        return self.to_the_end()

    def to_the_end(self) -> dict[str, Any]:
        """Wait for the trainer's end; then end the others as a person would, and balance the ledger."""
        self.until(lambda: self.done)
        programs = [
            p for m in self.lan.machines.values() for n, p in m.programs.items() if n != "queue"
        ]
        for program in [*programs, self.front.programs["queue"]]:
            if program.process is not None and program.code is None:
                program.process.terminate()
                program.process.wait(60)
        stored = Mesh(directory=self.front.folder, recipe=self.mesh.recipe)
        ledger = asyncio.run(stored.ledger())
        assert ledger.balanced, ledger
        steps = len(set(self.steps()))
        assert sorted(set(self.steps())) == list(range(1, steps + 1)), self.steps()
        saved = sorted(path.name for path in (self.shared / "checkpoints").glob("step-*"))
        assert saved and int(saved[-1].split("-")[1]) == steps, (saved, steps)
        return {
            "steps": steps,
            "lines_of_steps": len(self.steps()),
            "ledger": "balanced",
            "starts": {
                f"{m.name}/{n}": p.starts
                for m in self.lan.machines.values()
                for n, p in m.programs.items()
            },
        }

    def told(self) -> str:
        """The ends of all logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-1800:]}" for log in logs)


def ranks(cluster: Cluster) -> dict[str, Any]:
    """Two trainer machines; the second's agent is killed and started again."""
    cluster.start()
    cluster.sample("rollout-0")
    cluster.trained(4)
    cluster.trainers[1].kill()
    cluster.trained(4)
    # torchrun gives the ranks 30 s to end and then says that they failed.
    return cluster.to_the_end() if cluster.torchrun else cluster.stop()


def torchrun(cluster: Cluster) -> dict[str, Any]:
    """The same, where torchrun's agents start the ranks."""
    cluster.torchrun = True
    return ranks(cluster)


def up(cluster: Cluster) -> dict[str, Any]:
    """`meshrl up` starts everything on two machines, as under Slurm; the trainer's part on the second is killed."""
    machines = [machine.address for machine in cluster.trainers]
    for machine in cluster.trainers:
        Path("/run/netns", machine.address).symlink_to(f"/run/netns/{machine.name}")
    (cluster.folder / "run").symlink_to(cluster.shared)
    words = ["up", str(cluster.mesh.recipe), "--plain", "--machines", ",".join(machines)]
    program = Program(
        [sys.executable, "-m", "meshrl.cli", *words, "--launcher", "ip netns exec {machine}"],
        {"MESHRL_ALLOW_INSECURE_BIND": "1"},
        cluster.folder / "up.log",
        cluster.folder,
    )
    program.start()
    cluster.until(lambda: len(cluster.steps()) >= 4)
    before = len(cluster.steps())
    (agent,) = _processes("--name\0trainer-1\0")
    os.kill(agent, signal.SIGKILL)
    cluster.until(lambda: len(cluster.steps()) >= before + 6)
    assert program.process is not None
    program.process.terminate()
    code = program.process.wait(PATIENCE_S)
    stored = Mesh(directory=cluster.folder, recipe=cluster.mesh.recipe)
    ledger = asyncio.run(stored.ledger())
    assert ledger.balanced, ledger
    steps = cluster.steps()
    assert sorted(set(steps)) == list(range(1, len(set(steps)) + 1)), steps
    return {"steps": len(set(steps)), "ledger": "balanced", "exit_code": code, "killed_at": before}


def _processes(words: str) -> list[int]:
    """Process ids with these words in their command, without launchers and ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if (
                words in path.read_text()
                and b"\0RANK=" not in (path.parent / "environ").read_bytes()
            ):
                found.append(int(path.parent.name))
    return found


def _asked(cluster: Cluster, machine: Machine) -> dict[str, str]:
    """The queue's answers on another machine to a stranger, to a worker, and to the operator."""
    words = ("ledger", "--queue", f"{cluster.front.address}:{QUEUE_PORT}", "--run", "tiny")
    tls = {f"MESHRL_TLS_{key.upper()}": f"tls/{FILES[key]}" for key in ("ca", "cert", "key")}
    tls = tls if cluster.setup.tls else {"MESHRL_ALLOW_INSECURE_BIND": "1"}
    operator = {**tls, **cluster.credentials(machine, "operator")}
    callers = {
        "no credential": tls,
        "reader": {**tls, **cluster.credentials(machine, "reader")},
        "operator": operator,
        **(
            {"no certificate": {**operator, "MESHRL_TLS_CERT": "", "MESHRL_TLS_KEY": ""}}
            if cluster.setup.tls
            else {}
        ),
        **(
            {
                "no encryption": {
                    "MESHRL_ALLOW_INSECURE_BIND": "1",
                    **{k: v for k, v in operator.items() if k not in tls},
                }
            }
            if cluster.setup.tls
            else {}
        ),
    }
    found = {}
    for caller, environment in callers.items():
        environment = {name: value for name, value in environment.items() if value}
        done = machine.told(*words, **environment)
        found[caller] = "answered" if done.returncode == 0 else done.stderr.strip()[-160:]
    answered = {caller for caller, said in found.items() if said == "answered"}
    assert answered == {"reader", "operator"}, found
    return found


def links(cluster: Cluster) -> dict[str, Any]:
    """Cut and healed links, lost machines and others in their place."""
    setup, lan = cluster.setup, cluster.lan
    cluster.start()
    rollout = cluster.sample("rollout-0")
    cluster.trained(2)
    asked = _asked(cluster, rollout)
    events = []

    def told(event: str) -> None:
        events.append(f"{event}: step {len(cluster.steps())}")

    def cut(machine: Machine, seconds: float) -> None:
        lan.cut(machine)
        time.sleep(seconds)
        lan.heal(machine)
        told(f"{machine.name} cut off for {seconds:.0f} s")
        cluster.trained(2)

    cut(rollout, 12.0)
    cut(cluster.trainers[1], setup.peer_timeout_s / 3)
    cut(cluster.trainers[1], setup.peer_timeout_s * 2)
    cluster.replace_trainer(1)
    told("train-1 lost, another machine in its place")
    cluster.trained(2)
    cluster.replace_trainer(0)
    told("train-0 lost, another machine with its address")
    cluster.trained(2)
    lan.lose(rollout)
    cluster.sample("rollout-1")
    told("rollout-0 lost, rollout-1 on another machine")
    cluster.trained(6)
    return {
        "carrier": setup.carrier,
        "mtls": setup.tls,
        "asked": asked,
        "events": events,
    } | cluster.stop()


STORIES: Mapping[str, tuple[Setup, Callable[[Cluster], dict[str, Any]]]] = {
    "ranks": (Setup(carrier="gloo", trainers=2, steps=10_000), ranks),
    "torchrun": (Setup(carrier="gloo", trainers=2, steps=60), torchrun),
    "up": (Setup(carrier="gloo", trainers=2, steps=10_000), up),
    "gloo": (Setup(carrier="gloo", trainers=2, steps=10_000), links),
    "delta": (Setup(carrier="delta", tls=True, trainers=2, steps=10_000), links),
}


def main() -> None:
    """Play each story in namespaces of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "stories", nargs="*", default=[], help=f"of {', '.join(STORIES)}; all if none"
    )
    parser.add_argument("--folder", type=Path, help="where logs stay; a temporary one if not given")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        (story,) = given.stories
        setup, play = STORIES[story]
        cluster = Cluster(given.folder, setup)
        began = time.monotonic()
        try:
            found = play(cluster)
        except BaseException:
            print(cluster.told(), file=sys.stderr)
            raise
        finally:
            cluster.lan.close()
        print(json.dumps({"story": story, **found, "seconds": round(time.monotonic() - began)}))
        return
    if why := missing():
        sys.exit(f"error: {why}")
    for story in given.stories or STORIES:
        if story not in STORIES:
            sys.exit(f"error: no story {story!r}; want some of {', '.join(STORIES)}")
        with _folder(given.folder, story) as folder:
            inside = [
                sys.executable,
                "-m",
                "deploy.checks.machines",
                story,
                "--inside",
                "--folder",
                str(folder),
            ]
            subprocess.run([*NAMESPACES, *inside], cwd=ROOT, check=True)


@contextmanager
def _folder(given: Path | None, story: str) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="machines-") as folder:
            yield Path(folder)
    else:
        (given / story).mkdir(parents=True)
        yield given / story


if __name__ == "__main__":
    main()
