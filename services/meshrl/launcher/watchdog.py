"""Kills the process groups of a dead supervisor. Run as a file, with nothing imported but the standard library.

PR_SET_PDEATHSIG reaches the supervisor's children only; what *they* started (judge processes, an engine's
server) lives in their process groups, and somebody must outlive the supervisor to end those.

consumes: lines `+PGID` and `-PGID` on stdin. waits for: end of file, which only the supervisor's end brings.
produces: SIGKILL to every group still listed.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Listen until the supervisor is gone, then kill the listed groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
