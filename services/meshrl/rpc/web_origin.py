"""Refuses the requests that a web page of another site may have sent, before an app sees them.

A page can point a name of its own to this machine's address (DNS rebinding), and can send some requests to any
address. The Host header shows the first, Origin and Sec-Fetch-Site the second; programs send neither of the latter.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from meshrl.contract.errors import ForbiddenError

JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"
ANY_ADDRESS = ("0.0.0.0", "::")
OWN_PAGES = ("same-origin", "none")
"""Values of Sec-Fetch-Site: a page of this server, and an address that a person typed."""

Refuse: TypeAlias = Callable[[int, str, str], ASGIApp]
"""Makes the answer to a request that is refused, from status, code and detail."""


class WebRequests:
    """ASGI middleware: 403 for another Host or Origin, 415 for a body that is not declared as JSON."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], refuse: Refuse) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        app = self._app
        if scope["type"] == "http":
            headers = headers_of(scope)
            sent = Counter(name for name, _ in scope["headers"])
            try:
                if sent[b"host"] > 1 or sent[b"origin"] > 1:
                    raise ForbiddenError("Host and Origin may be sent once")
                check_origin(headers, self._hosts)
            except ForbiddenError as error:
                app = self._refuse(403, "forbidden", error.message)
            else:
                if problem := _content(headers):
                    app = self._refuse(415, "content_type", problem)
        await app(scope, receive, send)


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request, names in lower case; the first of several with one name."""
    pairs = reversed(scope["headers"])
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


def hosts_of(bound: str, allowed: Iterable[str] = ()) -> frozenset[str]:
    """The names under which a server answers: `localhost`, the host that it binds, and those that are configured."""
    own = (socket.gethostname(), socket.getfqdn()) if bound in ANY_ADDRESS else (bound,)
    return frozenset(name.lower().rstrip(".") for name in ("localhost", *own, *allowed))


def check_origin(headers: Mapping[str, str], hosts: frozenset[str]) -> None:
    """Refuse a request that a page of another site may have sent.

    An IP address as Host is accepted: no name points to it, so nobody can have changed where it points.

    Args:
        headers: Of the request, names in lower case.
        hosts: See `hosts_of`.

    Raises:
        ForbiddenError: says which header, and what would be accepted.
    """
    host = headers.get("host", "")
    name = (_netloc(f"//{host}")[0]).rstrip(".")
    if not (name in hosts or _is_address(name)):
        raise ForbiddenError(
            f"Host {host[:100]!r} is not a name of this server; it answers to {', '.join(sorted(hosts))} "
            "and to IP addresses (allowed_hosts adds names)"
        )
    site = headers.get("sec-fetch-site", "none").lower()
    if site not in OWN_PAGES:
        raise ForbiddenError(
            f"Sec-Fetch-Site {site[:20]!r}: pages of other sites may not call this server"
        )
    origin = headers.get("origin")
    if origin is not None and not same_origin(origin, host):
        raise ForbiddenError(
            f"Origin {origin[:100]!r}: pages of other sites may not call this server"
        )


def same_origin(origin: str, host: str) -> bool:
    """True if a page of `origin` came from the server that is called as `host`."""
    scheme = origin.partition(":")[0].lower()
    return scheme in ("http", "https") and _netloc(origin) == _netloc(f"{scheme}://{host}")


def _netloc(url: str) -> tuple[str, int | None]:
    """Name and port, in lower case; an empty name if it makes no sense."""
    try:
        parts = urlsplit(url)
        default = {"http": 80, "https": 443}.get(parts.scheme)
        return (parts.hostname or "").lower(), parts.port or default
    except ValueError:
        return "", None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _content(headers: Mapping[str, str]) -> str:
    """The fault of the body's declared type; empty without one, or without a body."""
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind and not has_body:
        return ""
    if kind in (JSON, PROTOBUF):  # browsers ask before they send either to another site
        return ""
    return f"content type {kind[:80]!r}: want {JSON}"
