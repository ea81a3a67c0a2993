"""The view of a running mesh for a person: live on a terminal, a line a step elsewhere, a table at the end."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshrl.common.plain_text import counted
from meshrl.contract.types import EngineStats, Ledger, TrainerPhase, TrainerStatus, Waiting
from meshrl.launcher.supervisor import ServiceState
from meshrl.trainer.metrics.learning_signs import LearningWarning

STUCK_S = 10.0
"""A trainer that waits for longer counts as stuck: the view then asks why."""


@dataclass(slots=True)
class MeshStatus:
    """One mesh as a person sees it."""

    run: str
    states: Mapping[str, ServiceState]
    """State of every process, updated by the supervisor."""
    started: float = field(default_factory=time.monotonic)
    trainer: TrainerStatus | None = None
    steps: int = 0
    """Steps seen since `up` began."""
    saved_step: int | None = None
    """Step of the newest checkpoint, once the run is over."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean reward by step."""
    scores: dict[int, float] = field(default_factory=dict)
    """Held-out score by the step at which it was seen to change."""
    ledger: Ledger | None = None
    fleet: dict[str, EngineStats | None] = field(default_factory=dict)
    """Figures of each replica; None while it does not answer."""
    waiting: Sequence[Waiting] = ()
    waiting_since: float | None = None
    warnings: Sequence[LearningWarning] = ()
    """Signs that nothing is learned, at the newest step."""

    def see(self, status: TrainerStatus) -> bool:
        """Take a status in; True when it brings another step."""
        fresh = self.trainer is None or status.step != self.trainer.step
        self.steps += self.trainer is not None and status.step > self.trainer.step
        if status.reward_mean is not None and status.step:
            self.rewards[status.step] = status.reward_mean
        if status.held_out_score is not None:
            last = next(reversed(self.scores.values()), None)
            if status.held_out_score != last:
                self.scores[status.step] = status.held_out_score
        if status.phase is not TrainerPhase.WAITING:
            self.waiting_since, self.waiting = None, ()
        elif self.waiting_since is None:
            self.waiting_since = time.monotonic()
        self.trainer = status
        return fresh

    def recall(self, metrics: Path) -> None:
        """Take rewards and scores from the run's own record, which knows the whole run also where it was resumed."""
        try:
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        except (OSError, ValueError):
            # No record, or a last line that was cut short: what was seen is shown.
            return
        for key, seen in (("reward/mean", self.rewards), ("val/score/mean", self.scores)):
            recorded = {
                line["step"]: line[key] for line in lines if isinstance(line.get(key), float)
            }
            if recorded:
                seen.clear()
                seen.update(sorted(recorded.items()))

    @property
    def step(self) -> int:
        """How many steps the run has made."""
        return max(self.trainer.step if self.trainer is not None else 0, self.saved_step or 0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since `up` began."""
        return time.monotonic() - self.started

    @property
    def stuck(self) -> bool:
        """True when the trainer has waited for long."""
        return self.waiting_since is not None and time.monotonic() - self.waiting_since > STUCK_S


BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48
HISTOGRAM_WIDTH = 16
RESIDENT_ORDER = ("queued", "leased", "pending", "ready", "taken", "settled")
PHASE_STYLE = {"ready": "green", "done": "green", "restarting": "red", "starting": "yellow"}


def live_view(mesh_status: MeshStatus) -> RenderableType:
    """The whole view; drawn a few times a second."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    for label, content in _rows(mesh_status):
        grid.add_row(label, content)
    return grid


def _rows(mesh_status: MeshStatus) -> list[tuple[str, RenderableType]]:
    status = mesh_status.trainer
    rows: list[tuple[str, RenderableType]] = [(mesh_status.run, _headline(mesh_status, status))]
    if mesh_status.rewards:
        values = list(mesh_status.rewards.values())
        rows.append(("reward", Text(f"{sparkline(values)}  {values[-1]:.3f}", style="cyan")))
    if status is not None:
        rows.append(("", Text(" · ".join(_figures(mesh_status, status)))))
        if status.staleness:
            rows.append(("staleness", histogram(status.staleness)))
    if mesh_status.ledger is not None:
        rows.append(("queue", Text(" · ".join(_depths(mesh_status.ledger)))))
    for name, stats in mesh_status.fleet.items():
        rows.append((name, _replica(mesh_status, name, stats)))
    if mesh_status.ledger is not None:
        rows.append(("ledger", Text(ledger_line(mesh_status.ledger))))
        if mesh_status.ledger.dead_lettered:
            rows.append(("dead letters", Text(dead_line(mesh_status.ledger), style="red")))
    away = [n for n, s in mesh_status.states.items() if s.phase not in ("ready", "done")]
    if away:
        rows.append(("services", _services(mesh_status, away)))
    for warning in mesh_status.warnings:
        rows.append(("warning", Text(str(warning), style="yellow")))
    for line in waiting_lines(mesh_status):
        rows.append(("waits for", Text(line, style="yellow")))
    return rows


def _headline(mesh_status: MeshStatus, status: TrainerStatus | None) -> RenderableType:
    elapsed = clock(mesh_status.elapsed_s)
    if status is None:
        return Text(f"starting · {elapsed}")
    total = f"/{status.total_steps}" if status.total_steps else ""
    eta = f" · about {clock(status.eta_s)} left" if status.eta_s is not None else ""
    words = Text(f"step {status.step}{total} · {status.phase} · {elapsed}{eta}", style="bold")
    if not status.total_steps:
        return words
    bar = ProgressBar(total=status.total_steps, completed=status.step, width=SPARK_WIDTH)
    return Group(words, bar)


def _figures(mesh_status: MeshStatus, status: TrainerStatus) -> list[str]:
    parts = []
    if status.held_out_score is not None:
        first = next(iter(mesh_status.scores.values()), status.held_out_score)
        parts.append(f"held-out {status.held_out_score:.3f} (began at {first:.3f})")
    parts += [f"{status.tokens_per_s:,.0f} tokens/s trained", counted(status.samples, "sample")]
    parts.append(f"version {status.version}")
    return parts


def _depths(ledger: Ledger) -> list[str]:
    names = [*RESIDENT_ORDER, *(name for name in ledger.resident if name not in RESIDENT_ORDER)]
    return [f"{name} {ledger.resident[name]:,}" for name in names if name in ledger.resident]


def _replica(mesh_status: MeshStatus, name: str, stats: EngineStats | None) -> Text:
    state = mesh_status.states[name]
    restarts = f" · {state.restarts} restarts" if state.restarts else ""
    if stats is None:
        return Text(f"{state.phase}{restarts}", style="yellow")
    text = (
        f"version {stats.version} · {stats.running}/{stats.capacity} running · "
        f"{stats.tokens_per_s:,.0f} tokens/s · {counted(stats.updates, 'update')}, "
        f"last paused {1000 * stats.update_pause_s:.0f} ms"
        f"{f' (from the {stats.staging})' if stats.staging else ''}{restarts}"
    )
    return Text(text)


def _services(mesh_status: MeshStatus, names: Sequence[str]) -> Text:
    text = Text()
    for name in names:
        phase = mesh_status.states[name].phase
        text.append(f"{name} {phase}  ", style=PHASE_STYLE.get(phase, "dim"))
    return text


def waiting_lines(mesh_status: MeshStatus) -> list[str]:
    """The waits of a trainer that is stuck; none while it is not."""
    if not mesh_status.stuck or mesh_status.trainer is None:
        return []
    if not mesh_status.waiting:
        return [mesh_status.trainer.waiting_for] if mesh_status.trainer.waiting_for else []
    return [
        f"{wait.who}: {wait.what}"
        + (f", for {wait.since_s:.0f} s" if wait.since_s else "")
        + (f" ({', '.join(wait.owners[:4])})" if wait.owners else "")
        for wait in mesh_status.waiting[:3]
    ]


def step_line(mesh_status: MeshStatus, status: TrainerStatus) -> str:
    """One step, for a log."""
    total = f"/{status.total_steps}" if status.total_steps else ""
    parts = [f"step {status.step}{total}"]
    if status.reward_mean is not None:
        parts.append(f"reward {status.reward_mean:.3f}")
    if status.held_out_score is not None:
        parts.append(f"held-out {status.held_out_score:.3f}")
    parts += [f"{status.tokens_per_s:,.0f} tokens/s", counted(status.samples, "sample")]
    if status.staleness:
        parts.append(f"staleness {mean_staleness(status.staleness):.2f}")
    parts.append(f"{clock(mesh_status.elapsed_s)} elapsed")
    if status.eta_s is not None:
        parts.append(f"about {clock(status.eta_s)} left")
    return "  ".join(parts)


def final_table(mesh_status: MeshStatus, files: Mapping[str, str]) -> Table:
    """The result of a run. `files` says where things lie."""
    table = Table(title=f"run {mesh_status.run}", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    status = mesh_status.trainer
    if status is not None:
        table.add_row("steps", f"{mesh_status.step} of {status.total_steps or '?'}")
        table.add_row("version", str(status.version))
        if mesh_status.rewards:
            values = list(mesh_status.rewards.values())
            table.add_row("reward", f"{values[0]:.3f} → {values[-1]:.3f}  {sparkline(values)}")
        if mesh_status.scores:
            scores = list(mesh_status.scores.values())
            table.add_row("held-out score", f"{scores[0]:.3f} → {scores[-1]:.3f}")
        over = mesh_status.ledger if mesh_status.saved_step is not None else None
        table.add_row("samples", f"{over.trained if over is not None else status.samples:,}")
        if status.staleness:
            mean, top = mean_staleness(status.staleness), max(status.staleness)
            table.add_row("staleness", f"mean {mean:.2f}, max {top}")
    if mesh_status.ledger is not None:
        table.add_row("ledger", ledger_line(mesh_status.ledger))
        if mesh_status.ledger.dead_lettered:
            table.add_row("dead letters", dead_line(mesh_status.ledger))
    restarts = {
        name: state.restarts for name, state in mesh_status.states.items() if state.restarts
    }
    if restarts:
        table.add_row("restarts", ", ".join(f"{n} {count}" for n, count in restarts.items()))
    table.add_row("time", clock(mesh_status.elapsed_s))
    for what, where in files.items():
        table.add_row(what, where)
    return table


def ledger_line(ledger: Ledger) -> str:
    """The invariant with its figures."""
    parts = {
        "trained": ledger.trained,
        "filtered": sum(ledger.filtered.values()),
        "stale": sum(ledger.stale.values()),
        "dead-lettered": sum(ledger.dead_lettered.values()),
        "resident": sum(ledger.resident.values()),
    }
    terms = " + ".join(f"{name} {count:,}" for name, count in parts.items())
    verdict = "balanced" if ledger.balanced else "NOT BALANCED"
    return f"admitted {ledger.admitted:,} = {terms} ({verdict})"


def dead_line(ledger: Ledger) -> str:
    """Why most rows that were given up were given up."""
    reason, count = max(ledger.dead_lettered.items(), key=lambda item: item[1])
    return f"{count:,} of {sum(ledger.dead_lettered.values()):,}: {' '.join(reason.split())}"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The curve in one line of at most `width` characters; each is the mean of its share of the values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


def histogram(counts: Mapping[int, int]) -> Text:
    """Rows by staleness."""
    most = max(counts.values())
    text = Text()
    for staleness in sorted(counts):
        bar = "█" * max(1, round(HISTOGRAM_WIDTH * counts[staleness] / most))
        text.append(f"{staleness} ", style="dim")
        text.append(f"{bar} {counts[staleness]:,}   ", style="magenta")
    return text


def mean_staleness(counts: Mapping[int, int]) -> float:
    """In optimizer steps, over rows."""
    rows = sum(counts.values())
    return sum(staleness * count for staleness, count in counts.items()) / rows if rows else 0.0


def clock(seconds: float) -> str:
    """`0:01:30`."""
    return str(timedelta(seconds=round(seconds)))
