"""The reward registry from Python, over HTTP: `RewardClient`, and `AsyncRewardClient` with the same methods.

    with RewardClient("http://127.0.0.1:8800", token="mrl_...") as rewards:
        rewards.submit("reward", source=Path("reward.py").read_text())
        rewards.score("reward", [{"solution": "#### 42", "ground_truth": "42"}])

Needs httpx (`pip install 'meshrl[client]'`). Answers are the JSON of the service; its pages at /docs describe them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from meshrl.common.sockets import DIRECT, tells_others
from meshrl.contract.errors import InfraError, MeshError, UnavailableError, UserError, from_detail
from meshrl.contract.types import Json

TIMEOUT_S = 120.0
"""Longer than a submission may take to load and to pass its tests."""


def _answer(response: httpx.Response) -> Any:
    """The JSON of a success. Raises what the service raised."""
    if response.is_success:
        return response.json() if "json" in response.headers["content-type"] else response.text
    try:
        problem = response.json()
        code, detail = str(problem.pop("code")), str(problem.pop("detail"))
    except (ValueError, KeyError, AttributeError):
        raise InfraError(
            f"HTTP {response.status_code} without a problem: {response.text[:200]}"
        ) from None
    raise from_detail(code, detail, problem)


def _unreachable(url: httpx.URL, error: httpx.TransportError) -> MeshError:
    return UnavailableError(f"the reward service at {url} cannot be reached: {error}")


def _headers(url: str, token: str | None, allow_plain_http: bool) -> dict[str, str]:
    """Raises UserError if the token would travel unencrypted beyond this machine."""
    if not token:
        return {}
    if tells_others(url) and not allow_plain_http:
        raise UserError(
            f"the token would travel to {url} unencrypted: use https://, or allow_plain_http=True in a network "
            "that you trust"
        )
    return {"Authorization": f"Bearer {token}"}


class _Methods:
    """The methods of both clients; each returns the result of `_send`, the answer of the service.

    Every method raises the MeshError that the service names (UserError, NotFoundError, ConflictError …).
    """

    _kind: Any
    """The class of the httpx client."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        verify: Any = True,
        allow_plain_http: bool = False,
        through_proxies: bool = False,
    ) -> None:
        """Connect to `url`; `verify` as httpx takes it (an SSLContext for a private authority).

        Directly, or with `through_proxies` through those that the environment names (`https_proxy`, …).

        Raises:
            UserError: the token would travel unencrypted beyond this machine, and `allow_plain_http` is not set.
        """
        self._http = self._kind(
            base_url=url,
            headers=_headers(url, token, allow_plain_http),
            timeout=TIMEOUT_S,
            verify=verify,
            mounts=None if through_proxies else DIRECT,
        )

    def _send(self, verb: str, path: str, **arguments: Any) -> Any:
        raise NotImplementedError

    def submit(
        self,
        name: str,
        *,
        source: str = "",
        wheel: bytes = b"",
        entry_point: str = "",
        kind: str = "compute_score",
        deps: Sequence[str] = (),
        tests: Sequence[Mapping[str, Json]] = (),
        limits: Mapping[str, float] | None = None,
        note: str = "",
        hold: bool = False,
    ) -> Any:
        """Submit a version; gives `hash`, `created`, `name`."""
        body = {
            "name": name,
            "source": source,
            "wheel": base64.b64encode(wheel).decode(),
            "entry_point": entry_point,
            "kind": kind,
            "deps": list(deps),
            "tests": list(tests),
            "limits": dict(limits or {}),
            "note": note,
            "hold": hold,
        }
        return self._send("POST", "/v1/rewards", json=body)

    def list(self) -> Any:
        """Every name, and what scores the run."""
        return self._send("GET", "/v1/rewards")

    def show(self, name: str, version: str = "current") -> Any:
        """One version with its source."""
        return self._send("GET", f"/v1/rewards/{name}/versions/{version}")

    def diff(self, name: str, old: str, new: str = "") -> Any:
        """A unified diff of two sources, as text."""
        return self._send("GET", f"/v1/rewards/{name}/diff", params={"old": old, "new": new})

    def roll_back(self, name: str, version: str = "") -> Any:
        """Point the name to `version`, or to the one before."""
        return self._send("POST", f"/v1/rewards/{name}/rollback", json={"version": version})

    def retire(self, name: str, version: str) -> Any:
        """Forbid a version to score under this name."""
        return self._send("POST", f"/v1/rewards/{name}/retire", json={"version": version})

    def score(self, name: str, samples: Sequence[Mapping[str, Json]], version: str = "") -> Any:
        """Try a version out: one score per sample."""
        body = {"samples": [*samples], "version": version}
        return self._send("POST", f"/v1/rewards/{name}/score", json=body)

    def compare(
        self, name: str, a: str, b: str = "", samples: Sequence[Mapping[str, Json]] = ()
    ) -> Any:
        """Two versions on `samples`, or on the samples that the run scored last."""
        body = {"a": a, "b": b, "samples": [*samples]}
        return self._send("POST", f"/v1/rewards/{name}/compare", json=body)


class RewardClient(_Methods):
    """Each method blocks until the service has answered."""

    _http: httpx.Client
    _kind = httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def _send(self, verb: str, path: str, **arguments: Any) -> Any:
        try:
            return _answer(self._http.request(verb, path, **arguments))
        except httpx.TransportError as error:
            raise _unreachable(self._http.base_url, error) from error


class AsyncRewardClient(_Methods):
    """The same methods, awaitable."""

    _http: httpx.AsyncClient
    _kind = httpx.AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def _send(self, verb: str, path: str, **arguments: Any) -> Any:
        try:
            return _answer(await self._http.request(verb, path, **arguments))
        except httpx.TransportError as error:
            raise _unreachable(self._http.base_url, error) from error
