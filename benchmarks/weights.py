"""Weights to three rollout processes on this machine: seconds, pauses, exactness, and what a dead or hung one costs.

    python benchmarks/weights.py [--mib 256] [--updates 12] [--carriers shm gloo delta disk] [--only exact speed …]

The coordinator is in this process; each receiver is a process of its own, with an engine that copies 256 MiB of
staged bf16 weights into its live ones at a commit, which is what it pauses for. From version to version 1 % of the
words move by one. Parts:

    exact   100 updates on each carrier; the hashes of each engine's live memory are the trainer's, every time
    speed   seconds until all hold a version (prepare), GB/s that each receives, the longest pause of an update, and
            beside them what a plain copy of as much memory takes one process at that time
    kill    a receiver gets SIGKILL when bucket i is about to be sent, for each i: seconds until the others serve it,
            and what the update before it took, with that receiver alive
    stop    one of three gets SIGSTOP in the middle of an update: the p99 of the others' pauses, and of their waits
            from publishing to serving, from then on, beside those of the same fleet before
    root    bytes that the trainer's process sends for one version to 1, 2, 4 and 8 receivers, in versions
    copies  how often a processor copies a version between the gathered bucket and what an engine is given, at the
            trainer and at each receiver; what NCCL, gloo and sockets do inside is left out. Over nccl also how
            often it goes from the host to the device of the trainer's rank, and from a receiver's device to its host
    staging by the embedded engine's kind of staging: copies from what it is given to what it multiplies, before the
            commit and at it, and the pause; for `in_place`, which is not built, the pause is what the same bytes take
            over gloo, since an engine whose served weights are being received into has to stand still
    hung    every receiver gets SIGSTOP in the middle of an update: seconds that the trainer waits, publish by
            publish, with a step between two versions, and at once after one another
    plan    seconds from the begin of a gather of half a second until its first bucket is taken, and until all hold
            the version: sent when it is whole, and each bucket as soon as it is there; update by update in turn

Pauses and waits are what the replicas report, by the clock that all processes share. The first two updates of each
fleet warm up (memory is allocated, channels are opened). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ of the checkout
sys.path.insert(0, str(Path(__file__).parent / "weights_bench"))

from copies import Copies
from source import Drifting

from fleet import Fleet, Update, opened
from meshrl.contract.types import Version
from meshrl.weights.shared_memory import SharedMemory
from tests.doubles import nccl
from tests.doubles.device import PATTERN

PARTS = ("exact", "speed", "kill", "stop", "root", "copies", "staging", "hung", "plan")
GATHER_S = 0.5
NAMES = ["one", "two", "three"]
WARM = 2
SMALL = 16 << 20
_STEP_S = 2.0
"""Seconds of a trainer's step: a model of 256 MiB takes longer, with a batch worth its name."""


class SignallingSource:
    """Strikes a member when a bucket is asked for the given time: see `_first_sent`."""

    def __init__(
        self, fleet: Fleet, name: str, number: signal.Signals, bucket: int, call: int
    ) -> None:
        self._strike = lambda: fleet.strike(name, number)
        self._bucket = bucket
        self._calls = call

    def __call__(self, bucket: int) -> None:
        self._calls -= bucket == self._bucket
        if bucket == self._bucket and self._calls == 0:
            self._strike()


class Bench:
    """The parts, and what they found."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.bytes = options.mib << 20
        self.results: dict[str, Any] = {"mib": options.mib, "receivers": len(NAMES)}

    def config(self, carrier: str, **more: object) -> dict[str, object]:
        return {"carrier": carrier, "dtype": "bfloat16", "bucket_bytes": self.bytes // 4, **more}

    def place(self, what: str) -> Path:
        return self.scratch / f"{what}-{time.monotonic_ns()}"

    async def exact(self) -> None:
        """Bit by bit after each of 100 updates."""
        self.results["exact"] = {}
        for carrier in self.options.carriers:
            weights = Drifting(SMALL, SMALL // 4)
            config = self.config(carrier)
            async with opened(config, self.place("exact"), NAMES, "--hashes") as fleet:
                right = 0
                for _ in range(100):
                    update = await fleet.update(weights)
                    right += fleet.exact(update.version)
            self.results["exact"][carrier] = right
            print(f"exact   {carrier:6} {right} of 100 updates equal in all engines", flush=True)

    async def speed(self) -> None:
        """Prepare and pause."""
        self.results["speed"] = {}
        for carrier in self.options.carriers:
            weights = Drifting(self.bytes, self.bytes // 4)
            async with opened(self.config(carrier), self.place("speed"), NAMES) as fleet:
                updates, copies = [], []
                for _ in range(WARM + self.options.updates):
                    updates.append(await fleet.update(weights))
                    copies.append(plain_copy_s(self.bytes))
                updates = updates[WARM:]
            prepare = statistics.median(update.prepare_s for update in updates)
            figures = {
                "prepare_s": round(prepare, 3),
                "gb_per_s_each": round(self.bytes / prepare / 1e9, 2),
                "pause_ms": _ms(statistics.median(update.pause_s for update in updates)),
                "pause_ms_max": _ms(max(update.pause_s for update in updates)),
                "sync_s": round(statistics.median(update.sync_s for update in updates), 3),
                "plain_copy_ms": _ms(statistics.median(copies)),
            }
            self.results["speed"][carrier] = figures
            print(f"speed   {carrier:6} {figures}", flush=True)

    async def kill(self) -> None:
        """SIGKILL at every bucket."""
        self.results["kill_s"] = {}
        for carrier in self.options.carriers[:2]:
            seconds, healthy = [], []
            weights = Drifting(self.bytes, self.bytes // 4)
            async with opened(self.config(carrier), self.place("kill"), NAMES[:2]) as fleet:
                for _ in range(WARM):
                    await fleet.update(weights)
                for index in range(4):
                    victim = f"victim-{index}"
                    await fleet.join(victim)
                    healthy.append(round((await fleet.update(weights)).sync_s, 2))
                    on_bucket = SignallingSource(
                        fleet, victim, signal.SIGKILL, index, _first_sent(carrier)
                    )
                    update = await fleet.update(weights, NAMES[:2], on_bucket)
                    seconds.append(round(update.sync_s, 2))
                    await fleet.members[victim].child.wait()
                    await fleet.until(lambda victim=victim: fleet.state(victim) == "out")
                    del fleet.members[victim]
            self.results["kill_s"][carrier] = {"survivors": seconds, "nobody_killed": healthy}
            print(
                f"kill    {carrier:6} survivors after {seconds} s, all before {healthy} s",
                flush=True,
            )

    async def stop(self) -> None:
        """SIGSTOP of one of three."""
        carrier = self.options.carriers[0]
        config = self.config(carrier, late_quorum=0.5, base_s=3.0)
        weights = Drifting(self.bytes, self.bytes // 4)
        others = NAMES[:2]
        count = max(20, self.options.updates)
        async with opened(config, self.place("stop"), NAMES) as fleet:
            healthy = [await fleet.update(weights, others) for _ in range(WARM + count)][WARM:]
            on_bucket = SignallingSource(fleet, NAMES[2], signal.SIGSTOP, 2, _first_sent(carrier))
            hung = [await fleet.update(weights, others, on_bucket)]
            hung += [await fleet.update(weights, others) for _ in range(count - 1)]
            fleet.strike(NAMES[2], signal.SIGCONT)
            await fleet.join()
            await fleet.until(lambda: fleet.state(NAMES[2]) == "serving")
        figures: dict[str, Any] = {"carrier": carrier, "updates": count}
        for what in ("pause_s", "sync_s"):
            before, after = _p99(healthy, what), _p99(hung, what)
            figures |= {
                f"{what}_p99_healthy": round(before, 3),
                f"{what}_p99_one_stopped": round(after, 3),
                f"{what}_ratio": round(after / before, 2),
            }
        figures["sync_s_median_healthy"] = round(
            statistics.median(update.sync_s for update in healthy), 3
        )
        figures["sync_s_of_the_update_that_met_the_stop"] = round(hung[0].sync_s, 3)
        self.results["stop"] = figures
        print(f"stop    {figures}", flush=True)

    async def root(self) -> None:
        """Count the bytes that leave the trainer: each bucket that is read for sending."""
        self.results["root"] = {}
        for carrier in [each for each in self.options.carriers if each in ("gloo", "nccl")]:
            config = self.config(carrier, nccl=nccl.settings(), bucket_bytes=SMALL // 4)
            versions, seconds = {}, {}
            for count in self.options.replicas:
                names = [f"receiver-{index}" for index in range(count)]
                weights = Drifting(SMALL, SMALL // 4)
                read: list[int] = []
                async with opened(config, self.place("root"), names) as fleet:
                    for _ in range(WARM):
                        await fleet.update(weights)
                    updates = [
                        await fleet.update(weights, on_bucket=read.append)
                        for _ in range(self.options.updates)
                    ]
                versions[count] = round(len(read) / 4 / self.options.updates, 3)
                prepare = statistics.median(update.prepare_s for update in updates)
                seconds[count] = round(prepare, 3)
            self.results["root"][carrier] = {"versions_sent": versions, "prepare_s": seconds}
            print(f"root    {carrier:6} {self.results['root'][carrier]}", flush=True)

    async def copies(self) -> None:
        """In host memory, and between it and a device, in versions per version."""
        self.results["copies"] = {}
        here = Copies()
        here.install()
        for carrier, *flags in (("shm",), ("gloo",), ("nccl",), ("nccl", "--lends")):
            place = self.place("copies")
            crossings = place.with_suffix(".crossings")
            stub = nccl.settings(crossings=str(crossings))
            config = self.config(carrier, nccl=stub, bucket_bytes=SMALL // 4)
            weights = Drifting(SMALL, SMALL // 4)
            async with opened(config, place, NAMES, *flags) as fleet:
                for _ in range(WARM):
                    await fleet.update(weights)
                here.take()
                crossings.write_text("")
                update = await fleet.update(weights)
                receivers = [member.copied[update.version] for member in fleet.members.values()]
                figures = {
                    "trainer": round(here.take() / SMALL, 3),
                    "each_receiver": round(max(receivers) / SMALL, 3),
                }
                if carrier == "nccl":
                    figures["to_the_trainers_device"] = _crossed(crossings, "load")
                    figures["from_each_receivers_device"] = _crossed(crossings, "store") / len(
                        NAMES
                    )
            SharedMemory().sweep(PATTERN)  # of replicas that were ended
            kind = f"{carrier}, lent" if flags else carrier
            self.results["copies"][kind] = figures
            print(f"copies  {kind:10} {figures}", flush=True)

    async def staging(self) -> None:
        """At the engine."""
        import staging  # with torch

        found: dict[str, Any] = await asyncio.to_thread(
            staging.figures, self.bytes, self.options.updates
        )
        weights = Drifting(self.bytes, self.bytes // 8)
        config = self.config("gloo", bucket_bytes=self.bytes // 8)
        async with opened(config, self.place("staging"), NAMES) as fleet:
            for _ in range(WARM):
                await fleet.update(weights)
            updates = [await fleet.update(weights) for _ in range(self.options.updates)]
        pause_s = statistics.median(update.prepare_s for update in updates)
        found["in_place"] = {
            "not_built": True,
            "versions_on_the_device": 1,
            "pause_ms": _ms(pause_s),
        }
        self.results["staging"] = found
        for kind, figures in found.items():
            print(f"staging {kind:8} {figures}", flush=True)

    async def hung(self) -> None:
        """The whole fleet hangs."""
        carrier = self.options.carriers[0]
        config = self.config(carrier, base_s=3.0)
        weights = Drifting(self.bytes, self.bytes // 4)
        waits: dict[float, list[float]] = {_STEP_S: [], 0.0: []}
        for step_s, found in waits.items():
            found += await self._publish_to_stopped(config, weights, step_s)
        self.results["hung"] = {
            "carrier": carrier,
            "base_s": 3.0,
            "publish_waits_s_by_step_s": waits,
        }
        print(f"hung    {self.results['hung']}", flush=True)

    async def _publish_to_stopped(
        self, config: dict[str, object], weights: Drifting, step_s: float
    ) -> list[float]:
        """Seconds of each publish, the first of a fleet that stops in it."""
        waits = []
        async with opened(config, self.place("hung"), NAMES) as fleet:
            for _ in range(WARM):
                await fleet.update(weights)

            running = [*NAMES]

            def stop(bucket: int) -> None:
                while bucket == 1 and running:  # once: the version is sent again afterwards
                    fleet.strike(running.pop(), signal.SIGSTOP)

            for step in range(4):
                source = weights.version(Version(1, 100 + step), stop if step == 0 else None)
                began = time.monotonic()
                await fleet.coordinator.publish(source)
                waits.append(round(time.monotonic() - began, 3))
                await asyncio.sleep(step_s)
            for name in NAMES:
                fleet.strike(name, signal.SIGCONT)
            await fleet.until(lambda: all(fleet.state(name) == "serving" for name in NAMES))
        return waits

    async def plan(self) -> None:
        """The gather before the transfer, and beside it."""
        self.results["plan"] = {"gather_s": GATHER_S}
        for carrier in self.options.carriers:
            config = self.config(carrier, nccl=nccl.settings(), bucket_bytes=self.bytes // 8)
            weights = Drifting(self.bytes, self.bytes // 8)
            seconds: dict[str, list[float]] = {"before": [], "beside": []}
            taken: dict[str, list[float]] = {"before": [], "beside": []}
            async with opened(config, self.place("plan"), NAMES) as fleet:
                for _ in range(WARM):
                    await fleet.update(weights)
                for _ in range(self.options.updates):
                    for what, gather_s in (
                        ("before", (GATHER_S, 0.0)),
                        ("beside", (0.0, GATHER_S)),
                    ):
                        read: list[float] = []
                        update = await fleet.update(
                            weights,
                            on_bucket=lambda _, read=read: read.append(time.monotonic()),
                            gather_s=gather_s,
                        )
                        seconds[what].append(update.prepare_s)
                        taken[what].append(read[0] - update.began)
            medians = {what: statistics.median(each) for what, each in seconds.items()}
            first = {what: round(statistics.median(each), 3) for what, each in taken.items()}
            figures = {
                "first_bucket_s": first,
                "before_s": round(medians["before"], 3),
                "beside_s": round(medians["beside"], 3),
                "beyond_the_gather": round(
                    (medians["beside"] - GATHER_S) / (medians["before"] - GATHER_S), 2
                ),
            }
            self.results["plan"][carrier] = figures
            print(f"plan    {carrier:6} {figures}", flush=True)


def plain_copy_s(nbytes: int) -> float:
    """Seconds that one process takes to copy as much, here and now: the yardstick of a busy machine."""
    there, here = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    here[:] = 1  # no page is new
    began = time.monotonic()
    np.copyto(here, there)
    return time.monotonic() - began


def _first_sent(carrier: str) -> int:
    """The how many-th time that a bucket is asked for sends it: staging asks once before, where it writes."""
    return 2 if carrier == "disk" else 1


def _crossed(file: Path, how: str) -> float:
    """Versions that the stub's device loaded or stored."""
    lines = (line.split() for line in file.read_text().splitlines())
    return round(sum(int(nbytes) for _, kind, nbytes in lines if kind == how) / SMALL, 3)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def _p99(updates: list[Update], what: str) -> float:
    values = sorted(getattr(update, what) for update in updates)
    return values[min(len(values) - 1, int(0.99 * len(values)))]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshrl-weights-") as scratch:
        bench = Bench(options, Path(scratch))
        for part in options.only:
            await getattr(bench, part)()
        return bench.results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--carriers", nargs="+", default=["shm", "gloo", "delta", "disk"])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    logging.getLogger("meshrl").setLevel(logging.ERROR)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
