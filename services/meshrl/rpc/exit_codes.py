"""The exit codes of the mesh's processes."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of `meshrl`; a process killed by signal N has -N for its parent and 128 + N in a shell."""

    DONE = 0
    FAILED = 1
    """An error of the mesh or of the machine."""
    USER_ERROR = 2
    """A recipe, an option or a file is wrong: the same command would fail again."""
    NO_PROGRESS = 69
    """EX_UNAVAILABLE: the service's engine failed all the time, and nothing was done."""
    PART_FAILED = 70
    """EX_SOFTWARE: the step of a part of a batch failed that trainers had died with; the next start narrows it."""
    REFUSED = 74
    """EX_IOERR: the machine or a service refuses each attempt: no room, no permission, a credential that is wrong."""
    PORT_IN_USE = 75
    """EX_TEMPFAIL: another process has the port; another port would work."""
    DRAINED = 143
    """128 + SIGTERM: drained before its work was done; the same command continues with it."""
