"""How fast tokens come."""

from __future__ import annotations

import time

SPAN_S = 1.0
"""Over which the rate is measured."""


class Rate:
    """Counts tokens."""

    def __init__(self) -> None:
        self.total = 0
        """Since the start."""
        self.per_s = 0.0
        """Over the last full span."""
        self._since, self._counted = time.monotonic(), 0

    def add(self, tokens: int) -> None:
        """`tokens` more have come."""
        self.total += tokens
        elapsed = time.monotonic() - self._since
        if elapsed >= SPAN_S:
            self.per_s = (self.total - self._counted) / elapsed
            self._since, self._counted = time.monotonic(), self.total
