"""How long calls wait for a service: for space on its disk, and, in a process that is about to end, for its return.

    call ── refused: no space ── pause, 0.1 to 2 s ──▶ call …   until it is accepted, or the call's wait is over

consumes: refusals. waits for: space, which nobody announces. unblocked by: the service's next answer, the end of the
call's own wait, `Patience.stop_waiting`, cancellation. A refused call has changed nothing, so it is repeated
unchanged. Meanwhile another thread renews the leases (lease_renewer.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from typing import Final

from meshrl.contract.errors import CapacityError, MeshError, WaitTimeoutError

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
LOG_EVERY_S: Final = 60.0
"""Between two log lines about the same full disk."""
LAST_WAIT_S: Final = 10.0
"""How long callers still wait for the service after `stop_waiting`."""


def is_full(error: MeshError) -> bool:
    """True if the store had no space. A too large message is a CapacityError too, but would be refused for ever."""
    return isinstance(error, CapacityError) and "free" in error.details


class Patience:
    """Repeats calls of this process while the service's disk is full. Shared by its callers, so that they log once.

    After `stop_waiting` no call is repeated for long, whatever it waits for.
    """

    def __init__(self, *, last_wait_s: float = LAST_WAIT_S) -> None:
        """Callers still wait for the service for `last_wait_s` after `stop_waiting`."""
        self._last_wait_s = last_wait_s
        self._since: float | None = None
        self._logged = False
        self._log_at = 0.0
        self._give_up_at = math.inf

    def stop_waiting(self) -> None:
        """Let no call wait longer than `last_wait_s` from now, because the process is about to end."""
        self._give_up_at = asyncio.get_running_loop().time() + self._last_wait_s

    def check(self, error: MeshError) -> None:
        """Raise `error`, with which a call has failed, when `last_wait_s` is over."""
        if asyncio.get_running_loop().time() >= self._give_up_at:
            raise error

    def refused(self, error: MeshError) -> None:
        """Note that a call was refused. Logs it at first and every LOG_EVERY_S, even if some calls are accepted.

        Raises `error` when `last_wait_s` is over.
        """
        self.check(error)
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        if now >= self._log_at:
            self._logged = True
            self._log_at = now + LOG_EVERY_S
            log.warning("waiting for space, for %.0f s now: %s", now - self._since, error)

    def accepted(self) -> None:
        """Note that a refused call is accepted now."""
        if self._since is not None and self._logged:
            waited_s = asyncio.get_running_loop().time() - self._since
            log.warning("there is space again, after %.0f s", waited_s)
        self._since, self._logged = None, False


class DiskFullWait:
    """The waiting of one call."""

    def __init__(self, policy: Patience, wait_s: float | None) -> None:
        """`wait_s` is the longest wait of the call; None is no limit."""
        self._policy = policy
        self._wait_s = wait_s
        self._began = asyncio.get_running_loop().time()
        self._pause_s = FIRST_PAUSE_S
        self._waited = False

    async def pause(self, error: MeshError) -> None:
        """Wait before the next attempt.

        Raises WaitTimeoutError when `wait_s` is over, or `error` when the policy's `last_wait_s` is over.
        """
        self._waited = True
        self._policy.refused(error)
        # Jitter, so that the workers of a fleet do not all call at the same moment.
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        if self._wait_s is not None:
            remaining_s = self._began + self._wait_s - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                raise WaitTimeoutError(f"timed out waiting for space: {error.message}") from error
            pause_s = min(pause_s, remaining_s)
        await asyncio.sleep(pause_s)
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)

    def done(self) -> None:
        """Note that the call was accepted."""
        if self._waited:
            self._policy.accepted()
