"""The trainer's present state: written by its loop, read by clients and watchers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from meshrl.common import tracing
from meshrl.contract.types import Json, TrainerPhase, TrainerStatus, Version, Waiting

log = logging.getLogger(__name__)

RECENT_STEPS = 10
"""Throughput and the time left are means over this many steps."""


class LiveStatus:
    """Step, phase, metrics and waits of a running loop. Belongs to one event loop."""

    def __init__(
        self,
        total_steps: int | None,
        *,
        run: str = "",
        ranks: int = 1,
        peak_tflops: float | None = None,
    ) -> None:
        """`run` names the traces of its steps; `peak_tflops`: what one rank's device could do, if that is known."""
        self._run = run
        self._ranks = ranks
        self._peak_tflops = peak_tflops
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
        """Set the phase, and add the time spent in it to the step's `time/<name>_s`."""
        self._set(phase)
        begin, began_ns = time.monotonic(), time.time_ns()
        try:
            yield
        finally:
            key = f"time/{name or phase}_s"
            self._spent[key] = self._spent.get(key, 0.0) + time.monotonic() - begin
            if tracing.is_on():
                # A version is published in the step that made it; the first one has none.
                step = self.version.step + (phase is not TrainerPhase.PUBLISHING)
                tracing.record_step(
                    name or phase.value, self._run, self.version.epoch, step, began_ns
                )
            self._waiting_for = ""

    def resumed(self, version: Version, samples: int) -> None:
        """Set the progress of the run at its start."""
        self.version, self._samples = version, samples
        self._step_began = time.monotonic()
        self._announce()

    def blocked(self, waiting: Sequence[Waiting]) -> None:
        """Record what the queue named as blocking, the longest wait first."""
        self._waiting_for = "; ".join(
            f"{wait.who}: {wait.what}, {wait.since_s:.0f} s ({', '.join(wait.owners) or 'nobody'})"
            for wait in waiting[:3]
        )
        self._announce()

    def stepped(
        self, numbers: Mapping[str, Json], staleness: Mapping[int, int], tokens: int
    ) -> dict[str, Json]:
        """Record a step; returns its metrics with the times since the step before."""
        seconds = time.monotonic() - self._step_began
        self._step_began += seconds
        if tracing.is_on():
            began_ns = time.time_ns() - int(seconds * 1e9)
            made = self.version
            tracing.record_step("step", self._run, made.epoch, made.step, began_ns, root=True)
        self._recent.append((seconds, tokens))
        self._staleness.update(staleness)
        self._samples += sum(staleness.values())
        spent, self._spent = self._spent, {}
        metrics: dict[str, Json] = {
            **numbers,
            **spent,
            "time/step_s": seconds,
            "time/unix_s": time.time(),
            "throughput/tokens_per_s": tokens / seconds,
            **_shares(spent, seconds),
            **self._throughput(numbers, tokens, seconds, spent.get("time/training_s", 0.0)),
            "policy_version": str(self.version),
        }
        self._metrics = {
            k: float(v)
            for k, v in metrics.items()
            if isinstance(v, int | float) and math.isfinite(v)
        }
        infinite = (v for v in metrics.values() if isinstance(v, float) and not math.isfinite(v))
        self._metrics["not_finite"] = sum(1.0 for _ in infinite)
        self._announce()
        return metrics

    def _throughput(
        self, numbers: Mapping[str, Json], tokens: int, seconds: float, training_s: float
    ) -> dict[str, float]:
        """Throughput of one device."""
        found = {"throughput/tokens_per_s_per_gpu": tokens / seconds / self._ranks}
        tflops = numbers.get("batch/tflops")
        if isinstance(tflops, float) and tflops and training_s:
            rate = tflops / training_s / self._ranks
            found["throughput/tflops_per_s_per_gpu"] = rate
            if self._peak_tflops:
                found["throughput/mfu"] = rate / self._peak_tflops
        return found

    def evaluated(self, score: float) -> None:
        """Record a held-out score."""
        self._held_out = score if math.isfinite(score) else None
        self._announce()

    def ended(self, failed: bool) -> None:
        """Record the end; nothing changes afterwards."""
        self._set(TrainerPhase.FAILED if failed else TrainerPhase.DONE)

    def status(self) -> TrainerStatus:
        """A snapshot."""
        seconds = sum(s for s, _ in self._recent)
        steps_left = (self._total_steps or 0) - self.version.step
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
            eta_s=steps_left * seconds / len(self._recent)
            if steps_left > 0 and self._recent
            else None,
            waiting_for=self._waiting_for,
        )

    async def watch(self, every_s: float) -> AsyncGenerator[TrainerStatus, None]:
        """A snapshot at once, after every change and at least every `every_s` seconds, until the end."""
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


def _shares(spent: Mapping[str, float], seconds: float) -> dict[str, float]:
    """`share/<phase>` of a step for each `time/<phase>_s`."""
    return {
        f"share/{name.removeprefix('time/').removesuffix('_s')}": part / seconds
        for name, part in spent.items()
    }
