"""What a worker tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.contract.stage_worker import StageStats

NO_BREAKER = "none"
"""Of deterministic runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker at one instant."""

    held: int
    """Rows held now."""
    slots: int
    """The most that may be."""
    rows: StageStats
    """Since the start."""
    breaker: str
    """closed, open, half_open or none."""
    error_rate: float
    """Share of the last requests to the engine that failed."""
    last_fault: str
    """Empty before the first."""
    opened: int
    """Times that the breaker opened."""
    continued: int
    """Tokens of responses that this worker took over from another."""
    draining: bool
    """It leases no more."""
