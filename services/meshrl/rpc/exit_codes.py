"""What a process of the mesh says with its exit code."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of `meshrl`; a death by signal N is -N to a parent and 128 + N to a shell."""

    DONE = 0
    FAILED = 1
    """Something broke on our side."""
    USER_ERROR = 2
    """A recipe, an option or a file is wrong: the same command would fail again."""
    NO_PROGRESS = 69
    """EX_UNAVAILABLE: what the service works with failed all the time, and nothing got done."""
    PORT_IN_USE = 75
    """EX_TEMPFAIL: the port is somebody else's; another one would do."""
