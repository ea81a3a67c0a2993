"""Kills and stops one process of a weight plane at each of 20 points of the protocol, and checks the others.

    python -m tests.chaos.weights_points [--carrier shm] [--write] [--slowly 5] [--lends]
                                         [--part 1/3 --kept /tmp/outcomes.json]

Versions are published before they are gathered, as a trainer's are. A carrier that sends what is there while the rest
is gathered has two points more. `--write` renews the carrier's row of docs/reference/weights-chaos.md. With `--part`
the command runs one of so many parts and adds it to the file; the one that completes the file also renews the row.

One trainer and two survivors run through all cases; each replica that is killed or stopped is a process of its own.
Prints a table and, last, a line of JSON; exit code 0 when every case ended as it must:

    replica, SIGKILL   the survivors commit the version; its replacement joins and serves the newest one
    replica, SIGSTOP   the survivors commit it, and the next; the stopped one is out; after SIGCONT it serves that
    trainer, SIGKILL   the trainer that takes over publishes; both replicas serve that, in the new epoch
    trainer, SIGSTOP   both replicas keep a whole version; after SIGCONT they serve the one in transfer
    always             the hashes of every engine are those of the trainer, for each version that it ever committed
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.doubles import nccl

from ..promises import today_and_commit
from .weights_mesh import Mesh, Process

PAGE = Path(__file__).parents[2] / "docs/reference/weights-chaos.md"
CASE_S = 60.0
SURVIVORS = ("one", "two")
QUICK = {"base_s": 1.0, "silence_s": 2.0}
"""Deadlines of seconds, where a real fleet has tens."""


@dataclass(frozen=True, slots=True)
class Point:
    """The point at which a process is killed or stopped."""

    name: str
    role: str
    at: str
    """See weights_process.py."""
    joining: int = 1

    @property
    def early(self) -> bool:
        """Killed or stopped before it has anything: it never delays the version."""
        return self.at == "before hello" and self.joining == 1


POINTS = (
    Point("HELLO not yet sent", "replica", "before hello"),
    Point("PROPOSE received", "replica", "received propose"),
    Point("carrier being opened", "replica", "opening"),
    Point("READY not yet sent", "replica", "before ready"),
    Point("first bucket arrived", "replica", "before received 0"),
    Point("middle bucket arrived", "replica", "before received 2"),
    Point("last bucket arrived", "replica", "before received 3"),
    Point("engine staging", "replica", "staging"),
    Point("PREPARED sent", "replica", "after prepared"),
    Point("COMMIT received", "replica", "received commit"),
    Point("switched, COMMITTED not yet sent", "replica", "before committed"),
    Point("joining a second time, HELLO not yet sent", "replica", "before hello", joining=2),
    Point("PROPOSE not yet sent", "trainer", "before propose"),
    Point("READY received", "trainer", "received ready"),
    Point("first bucket acknowledged", "trainer", "received received 0"),
    Point("middle bucket acknowledged", "trainer", "received received 2"),
    Point("last bucket acknowledged", "trainer", "received received 3"),
    Point("first PREPARED received", "trainer", "received prepared"),
    Point("COMMIT sent to one", "trainer", "after commit"),
    Point("first COMMITTED received, queue not yet informed", "trainer", "received committed"),
)
GATHERING = (
    Point("READY sent, the first bucket not yet gathered", "replica", "after ready"),
    Point("first bucket gathered, not yet sent", "trainer", "before transfer"),
)
"""For carriers that send what is there while the rest is gathered."""


def points_of(carrier: str) -> tuple[Point, ...]:
    """Points of a carrier, replicas' first: each point of a trainer ends an epoch."""
    points = POINTS + (() if carrier == "disk" else GATHERING)
    return tuple(sorted(points, key=lambda point: point.role))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case."""

    point: str
    role: str
    signal: str
    ok: bool
    survivors_s: float | None
    """From the publishing of the version until the survivors had committed it, or what took its place."""
    back_s: float | None
    """From the replacement's start, or from SIGCONT, until all serve the newest version."""
    fault: str = ""


class Campaign:
    """A trainer, two survivors, and the process that is killed or stopped."""

    def __init__(self, directory: Path, carrier: str, slowly: float, *, lends: bool) -> None:
        # NCCL over a network does not notice that a rank is lost.
        stub = nccl.settings(deaf=True)
        self._times = slowly
        self._engine = ("--lends",) if lends else ()
        deadlines = {name: slowly * seconds for name, seconds in QUICK.items()}
        self.mesh = Mesh(
            directory, carrier, nccl=stub, ipc={"library": "tests.doubles.device"}, **deadlines
        )
        self._epoch = 1
        self._step = 0
        self._victims = 0
        self._truth: dict[str, list[str]] = {}
        """Hashes by version, as the trainers reported them."""

    async def start(self) -> None:
        self.trainer = await self.mesh.trainer()
        one, two = SURVIVORS
        self.survivors = [
            await self.mesh.replica(one, *self._engine),
            await self.mesh.replica(two),
        ]
        await self.publish()
        await self.serving(SURVIVORS)

    async def run_case(self, point: Point, number: signal.Signals) -> Outcome:
        case = self._replica if point.role == "replica" else self._trainer
        survivors_s: float | None = None
        back_s: float | None = None
        fault = ""
        try:
            async with asyncio.timeout(self._times * CASE_S):
                survivors_s, back_s = await case(point, number)
            self._compare()
        except (TimeoutError, AssertionError) as error:
            fault = f"{type(error).__name__} {error}: fleet {self.trainer.fleet}"
        return Outcome(point.name, point.role, number.name, not fault, survivors_s, back_s, fault)

    async def _replica(self, point: Point, number: signal.Signals) -> tuple[float, float]:
        self._victims += 1
        name = f"victim-{self._victims}"
        step = -1 if point.at == "before hello" else self._step + 1
        arm = f"--arm={point.at},{step},{number.value},{point.joining}"
        victim = await self.mesh.replica(name, arm, *self._engine)
        if not point.early:
            await self.serving([name])
        if point.joining == 2:  # out once, and on its way back
            await self._stop_until_out(victim, name)
            victim.signal(signal.SIGCONT)
        if point.at == "before hello":
            await victim.until(lambda: victim.all("signalled"))
        survivors_s = await self.publish()
        await victim.until(lambda: victim.all("signalled"))
        if number is signal.SIGKILL:
            assert await victim.child.wait() == -signal.SIGKILL
            began = time.monotonic()
            back = await self.mesh.replica(name, *self._engine)
        else:
            await victim.stopped()
            await self.publish()
            if not point.early:
                await self.trainer.until(lambda: self.trainer.fleet[name][0] == "out")
            began, back = time.monotonic(), victim
            victim.signal(signal.SIGCONT)
        await self.serving([name])
        back_s = time.monotonic() - began
        await self.serving(SURVIVORS)
        self._compare_one(back)
        await victim.end()
        await back.end()
        await self.trainer.until(lambda: self.trainer.fleet[name][0] == "out")
        return survivors_s, back_s

    async def _trainer(self, point: Point, number: signal.Signals) -> tuple[float, float]:
        await self.trainer.arm(point.at, self._step + 1, number)
        began = time.monotonic()
        await self.publish(wait=False)
        if number is signal.SIGKILL:
            assert await self.trainer.child.wait() == -signal.SIGKILL
            self._remember()
            self._epoch += 1
            # It resumes from its last checkpoint, one step earlier.
            self._step -= 2
            restarted = time.monotonic()
            self.trainer = await self.mesh.trainer(self._epoch)
            await self.publish()
        else:
            await self.trainer.stopped()
            # Not an event that can be seen from here: the replicas have given the trainer up.
            await asyncio.sleep(self._times * QUICK["silence_s"] + 0.5)
            self._compare()
            restarted = time.monotonic()
            self.trainer.signal(signal.SIGCONT)
        await self.serving(SURVIVORS)
        ended = time.monotonic()
        return ended - began, ended - restarted

    async def publish(self, *, wait: bool = True) -> float:
        """The next version; returns the seconds until the fleet has committed it."""
        self._step += 1
        began = time.monotonic()
        await self.trainer.publish(self._step)
        if wait:
            version = self.newest
            await self.trainer.until(lambda: version in self.trainer.all("published"))
            for survivor in self.survivors:
                await survivor.until(lambda each=survivor: version in each.all("commit"))
        return time.monotonic() - began

    async def serving(self, names: Iterable[str]) -> None:
        """Return once the trainer sees these at the newest version."""
        wanted = ["serving", self.newest]
        for name in names:
            await self.trainer.until(lambda each=name: self.trainer.fleet.get(each) == wanted)

    @property
    def newest(self) -> str:
        return f"{self._epoch}.{self._step}"

    async def _stop_until_out(self, victim: Process, name: str) -> None:
        victim.signal(signal.SIGSTOP)
        await victim.stopped()
        await self.trainer.until(lambda: self.trainer.fleet[name][0] == "out")

    def _remember(self) -> None:
        self._truth |= self.trainer.hashes("carrying")

    def _compare(self) -> None:
        """Every version that a survivor ever committed is the trainer's, bit by bit, in order."""
        self._remember()
        for survivor in self.survivors:
            self._compare_one(survivor)

    def _compare_one(self, replica: Process) -> None:
        self._remember()
        commits = replica.all("commit")
        assert commits == sorted(commits, key=lambda v: tuple(map(int, v.split(".")))), commits
        served = replica.hashes("commit")
        # A version whose trainer died before it could say its hashes is not compared.
        wrong = [v for v, hashes in served.items() if self._truth.get(v, hashes) != hashes]
        assert not wrong, f"{replica.name} serves other bytes than the trainer's: {wrong}"


async def run(
    directory: Path,
    carrier: str,
    points: Sequence[Point] = POINTS,
    signals: Sequence[signal.Signals] = (signal.SIGKILL, signal.SIGSTOP),
    slowly: float = 1.0,
    *,
    lends: bool = False,
) -> list[Outcome]:
    """Send every signal at every point; trainers' points come last, as each ends an epoch.

    With `lends` the engines of the first survivor and of all that are killed or stopped lend memory of a device.
    """
    campaign = Campaign(directory, carrier, slowly, lends=lends)
    try:
        await campaign.start()
        outcomes = []
        for point in points:
            for number in signals:
                outcomes.append(await campaign.run_case(point, number))
                print(outcomes[-1], file=sys.stderr, flush=True)
                if not outcomes[-1].ok:
                    return outcomes
        return outcomes
    finally:
        await campaign.mesh.end()


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row for each point."""
    lines = [
        "| process | point | SIGKILL: committed after | back after | SIGSTOP: committed after | back after |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str], list[str]] = {}
    for each in outcomes:
        times = [f"{each.survivors_s:.1f} s", f"{each.back_s:.1f} s"] if each.ok else ["FAILED", ""]
        rows.setdefault((each.role, each.point), []).extend(times)
    lines += [
        f"| {role} | {point} | {' | '.join(cells)} |" for (role, point), cells in rows.items()
    ]
    return "\n".join(lines)


def row(outcomes: Sequence[Outcome], carrier: str, *, lends: bool, when: str) -> str:
    """The carrier's row of the reference page: the longest times, in seconds."""
    name = f"`{carrier}`" + (" into lent memory" if lends else "")
    longest = [
        f"{max(each.survivors_s or 0.0 for each in chosen):.1f}, {max(each.back_s or 0.0 for each in chosen):.1f}"
        for chosen in (
            [each for each in outcomes if (each.role, each.signal) == (role, number)]
            for role in ("replica", "trainer")
            for number in ("SIGKILL", "SIGSTOP")
        )
    ]
    cases = len(outcomes)
    return f"| {name} | {cases} of {cases} | {' | '.join(longest)} | {when} |"


def renewed(page: str, line: str) -> str:
    """The page with `line` in place of the row of its carrier, or after the last row."""
    begin = line.split(" | ")[0] + " | "
    lines = page.splitlines()
    places = [number for number, each in enumerate(lines) if each.startswith(begin)]
    if places:
        lines[places[0]] = line
    else:
        last = max(number for number, each in enumerate(lines) if each.startswith("| `"))
        lines.insert(last + 1, line)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all; the last line is JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.weights_points", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--carrier", default="shm")
    parser.add_argument(
        "--lends", action="store_true", help="engines lend memory of a stub of a device"
    )
    parser.add_argument("--write", action="store_true", help=f"renew a row of {PAGE.name}")
    parser.add_argument(
        "--slowly", type=float, default=1.0, help="times the deadlines, where others compute"
    )
    parser.add_argument("--part", default="1/1", help="which of how many parts of the points, 2/3")
    parser.add_argument("--kept", type=Path, help="JSON with the outcomes of other parts")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    every = points_of(options.carrier)
    chosen = every[len(every) * (part - 1) // parts : len(every) * part // parts]
    with tempfile.TemporaryDirectory(prefix="meshrl-points-") as scratch:
        work = run(
            Path(scratch), options.carrier, chosen, slowly=options.slowly, lends=options.lends
        )
        outcomes = asyncio.run(work)
    ok = len(outcomes) == 2 * len(chosen) and all(each.ok for each in outcomes)
    if options.kept is not None:
        outcomes = _merged(options.kept, outcomes, every)
    print(table(outcomes))
    if ok and options.write and len(outcomes) == 2 * len(every):
        line = row(outcomes, options.carrier, lends=options.lends, when=today_and_commit())
        PAGE.write_text(renewed(PAGE.read_text(), line))
    summary = {
        "ok": ok,
        "points": len({(each.role, each.point) for each in outcomes}),
        "cases": len(outcomes),
        "carrier": options.carrier,
        "killed_replica_survivors_s_max": _worst(outcomes, "replica", "SIGKILL"),
        "stopped_replica_survivors_s_max": _worst(outcomes, "replica", "SIGSTOP"),
        "failed": [asdict(each) for each in outcomes if not each.ok],
    }
    print(json.dumps(summary))
    return 0 if ok else 1


def _merged(kept: Path, outcomes: Iterable[Outcome], points: Sequence[Point]) -> list[Outcome]:
    """Outcomes of other parts, from the file, merged with this part's, in the order of the points."""
    found = [Outcome(**each) for each in json.loads(kept.read_text())] if kept.exists() else []
    merged = {(each.role, each.point, each.signal): each for each in (*found, *outcomes)}
    places = [(point.role, point.name) for point in points]
    ordered = sorted(merged.values(), key=lambda each: places.index((each.role, each.point)))
    kept.write_text(json.dumps([asdict(each) for each in ordered]))
    return ordered


def _worst(outcomes: Iterable[Outcome], role: str, number: str) -> float:
    chosen = [o.survivors_s or 0.0 for o in outcomes if (o.role, o.signal) == (role, number)]
    return round(max(chosen, default=0.0), 2)


if __name__ == "__main__":
    sys.exit(main())
