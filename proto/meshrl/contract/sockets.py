"""Addresses: how they are written, which ones only this machine reaches, and a socket that listens at one."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from urllib.parse import urlsplit

SIOCGIFADDR = 0x8915
"""Asks Linux for the address of an interface."""


def listen_fd(host: str, port: int = 0) -> tuple[int, int]:
    """A descriptor that listens at `host`, and its port; whoever takes the descriptor closes it.

    For `torch.distributed.TCPStore(master_listen_fd=...)`: without it the store of `127.0.0.1` listens at `*`.
    Raises OSError: the address is not this machine's, or the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        chosen: int = listener.getsockname()[1]
        return listener.detach(), chosen


def loopback_interface() -> str:
    """The name of the interface of 127.0.0.1: `lo` on Linux, `lo0` on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def interface_towards(host: str) -> str | None:
    """The name of the interface through which this machine reaches `host`, itself included; None where none is known.

    Linux, and IPv4 only.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    except OSError:
        pass
    return None


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def stays_here(address: str) -> bool:
    """True if `host:port`, or another name that gRPC takes, is reached without leaving this machine."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return address.startswith(("unix:", "unix-abstract:")) or is_loopback(host)


def tells_others(url: str) -> bool:
    """True if what is sent to `url` travels unencrypted beyond this machine; False for what is no address."""
    try:
        parts = urlsplit(url)
        return parts.scheme == "http" and not is_loopback(parts.hostname or "localhost")
    except ValueError:
        return False


def join_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
