"""The faults of one run: a list that the seed draws, so that a failing run can be shrunk by leaving some out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """The kind of a fault."""

    KILL = "kill"
    """kill -9: nothing more runs, connections are closed by the host."""
    STOP = "stop"
    """SIGTERM: it drains and ends."""
    CUT = "cut"
    """Its network is silent for a while."""
    ZOMBIE = "zombie"
    """Its network is silent, it counts as dead and gets a successor, and then it comes back."""
    ISOLATED = "isolated"
    """The trainer no longer reaches the queue, counts as dead and gets a successor; replicas still reach it."""
    FLAPS = "flaps"
    """Its open connections break, again and again."""
    BREAK_REQUESTS = "break requests"
    """Its calls break before they arrive."""
    BREAK_ANSWERS = "break answers"
    """Its calls break after they were worked on."""
    LATE_REQUESTS = "late requests"
    """Its calls break, and arrive seconds later."""
    SLOW = "slow"
    """Every message takes fifty times as long."""
    DISK_FULL = "disk full"
    """The queue's disk."""
    COMMITS_FAIL = "commits fail"
    """Commits of the queue; some are durable nevertheless."""
    ENGINE_FAILS = "engine fails"
    """Every request to a rollout worker."""
    JUDGE_FAILS = "judge fails"
    """Every sample of a reward stage."""
    LOADING_FAILS = "loading fails"
    """A rollout worker's engine takes no weights, for the same reason each time."""
    SWITCH_FAILS = "switch fails"
    """A rollout worker's engine breaks when it switches to other weights."""
    TRANSFER_HANGS = "transfer hangs"
    """To a rollout worker: no bytes of weights arrive."""
    TRANSFER_CORRUPTS = "transfer corrupts"
    """To a rollout worker: bytes of weights arrive changed."""
    MEMORY_FULL = "memory full"
    """The trainer's host has no room for a version."""
    HALT = "halt"
    """SIGTERM to trainer and queue at once, and neither starts again for a while: their host goes down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    """Virtual seconds from the start."""
    kind: Kind
    target: str
    """A service: `queue`, `feeder`, `trainer`, `trainer-1` (a rank), `rollout-0`, `reward-0`,
    `agent-0`."""
    seconds: float = 0.0
    """How long, where it has a length."""

    def __str__(self) -> str:
        length = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at_s:7.2f} s  {self.kind} {self.target}{length}"


NETWORK: Final = (
    Kind.CUT,
    Kind.FLAPS,
    Kind.BREAK_REQUESTS,
    Kind.BREAK_ANSWERS,
    Kind.LATE_REQUESTS,
    Kind.SLOW,
)
WEIGHTS: Final = (
    Kind.LOADING_FAILS,
    Kind.SWITCH_FAILS,
    Kind.TRANSFER_HANGS,
    Kind.TRANSFER_CORRUPTS,
)
LENGTHS_S: Final = {
    Kind.HALT: 15.0,
    Kind.CUT: 12.0,
    Kind.ZOMBIE: 15.0,
    Kind.ISOLATED: 20.0,
    Kind.BREAK_REQUESTS: 3.0,
    Kind.BREAK_ANSWERS: 3.0,
    Kind.LATE_REQUESTS: 3.0,
    Kind.SLOW: 10.0,
    Kind.FLAPS: 8.0,
    Kind.DISK_FULL: 4.0,
    Kind.COMMITS_FAIL: 0.02,
    Kind.ENGINE_FAILS: 3.0,
    Kind.JUDGE_FAILS: 3.0,
    Kind.LOADING_FAILS: 8.0,
    Kind.SWITCH_FAILS: 4.0,
    Kind.TRANSFER_HANGS: 15.0,
    Kind.TRANSFER_CORRUPTS: 8.0,
    Kind.MEMORY_FULL: 4.0,
}
"""Mean seconds; the others have no length."""


ALLOWED: Final = (0.25, 0.6, 0.6)
"""Share of the kinds that happen in a seed: where they are few, the same ones meet again and again."""
AIMED: Final = 0.3
"""Share of seeds whose faults all happen to the services of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Theme of some seeds: few kinds of faults, shortly after each other."""

    share: float
    """Share of all seeds."""
    kinds: Mapping[str, Sequence[Kind]]
    """Kinds of faults by service; a kind that is named twice happens twice as often."""
    successor_dies: bool = False
    """A trainer that counts as dead, or ends with its host, gets a successor that is killed as well."""


TAKEOVER: Final = Scene(
    share=0.15,
    kinds={
        "trainer": (Kind.KILL, Kind.KILL, Kind.ZOMBIE, Kind.ISOLATED, Kind.ISOLATED),
        "rollout-0": (Kind.KILL, Kind.FLAPS, Kind.FLAPS, Kind.TRANSFER_CORRUPTS),
        "rollout-1": (Kind.CUT, Kind.FLAPS, Kind.TRANSFER_HANGS, Kind.TRANSFER_CORRUPTS),
    },
)
"""Trainers are replaced, versions follow each other fast, and replicas join and leave meanwhile."""
LATE_CHECKPOINT: Final = Scene(
    share=0.075,
    kinds={**TAKEOVER.kinds, "trainer": (Kind.KILL, Kind.ZOMBIE, Kind.ZOMBIE, Kind.ISOLATED)},
    successor_dies=True,
)
"""The same while checkpoints take long: a replaced trainer still writes one; its successor dies before its first."""
LOST_CALLS: Final = Scene(
    share=0.1,
    kinds={
        "trainer": (Kind.BREAK_REQUESTS, Kind.BREAK_ANSWERS, Kind.LATE_REQUESTS, Kind.KILL),
        "feeder": (Kind.BREAK_ANSWERS, Kind.LATE_REQUESTS),
        "rollout-0": (Kind.BREAK_ANSWERS, Kind.LATE_REQUESTS),
    },
)
"""Calls are repeated."""
HALTED_HOST: Final = Scene(
    share=0.05,
    kinds={
        "trainer": (Kind.HALT, Kind.HALT, Kind.HALT, Kind.KILL, Kind.ISOLATED, Kind.BREAK_ANSWERS),
        "rollout-0": (Kind.KILL, Kind.FLAPS),
    },
    successor_dies=True,
)
"""Trainers save without the queue, and the next ones tell it what they find."""
SOON: Final = 0.5
"""Share of a scene's faults that come shortly after another one,"""
SOON_S: Final = (0.2, 4.0)
"""after so many seconds."""
SUCCESSOR_DIES_S: Final = (1.0, 6.0)
"""When a successor is killed, after it may begin: a new one starts within 5 s."""


def scene_of(seed: int) -> Scene | None:
    """The scene of a seed, if it has one."""
    draw = random.Random(f"scene {seed}").random()
    for scene in (TAKEOVER, LOST_CALLS, LATE_CHECKPOINT, HALTED_HOST):
        if draw < scene.share:
            return scene
        draw -= scene.share
    return None


def kinds_of(target: str) -> Sequence[Kind]:
    """Kinds of faults of a service."""
    role = target.partition("-")[0]
    if role == "queue":
        disk = (Kind.DISK_FULL, Kind.COMMITS_FAIL)
        return (Kind.KILL, Kind.STOP, *disk, Kind.CUT, Kind.FLAPS, Kind.SLOW)
    own = {
        "rollout": (Kind.KILL, Kind.STOP, Kind.ENGINE_FAILS, *WEIGHTS),
        "reward": (Kind.KILL, Kind.STOP, Kind.JUDGE_FAILS),
        "reference": (Kind.KILL, Kind.STOP),
        "trainer": (Kind.KILL, Kind.KILL, Kind.STOP, Kind.ZOMBIE, Kind.ISOLATED, Kind.MEMORY_FULL),
        "feeder": (Kind.KILL, Kind.STOP),
        "agent": (Kind.KILL, Kind.KILL, Kind.STOP),
    }
    return own[role] + NETWORK


def draw_faults(seed: int, targets: Sequence[str], *, until_s: float, most: int) -> list[Fault]:
    """At most `most` faults of `targets`, in order.

    Each seed has a swarm of its own: only some kinds happen, and in some seeds only to the services of one kind.
    """
    draw = random.Random(f"faults {seed}")
    if (scene := scene_of(seed)) is not None:
        return _draw_scene(draw, scene, until_s=until_s, most=most)
    aim = random.Random(f"aim {seed}")
    if aim.random() < AIMED:
        role = aim.choice(sorted({target.partition("-")[0] for target in targets}))
        targets = [target for target in targets if target.partition("-")[0] == role]
    share = draw.choice(ALLOWED)
    allowed = {kind for kind in Kind if kind is not Kind.HALT and draw.random() < share}
    faults = []
    for _ in range(draw.randint(0, most)):
        target = draw.choice(targets)
        kinds = [kind for kind in kinds_of(target) if kind in allowed]
        if kinds:
            faults.append(_drawn(draw, draw.choice(kinds), target, draw.uniform(0.0, until_s)))
    return sorted(faults, key=lambda fault: fault.at_s)


def _draw_scene(draw: random.Random, scene: Scene, *, until_s: float, most: int) -> list[Fault]:
    faults: list[Fault] = []
    for _ in range(draw.randint(most // 2, most)):
        target = draw.choice(list(scene.kinds))
        at_s = draw.uniform(0.0, until_s)
        if faults and draw.random() < SOON:
            at_s = faults[-1].at_s + draw.uniform(*SOON_S)
        fault = _drawn(draw, draw.choice(scene.kinds[target]), target, at_s)
        faults.append(fault)
        if scene.successor_dies and fault.kind in (Kind.ZOMBIE, Kind.HALT):
            begins_s = at_s + fault.seconds * (fault.kind is Kind.HALT)
            killed_s = begins_s + draw.uniform(*SUCCESSOR_DIES_S)
            faults.append(Fault(at_s=killed_s, kind=Kind.KILL, target=target))
    return sorted(faults, key=lambda fault: fault.at_s)


def _drawn(draw: random.Random, kind: Kind, target: str, at_s: float) -> Fault:
    mean_s = LENGTHS_S.get(kind, 0.0)
    seconds = draw.expovariate(1 / mean_s) if mean_s else 0.0
    return Fault(at_s=at_s, kind=kind, target=target, seconds=seconds)
