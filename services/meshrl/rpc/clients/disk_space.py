"""Waiting while the disk of a service is full: callers ask again until it has space, and say so now and then.

    call ── refused for want of space ── pause, 0.1 to 2 s ──▶ call …   until it is taken, or the call's wait is over

consumes: refusals. waits for: space, which nobody announces. unblocked by: the service's next answer, the end of the
call's own wait, `Shortage.leave`, cancellation. A refused call has done nothing, so it is asked again as it was;
leases are renewed meanwhile by another thread (keeper.py).
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
SAY_EVERY_S: Final = 60.0
"""Between two lines about the same full disk."""
LEAVE_S: Final = 10.0
"""What callers that are to end still wait for space."""


def is_full(error: MeshError) -> bool:
    """Refused for want of space in the store; a message that is too large would be refused for ever."""
    return isinstance(error, CapacityError) and "free" in error.details


class Shortage:
    """What the callers in one process know of another's full disk."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said = False
        self._say_at = 0.0
        self._leave_at = math.inf

    @property
    def leaving(self) -> bool:
        """`leave` was called."""
        return self._leave_at < math.inf

    def leave(self) -> None:
        """The callers are to end: nobody waits for longer than LEAVE_S from now on."""
        self._leave_at = asyncio.get_running_loop().time() + LEAVE_S

    def met(self, error: MeshError) -> None:
        """A call was refused: said at first, and now and then, however often calls get through in between.

        Raises `error` when there is no more time to wait.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._leave_at:
            raise error
        if self._since is None:
            self._since = now
        if now >= self._say_at:
            self._said = True
            self._say_at = now + SAY_EVERY_S
            log.warning("waiting for space, for %.0f s now: %s", now - self._since, error)

    def over(self) -> None:
        """A call that was refused is taken now."""
        if self._since is not None and self._said:
            waited_s = asyncio.get_running_loop().time() - self._since
            log.warning("there is space again, after %.0f s", waited_s)
        self._since, self._said = None, False


class SpaceWait:
    """Of one call."""

    def __init__(self, shortage: Shortage, wait_s: float | None) -> None:
        """`wait_s`: what the call may wait at all; None: as long as it takes."""
        self._shortage = shortage
        self._wait_s = wait_s
        self._began = asyncio.get_running_loop().time()
        self._pause_s = FIRST_PAUSE_S
        self._waited = False

    async def pause(self, error: MeshError) -> None:
        """Raises WaitTimeoutError once the call's own wait is over, `error` once the callers are to end."""
        self._waited = True
        self._shortage.met(error)
        # Jitter, so that a fleet does not come back in step.
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        if self._wait_s is not None:
            left = self._began + self._wait_s - asyncio.get_running_loop().time()
            if left <= 0:
                raise WaitTimeoutError(f"timed out waiting for space: {error.message}") from error
            pause_s = min(pause_s, left)
        await asyncio.sleep(pause_s)
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)

    def done(self) -> None:
        """The call was taken."""
        if self._waited:
            self._shortage.over()
