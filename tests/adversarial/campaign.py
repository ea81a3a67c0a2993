"""Runs hostile functions, each in a sandbox of its own, while an honest one scores beside them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Outcome, Sample, Score, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import PoolJudge
from meshrl.rewardd.pool.rule import FunctionSpec, RewardRule
from meshrl.rewardd.registry.building import submitted_sandbox
from meshrl.sandbox import landlock, seccomp
from meshrl.sandbox.limits import ScoringLimits
from meshrl.sandbox.sandbox import NOBODY, Isolation, no_bubblewrap
from tests.adversarial.attacks import SECRET, Attack

LIMITS = {"deadline_s": 1, "start_deadline_s": 20, "output_bytes": 1_000_000, "tmp_bytes": 4 << 20}
AT_ONCE = 4
ASKED = ("good", "bad", "good")
HONEST = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str)
"""
FILES = """
import os
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return os.statvfs(os.environ['TMPDIR']).f_files
"""
MANY_FILES = 10_000
"""As many as an attack tries to make."""


@dataclass
class Ended:
    """The end of an attack."""

    scores: list[Score]
    refused: str = ""
    left_over: int = 0
    """Processes of the sandboxes that still run."""
    harm: list[str] = field(default_factory=list)
    """Harm to other processes and files."""


@dataclass
class Campaign:
    """The end of every attack, and what the honest function scored meanwhile."""

    ended: dict[str, Ended]
    honest: list[Score]
    rounds: int
    skipped: dict[str, str]
    """Attack to the reason why this machine cannot hold it."""


@dataclass
class Victim:
    """A process, a file and two datagram sockets of the user that sandboxed functions have on this machine."""

    process: subprocess.Popen[bytes]
    file: Path
    sockets: tuple[socket.socket, ...]

    def harm(self) -> list[str]:
        """Harm done to them since the last call; repaired for the next attack."""
        found = []
        if self.process.poll() is not None:
            found.append(f"a foreign process was killed by signal {-self.process.returncode}")
        elif os.sched_getaffinity(self.process.pid) != os.sched_getaffinity(0):
            found.append("a foreign process was pinned to a processor")
        elif os.getpriority(os.PRIO_PROCESS, self.process.pid) > os.getpriority(os.PRIO_PROCESS, 0):
            found.append("a foreign process was slowed down")
        status = self.file.stat()
        if (status.st_mode & 0o777, status.st_uid, status.st_gid) != (0o640, *self._owner):
            found.append("the mode or the owner of a foreign file was changed")
        if status.st_mtime < 1000 or status.st_size == 0:
            found.append("the times or the size of a foreign file were changed")
        for end in self.sockets:
            try:
                end.recv(16)
                found.append("a datagram reached a foreign socket")
            except BlockingIOError:
                pass
        return found

    @property
    def _owner(self) -> tuple[int, int]:
        return (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


@contextmanager
def victim_in(folder: Path) -> Iterator[Victim]:
    """Starts a process of that user, and makes its file and its sockets in `folder`."""
    root = os.geteuid() == 0
    file, path = folder / "another_sample.json", folder / "socket"
    file.write_text("the truth")
    file.chmod(0o640)
    named, abstract = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    named.bind(str(path))
    path.chmod(0o777)
    abstract.bind(f"\0{path}")
    for end in (named, abstract):
        end.setblocking(False)
    if root:
        os.chown(file, NOBODY, NOBODY)
    process = subprocess.Popen(["sleep", "3600"], user=NOBODY if root else None)
    try:
        yield Victim(process, file, (named, abstract))
    finally:
        process.kill()
        process.wait()
        named.close()
        abstract.close()


def judge_of(source: str, directory: Path, level: Isolation, **limits: float) -> PoolJudge:
    """A judge with one submitted function."""
    spec = FunctionSpec(
        component="compute_score", weight=1, kwargs={}, name="compute_score", digest="d" * 32,
        path=str(directory / "source.py"), source=source,
    )  # fmt: skip
    config = RewardConfig(sandbox=level, workers=1, limits=ScoringLimits(deadline_s=60))
    sandbox = submitted_sandbox(directory, config, limits=LIMITS | limits)
    return PoolJudge(RewardRule(functions=(spec,)), config, sandbox=sandbox)


def sample(solution: str, index: int) -> Sample:
    """One that asks for nothing but a score."""
    return Sample(
        uid=Uid("r", "t", index),
        data_source="",
        solution=solution,
        ground_truth=None,
        extra_info={},
    )


def sandbox_processes(marker: str) -> int:
    """Processes anywhere on this machine whose command line names a sandbox of this test."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += marker.encode() in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return found


async def attacked(attack: Attack, directory: Path, level: Isolation, victim: Victim) -> Ended:
    """Run one attack between two good samples."""
    source = attack.source
    for name, value in (
        ("{marked}", victim.file),
        ("{victim}", victim.process.pid),
        ("{socket}", victim.sockets[0].getsockname()),
    ):
        source = source.replace(name, str(value))
    short = {"start_deadline_s": 2} if attack.name == "endless import" else {}
    judge = judge_of(source, directory, level, **short)
    try:
        scores = list(await judge.score([sample(text, n) for n, text in enumerate(ASKED)]))
        return Ended(scores, harm=victim.harm())
    except ConfigError as error:
        return Ended([], refused=str(error), harm=victim.harm())
    finally:
        await judge.close()


async def campaign(level: Isolation, attacks: Sequence[Attack], folder: Path) -> Campaign:
    """Every attack, a few at once, while an honest function scores."""
    honest = judge_of(HONEST, _folder(folder, "honest"), level, deadline_s=60)
    probe = judge_of(FILES, _folder(folder, "probe"), level)
    try:
        (files,) = await probe.score([sample("", 0)])
    finally:
        await probe.close()
    skipped = {
        attack.name: "no user namespaces here: /tmp has no limit of files"
        for attack in attacks
        if attack.private_tmp and not 0 < files.score < MANY_FILES and not _makes_namespaces()
    }
    await honest.start()
    slots, ended, over = asyncio.Semaphore(AT_ONCE), dict[str, Ended](), asyncio.Event()

    async def one(number: int, attack: Attack) -> None:
        directory = _folder(folder, f"version-{number}")
        async with slots:
            with victim_in(_folder(folder, f"victim-{number}")) as victim:
                ended[attack.name] = await attacked(attack, directory, level, victim)
                ended[attack.name].left_over = sandbox_processes(str(directory))

    async def score_honestly() -> tuple[list[Score], int]:
        scores, rounds = [], 0
        while not over.is_set():
            scores += await honest.score([sample(str(n), n) for n in range(8)])
            rounds += 1
            await asyncio.sleep(0.01)  # leaves the processors to the attacks
        return scores, rounds

    scoring = asyncio.create_task(score_honestly())
    try:
        async with asyncio.TaskGroup() as group:
            for number, attack in enumerate(attacks):
                if attack.name not in skipped:
                    group.create_task(one(number, attack))
    finally:
        over.set()
        scores, rounds = await scoring
        await honest.close()
    return Campaign(ended, scores, rounds, skipped)


def _makes_namespaces() -> bool:
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10020000) != 0)"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    folder.chmod(0o755)
    return folder


def run_campaign(level: Isolation, attacks: Sequence[Attack], folder: Path) -> Campaign:
    """As `campaign`, with a secret in the environment that nobody may see."""
    folder.chmod(0o755)
    os.environ[SECRET] = SECRET
    try:
        return asyncio.run(campaign(level, attacks, folder))
    finally:
        del os.environ[SECRET]


def why_not(level: Isolation, folder: Path) -> str | None:
    """Why this machine cannot give the level; None when it can."""
    if level is Isolation.STRICT:
        return no_bubblewrap()
    if not (seccomp.available() and landlock.version()):
        return "this kernel has no system call filters or no Landlock"
    try:
        judge_of(HONEST, folder, level)
    except ConfigError as error:
        return str(error)
    return None


def faults(attack: Attack, ended: Ended) -> list[str]:
    """The product's failures under the attack; empty if the attack ended as it must."""
    found = list(ended.harm)
    if ended.left_over:
        found.append(f"{ended.left_over} processes were left")
    if not attack.body:
        if attack.reason not in ended.refused:
            found.append(f"wanted a refusal with {attack.reason!r}, got {ended.refused!r}")
        return found
    if ended.refused:
        return [*found, f"refused: {ended.refused}"]
    before, bad, after = ended.scores
    if bad.outcome is not attack.outcome or attack.expected not in bad.reason:
        found.append(
            f"wanted {attack.outcome} {attack.expected!r}, got {bad.outcome} {bad.reason!r}"
        )
    if bad.score != attack.score:
        found.append(f"wanted the score {attack.score}, got {bad.score}")
    if [(s.outcome, s.score) for s in (before, after)] != [(Outcome.OK, 1.0)] * 2:
        found.append(f"the good samples got {before.outcome} and {after.outcome}: {after.reason}")
    return found


def honest_faults(run: Campaign) -> list[str]:
    """Scores of the honest function that are missing or wrong."""
    if run.rounds <= len(run.ended) // AT_ONCE:
        return [f"the honest function had {run.rounds} rounds only"]
    wrong = [s for s in run.honest if s.outcome is not Outcome.OK]
    scores = [s.score for s in run.honest] == [float(n) for n in range(8)] * run.rounds
    return (
        [] if scores and not wrong else [f"{len(wrong)} honest samples have no score: {wrong[:1]}"]
    )
