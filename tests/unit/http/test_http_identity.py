"""Every route of the HTTP servers asks who calls, on loopback too: by credential of the run or by certificate."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from meshrl.http.gateway.app import build_app as build_gateway
from meshrl.http.gateway.sessions import SessionTable
from meshrl.http.rewards.app import build_app as build_registry
from meshrl.rpc import credentials
from meshrl.rpc.audit_log import AuditedChanges, RewardAuditLog
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.http_server import CERTIFICATE
from meshrl.rpc.identity import Identity, registry_rates

OPEN = {("GET", "/health")}
LOOK = {MeshRole.OPERATOR, MeshRole.SUBMITTER, MeshRole.READER}
CHANGE = {MeshRole.OPERATOR}
REGISTRY: Mapping[tuple[str, str], set[MeshRole]] = {
    ("POST", "/v1/rewards"): {MeshRole.OPERATOR, MeshRole.SUBMITTER},
    ("GET", "/v1/rewards"): LOOK,
    ("GET", "/v1/rewards/{name}"): LOOK,
    ("GET", "/v1/rewards/{name}/versions/{version}"): LOOK,
    ("GET", "/v1/rewards/{name}/diff"): LOOK,
    ("POST", "/v1/rewards/{name}/score"): LOOK,
    ("POST", "/v1/rewards/{name}/compare"): LOOK,
    ("POST", "/v1/rewards/{name}/rollback"): CHANGE,
    ("POST", "/v1/rewards/{name}/retire"): CHANGE,
}
BODY = {
    "version": "a",
    "name": "reward",
    "source": "x",
    "samples": [{"solution": "1"}],
    "a": "a",
}
FIELDS = {
    "/v1/rewards": ("name", "source"),
    "/v1/rewards/{name}/score": ("samples",),
    "/v1/rewards/{name}/compare": ("a", "samples"),
}
REFUSED = {401, 403}
CERTIFICATES = {"spiffe://mesh/rollout": MeshRole.ROLLOUT, "ann": MeshRole.OPERATOR}


class Absent:
    """A registry that no refused caller may reach: its methods fail."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    credentials.open_run_directory(tmp_path)
    return tmp_path


def registry(run_dir: Path, certificates: Mapping[str, MeshRole] | None = None) -> FastAPI:
    audit = RewardAuditLog(run_dir / "audit.jsonl")
    identity = Identity(credentials.verifiers_file(run_dir), certificates=certificates)
    absent: Any = Absent()
    return build_registry(absent, AuditedChanges(absent, audit), identity, 1 << 20)


def gateway(run_dir: Path) -> FastAPI:
    tokenizer: Any = None
    return build_gateway(
        SessionTable(prompt_tokens=None),
        tokenizer,
        max_body_bytes=1 << 20,
        identity=Identity(credentials.verifiers_file(run_dir)),
    )


def routes(app: FastAPI) -> Iterable[tuple[str, str]]:
    """Method and path of all of them."""
    return [(m.upper(), path) for path, item in app.openapi()["paths"].items() for m in item]


def bearer(run_dir: Path, role: MeshRole) -> dict[str, str]:
    token = credentials.file_of_role(run_dir, role).read_text().strip()
    return {"authorization": f"Bearer {token}"}


async def status(
    app: ASGIApp, route: tuple[str, str], headers: Mapping[str, str] | None = None
) -> int:
    method, path = route
    place = path.format(name="reward", version="a", session_id="s", model="m")
    body = {key: BODY[key] for key in FIELDS.get(path, ("version",))}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.request(
            method,
            place,
            params={"old": "a"},
            headers=dict(headers or {}),
            json=body if method == "POST" else None,
        )
    return answer.status_code


def test_every_route_of_the_registry_is_in_the_table(run_dir: Path) -> None:
    assert set(routes(registry(run_dir))) == {*REGISTRY, *OPEN}


async def test_each_role_may_use_its_routes_of_the_registry_and_no_other(run_dir: Path) -> None:
    app = registry(run_dir)
    for route, wanted in REGISTRY.items():
        assert await status(app, route) == 401, route
        assert await status(app, route, {"authorization": "Bearer mrl_guess"}) == 401, route
        for role in MeshRole:
            code = await status(app, route, bearer(run_dir, role))
            assert (code == 403) == (role not in wanted), (route, role, code)
            assert code not in REFUSED or role not in wanted, (route, role, code)


async def test_the_certificate_of_a_caller_says_its_role_over_http_too(run_dir: Path) -> None:
    app = registry(run_dir, CERTIFICATES)

    def shown(*names: str) -> ASGIApp:
        async def with_certificate(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": {CERTIFICATE: names}}, receive, send)

        return with_certificate

    submit = ("POST", "/v1/rewards")
    worker, operator = shown("rollout-3", "spiffe://mesh/rollout"), shown("ann")
    assert await status(worker, submit) == 403
    assert await status(shown("stranger"), submit) == 403
    assert await status(operator, submit) not in REFUSED
    owner = bearer(run_dir, MeshRole.OPERATOR)
    assert await status(worker, submit, owner) == 403  # a credential beside it only narrows it
    assert await status(operator, submit, bearer(run_dir, MeshRole.READER)) == 403
    assert await status(app, submit) == 401


async def test_every_route_of_the_gateway_asks_and_agents_alone_claim(run_dir: Path) -> None:
    app = gateway(run_dir)
    asked = set(routes(app)) - OPEN
    assert ("POST", "/v1/sessions") in asked and len(asked) > 10
    for route in asked:
        assert await status(app, route) == 401, route
    claims = {
        role: await status(app, ("POST", "/v1/sessions"), bearer(run_dir, role))
        for role in MeshRole
        if role not in (MeshRole.AGENT, MeshRole.OPERATOR)
    }
    assert set(claims.values()) == {403}, claims


async def test_refused_changes_are_logged_until_they_are_too_many(run_dir: Path) -> None:
    audit = RewardAuditLog(run_dir / "audit.jsonl")
    verifiers = credentials.verifiers_file(run_dir)
    identity = Identity(verifiers, rates=registry_rates(1e6, 2))
    identity.refused = audit.refused
    absent: Any = Absent()
    app = build_registry(absent, AuditedChanges(absent, audit), identity, 1 << 20)
    submit = ("POST", "/v1/rewards")
    assert [await status(app, submit) for _ in range(4)] == [401, 401, 429, 429]
    reader = bearer(run_dir, MeshRole.READER)
    assert [await status(app, submit, reader) for _ in range(3)] == [403, 403, 429]
    assert await status(app, ("GET", "/v1/rewards")) == 401
    lines = [json.loads(line) for line in (run_dir / "audit.jsonl").read_text().splitlines()]
    assert [(line["action"], line["result"]) for line in lines] == [
        ("submit", "unauthenticated"),
        ("submit", "unauthenticated"),
        ("submit", "forbidden"),
        ("submit", "forbidden"),
    ]


async def test_no_byte_of_a_strangers_body_is_read(run_dir: Path) -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    for app in (registry(run_dir), gateway(run_dir)):
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for method, path in set(routes(app)) - OPEN:
                place = path.format(name="reward", version="a", session_id="s", model="m")
                typed = {"content-type": "application/json"}
                answer = await http.request(method, place, headers=typed, content=unread())
                assert answer.status_code == 401, (method, path)


async def test_a_host_that_pretends_another_path_claims_no_session(run_dir: Path) -> None:
    app = gateway(run_dir)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for host in ("localhost/v1/models?", "localhost/x#", "localhost/v1/sessions?"):
            headers = {"host": host, **bearer(run_dir, MeshRole.READER)}
            answer = await http.post("/v1/sessions", json={}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_session")
