"""What the trainer does right now: written by its loop, read by whoever asks or watches."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from meshrl.contract.types import Json, TrainerPhase, TrainerStatus, Version, Waiting

RECENT_STEPS = 10
"""Throughput and the time left are means over so many steps."""


class Board:
    """The loop's notice board. Belongs to one event loop."""

    def __init__(self, total_steps: int | None) -> None:
        self.version = Version(0, 0)
        self._total_steps = total_steps
        self._phase = TrainerPhase.STARTING
        self._spent: dict[str, float] = {}
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        self._step_began = time.monotonic()
        self._samples = 0
        self._staleness: Counter[int] = Counter()
        self._metrics: dict[str, float] = {}
        self._held_out: float | None = None
        self._waiting_for = ""
        self._changed = asyncio.Event()

    @contextmanager
    def phase(self, phase: TrainerPhase, name: str = "") -> Iterator[None]:
        """Say what goes on, and add its time to the step's under `time/<name>_s`."""
        self._set(phase)
        begin = time.monotonic()
        try:
            yield
        finally:
            key = f"time/{name or phase}_s"
            self._spent[key] = self._spent.get(key, 0.0) + time.monotonic() - begin
            self._waiting_for = ""

    def resumed(self, version: Version, samples: int) -> None:
        """Where the run stands at its start."""
        self.version, self._samples = version, samples
        self._step_began = time.monotonic()
        self._announce()

    def blocked(self, waiting: Sequence[Waiting]) -> None:
        """What the queue says of a wait in vain, the longest first."""
        self._waiting_for = "; ".join(
            f"{one.who}: {one.what}, {one.since_s:.0f} s ({', '.join(one.owners) or 'nobody'})"
            for one in waiting[:3]
        )
        self._announce()

    def stepped(
        self, numbers: Mapping[str, Json], staleness: Mapping[int, int], tokens: int
    ) -> dict[str, Json]:
        """A step is done; returns its metrics with the times since the last one."""
        seconds = time.monotonic() - self._step_began
        self._step_began += seconds
        self._recent.append((seconds, tokens))
        self._staleness.update(staleness)
        self._samples += sum(staleness.values())
        spent, self._spent = self._spent, {}
        whole = {
            **numbers,
            **spent,
            "time/step_s": seconds,
            "time/unix_s": time.time(),
            "throughput/tokens_per_s": tokens / seconds,
            "policy_version": str(self.version),
        }
        self._metrics = {
            k: float(v) for k, v in whole.items() if isinstance(v, int | float) and math.isfinite(v)
        }
        self._announce()
        return whole

    def evaluated(self, score: float) -> None:
        """A held-out score is there."""
        self._held_out = score if math.isfinite(score) else None
        self._announce()

    def ended(self, failed: bool) -> None:
        """Nothing will change any more."""
        self._set(TrainerPhase.FAILED if failed else TrainerPhase.DONE)

    def status(self) -> TrainerStatus:
        """The notice as it stands."""
        seconds = sum(s for s, _ in self._recent)
        left = (self._total_steps or 0) - self.version.step
        return TrainerStatus(
            step=self.version.step,
            total_steps=self._total_steps or 0,
            version=self.version,
            phase=self._phase,
            reward_mean=self._metrics.get("reward/mean"),
            held_out_score=self._held_out,
            tokens_per_s=sum(tokens for _, tokens in self._recent) / seconds if seconds else 0.0,
            samples=self._samples,
            staleness=dict(self._staleness),
            metrics=dict(self._metrics),
            eta_s=left * seconds / len(self._recent) if left > 0 and self._recent else None,
            waiting_for=self._waiting_for,
        )

    async def watch(self, every_s: float) -> AsyncIterator[TrainerStatus]:
        """The notice at once, after every change and at least every `every_s` seconds, until the end."""
        while True:
            changed = self._changed
            status = self.status()
            yield status
            if status.phase.ended:
                return
            try:
                async with asyncio.timeout(every_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def _set(self, phase: TrainerPhase) -> None:
        self._phase = phase
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
