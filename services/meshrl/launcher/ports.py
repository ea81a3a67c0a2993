"""Free ports that stay free: chosen below the range from which the kernel takes ports for outgoing connections."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection

from meshrl.contract.errors import CapacityError

LOWEST, HIGHEST = 20_000, 32_000
"""Linux takes ephemeral ports from 32768 upwards, so a service that restarts finds its port unused."""
TRIES = 200


def free_port(host: str, taken: Collection[int] = ()) -> int:
    """A port of `host` on which no program listens now, and which is not in `taken`.

    Raises:
        CapacityError: none was found.
    """
    draw = random.SystemRandom()
    for _ in range(TRIES):
        port = draw.randint(LOWEST, HIGHEST)
        if port not in taken and is_free(host, port):
            return port
    raise CapacityError(f"no free port found on {host} between {LOWEST} and {HIGHEST}")


def is_free(host: str, port: int) -> bool:
    """Whether no program listens on `port` of `host` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def is_taken(host: str, port: int) -> bool:
    """Whether another program listens on the port; with any other failure to bind, another port would not help.

    Unlike for `is_free`, a connection that ended there a moment ago does no harm: servers bind in spite of it.
    """
    if port == 0:
        return False
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
