"""Start everybody, strike at random moments, wait for the end, check the history."""

from __future__ import annotations

import heapq
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from meshrl.launcher.address_book import free_port

from .events import lines
from .faults import Cut, Fault, Fill, Kill, Network, Pause, SmallDisk, Victim, refusals
from .history import History
from .plan import ACTORS, PROXY, QUEUE, Plan
from .processes import Actor
from .redis import Redis

END_S: Final = 180.0
"""Longest time after the last fault until MORE_STEPS are made, and until each process ends."""
MORE_STEPS: Final = 10
"""Steps that the run must make by itself after the last fault."""

GAVE_UP: Final = 1
"""The exit code of a service that lacked something which may come back."""
EVERYBODY: Final = 0.1
"""The part of the kills that is a power cut for all processes."""


class CampaignError(Exception):
    """The campaign itself went wrong: somebody crashed or never came to an end."""


class Campaign:
    """One run under fire."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.struck: Counter[str] = Counter()
        self._dice = random.Random(plan.seed)
        self._healing: list[tuple[float, int, Fault]] = []
        self._network: Network | None = None
        self._disk: SmallDisk | None = None
        self._redis: Redis | None = None
        self._actors: list[Actor] = []

    def run(self) -> dict[str, Any]:
        """The report. Raises CampaignError, PermissionError."""
        began = time.monotonic()
        with ExitStack() as undo:
            self._prepare(undo)
            for actor in self._actors:
                actor.start()
            for fault in self._faults():
                self._live_until(time.monotonic() + self._dice.uniform(0, 2 * self.plan.pace_s))
                self._strike(fault)
            while self._healing:
                self._live_until(self._healing[0][0])
            self._go_on()
            self.plan.enough.touch()
            self._finish()
            self._look()
        return self._report(time.monotonic() - began)

    def _prepare(self, undo: ExitStack) -> None:
        plan = self.plan
        plan.folder.mkdir(parents=True, exist_ok=True)
        plan.events.mkdir()
        if plan.cuts:
            self._network = Network(f"mesh{os.getpid()}")
            self._network.open()
            undo.callback(self._network.close)
            plan = replace(plan, host=Network.THERE)
        if plan.fills:
            self._disk = SmallDisk(plan.store)
            self._disk.open()
            undo.callback(self._disk.close)
        if plan.queue.get("store") == "redis" and "redis_url" not in plan.queue:
            self._redis = Redis(Path(undo.enter_context(TemporaryDirectory(prefix="redis-"))))
            self._redis.start()
            undo.callback(self._redis.kill)
            plan = replace(plan, queue={**plan.queue, "redis_url": self._redis.url})
        port = free_port("127.0.0.1", [])
        proxy_port = free_port("127.0.0.1", [port]) if plan.lost_answers else 0
        self.plan = replace(plan, port=port, proxy_port=proxy_port)
        here = self._network and self._network.here
        there = self._network and self._network.there
        actors = [Actor(name, self.plan, here) for name in ACTORS]
        self._actors = [Actor(QUEUE, self.plan, there), *actors]
        for actor in self._actors:
            undo.callback(actor.kill)
        if plan.lost_answers:
            proxy = Actor(PROXY, self.plan)
            undo.callback(proxy.kill)
            proxy.start()

    def _faults(self) -> list[str]:
        plan = self.plan
        kinds = ["kill"] * plan.kills + ["pause"] * plan.pauses
        kinds += ["cut"] * plan.cuts + ["fill"] * plan.fills
        self._dice.shuffle(kinds)
        return kinds

    def _strike(self, kind: str) -> None:
        fault = self._made(kind)
        seconds = fault.strike()
        self.struck[fault.name] += 1
        heapq.heappush(self._healing, (time.monotonic() + seconds, len(self.struck), fault))
        if kind in ("cut", "fill"):
            # One at a time; others strike while it lasts.
            while any(each is fault for _, _, each in self._healing):
                self._live_until(self._healing[0][0])

    def _made(self, kind: str) -> Fault:
        if kind == "cut":
            assert self._network
            return Cut(self._network, self.plan.cut_s)
        if kind == "fill":
            assert self._disk
            return Fill(self._disk, self.plan)
        while not (living := [each for each in self._victims() if each.alive]):
            self._live_until(self._healing[0][0])
        victim = self._dice.choice(living)
        if kind == "pause":
            return Pause(victim, self._dice, self.plan.lease_ttl_s)
        return Kill(living if self._dice.random() < EVERYBODY else [victim], self._dice)

    def _victims(self) -> list[Victim]:
        return [*self._actors, self._redis] if self._redis else [*self._actors]

    def _live_until(self, moment: float) -> None:
        """Heal what is due, and notice who ended without being asked to."""
        while (now := time.monotonic()) < moment or self._due(now):
            while self._due(now):
                heapq.heappop(self._healing)[-1].heal()
            self._complain()
            time.sleep(max(0.0, min(0.02, moment - now)))

    def _due(self, now: float) -> bool:
        return bool(self._healing) and self._healing[0][0] <= now

    def _complain(self) -> None:
        for actor in self._actors:
            if not actor.alive and actor.code is not None:
                if self._redis and actor.name == QUEUE and actor.code == GAVE_UP:
                    # Redis was away for longer than a queue that opens waits; its supervisor tries again.
                    actor.start()
                    self.struck[f"{actor.name} gave up"] += 1
                    continue
                said = actor.errors.read_text()[-4000:] if actor.errors.exists() else ""
                raise CampaignError(f"{actor.name} ended with code {actor.code}: {said}")

    def _go_on(self) -> None:
        """No more faults: the run makes progress by itself."""
        deadline = time.monotonic() + END_S
        wanted = self._steps() + MORE_STEPS
        while self._steps() < wanted:
            if time.monotonic() > deadline:
                raise CampaignError(f"no progress within {END_S:.0f} s after the last strike")
            self._live_until(time.monotonic() + 0.1)

    def _steps(self) -> int:
        """Steps of the model; fewer than before if the consumer resumes at its checkpoint."""
        return sum(1 for _ in lines(self.plan.lineage))

    def _finish(self) -> None:
        """Every process reaches the end of the data, then the queue is stopped."""
        queue, *others = self._actors
        for actor in others:
            if not actor.wait(END_S):
                raise CampaignError(f"{actor.name} has not come to its end within {END_S:.0f} s")
            if actor.code:
                self._complain()
        queue.stop()
        if not queue.wait(END_S) or queue.code:
            raise CampaignError(f"the queue did not drain: code {queue.code}")

    def _look(self) -> None:
        actor = Actor("look", self.plan)
        actor.start()
        if not actor.wait(END_S) or actor.code:
            raise CampaignError(f"the store cannot be opened: {actor.errors.read_text()[-4000:]}")

    def _report(self, seconds: float) -> dict[str, Any]:
        verdict = History(self.plan).check()
        violations = {rule: found for rule, found in verdict.violations.items() if found}
        ledger = violations.pop("ledger", [])
        return {
            "seed": self.plan.seed,
            "struck": dict(sorted(self.struck.items())),
            "kills": sum(n for name, n in self.struck.items() if name.startswith("kill ")),
            "rows": verdict.admitted,
            "trained": verdict.trained,
            "lost": verdict.lost,
            "duplicated": verdict.duplicated,
            "ledger": "exact" if not ledger else ledger[:5],
            "history": "legal" if not violations else {k: v[:5] for k, v in violations.items()},
            "lost_answers": self.plan.lost.stat().st_size if self.plan.lost.exists() else 0,
            "outages": self._outages(),
            "refusals": refusals(self.plan),
            "seconds": round(seconds, 1),
            "ok": verdict.legal and not verdict.lost and not verdict.duplicated,
        }

    def _outages(self) -> int:
        """How often a client found no server and continued by itself."""
        logs = [actor.errors for actor in self._actors if actor.errors.exists()]
        return sum(log.read_text().count("; trying again for") for log in logs)
