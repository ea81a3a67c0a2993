"""Addresses: how they are written, who reaches them, a socket that listens at one; certificates of a process."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from meshrl.contract.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files; the `tls:` section of a recipe says what each is for. With none, connections are not encrypted.

    Raises:
        ValueError: some do not make sense without others.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("client_ca needs cert and key")

    @property
    def on(self) -> bool:
        """True when connections are encrypted."""
        return self.cert is not None or self.ca is not None

    @property
    def mutual(self) -> bool:
        """True when a client without a certificate is refused."""
        return self.client_ca is not None


DIRECT = {"http://": None, "https://": None, "all://": None}
"""The `mounts` of an httpx client that uses none of the environment's proxies, but its certificates."""
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
TRUSTED_VARIABLE = "MESHRL_ALLOW_INSECURE_BIND"
"""Set in a network that is trusted: its machines may be listened to, and called, without encryption."""
PLAIN = {"http": "https", "redis": "rediss"}
"""The encrypted scheme for each plain one."""
SECRET = re.compile(
    "auth|bearer|cookie|credential|key|password|secret|session|signature|token", re.IGNORECASE
)
"""The name of a header, or of a URL's query parameter, that identifies the sender."""
SIOCGIFADDR = 0x8915
"""Asks Linux for the address of an interface."""


def listen_fd(host: str, port: int = 0) -> tuple[int, int]:
    """A descriptor that listens at `host`, and its port; the caller closes the descriptor.

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


def reach_directly(environment: MutableMapping[str, str]) -> None:
    """Keep calls to this machine out of the proxies that `environment` names, in place.

    A proxy elsewhere cannot call this machine back. Both spellings are set, since libraries differ in which they
    read; what is spared already stays. Where no proxy is named nothing changes.
    """
    names = {name.lower() for name, value in environment.items() if value}
    if not any(name.endswith("_proxy") for name in names - {"no_proxy"}):
        return
    spared = [environment.get("no_proxy", ""), environment.get("NO_PROXY", ""), *THIS_MACHINE]
    entries = dict.fromkeys(entry.strip() for entry in ",".join(spared).split(","))
    if "*" not in entries:
        environment["no_proxy"] = environment["NO_PROXY"] = ",".join(filter(None, entries))


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
        return parts.scheme in PLAIN and not is_loopback(parts.hostname or "localhost")
    except ValueError:
        return False


def has_secret(url: str, headers: Iterable[str] = ()) -> bool:
    """True if `url` has a user, a password or a secret's name in it, or one of `headers` has such a name."""
    place, _, query = url.partition("://")[2].partition("?")
    names = [pair.partition("=")[0] for pair in re.split("[&;]", query)]
    return "@" in place.partition("/")[0] or any(map(SECRET.search, [*names, *headers]))


def keep_secret(url: str, what: str) -> None:
    """Raises UserError where `what` would travel to `url` unencrypted, unless the network is trusted."""
    if tells_others(url) and not trusts_network():
        shown = urlsplit(url)
        raise UserError(
            f"{what} would travel to {shown.scheme}://{shown.netloc.rpartition('@')[2]} unencrypted: use"
            f" {PLAIN[shown.scheme]}://, or {TRUSTED_VARIABLE}=1 in a network that you trust"
        )


_trusted = False


def trust_network() -> None:
    """Say what MESHRL_ALLOW_INSECURE_BIND says, for this process."""
    global _trusted
    _trusted = True


def trusts_network() -> bool:
    """Whether it was said that other machines may be called, and listened to, without encryption."""
    told = os.environ.get(TRUSTED_VARIABLE, "").lower()
    return _trusted or told in ("1", "true", "t", "yes", "y", "on")


def disconnect(peers: Iterable[str]) -> None:
    """End this process's connections with `peers`, `host:port`, of any part of it; see shutdown(2)."""
    wanted = {_endpoint(*peer.rpartition(":")[::2]) for peer in peers}
    for descriptor in [int(entry.name) for entry in Path("/dev/fd").iterdir()]:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue  # `socket` would refuse its copy, and leave that open
            with socket.socket(fileno=os.dup(descriptor)) as each:
                of_network = each.family in (socket.AF_INET, socket.AF_INET6)
                if of_network and _endpoint(*each.getpeername()[:2]) in wanted:
                    each.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected, or closed meanwhile
            continue


def _endpoint(host: str, port: str | int) -> tuple[object, int]:
    """Comparable, however a socket or gRPC writes it; an IPv4 address that came over IPv6 is one of IPv4."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        return getattr(address, "ipv4_mapped", None) or address, int(port)
    except ValueError:
        return host, -1


def join_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str) -> str:
    """Return `address` unchanged. Raises UserError unless it is `host:port` of one queue or `unix:/path`."""
    host, colon, port = address.rpartition(":")
    if address.startswith(("unix:", "unix-abstract:")):
        return address
    if "," in host or not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"{address!r} is not an address of a queue; want host:port or unix:/path")
    return address
