"""External agents claim rows as sessions, and end them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from meshrl.contract.types import Outcome

from ..waiting import until
from .gateway_agents import claim
from .gateway_mesh import RUN, Mesh, agents_mesh


@asynccontextmanager
async def claiming(model: Path, **changes: Any) -> AsyncIterator[tuple[Mesh, httpx.AsyncClient]]:
    """A worker that gives its rows to external agents, and an HTTP client for such an agent."""
    async with (
        agents_mesh(model, {"external": True}, **changes) as mesh,
        httpx.AsyncClient(timeout=60) as http,
    ):
        yield mesh, http


class Claimed:
    """A claimed session."""

    def __init__(self, mesh: Mesh, http: httpx.AsyncClient, claimed: dict[str, Any]) -> None:
        self.claimed = claimed
        self.auth = {"Authorization": f"Bearer {claimed['api_key']}"}
        self._http = http
        self._place = f"{mesh.url}/v1/sessions/{claimed['id']}"

    @classmethod
    async def by(cls, mesh: Mesh, http: httpx.AsyncClient) -> Claimed:
        answer = await claim(mesh, http)
        assert answer.status_code == 201
        return cls(mesh, http, answer.json())

    async def shown(self) -> Any:
        return (await self._http.get(self._place, headers=self.auth)).json()

    async def post(self, verb: str, **body: Any) -> httpx.Response:
        return await self._http.post(f"{self._place}/{verb}", json=body or None, headers=self.auth)


def status_and_code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_an_external_agent_claims_a_row_and_ends_it_with_a_reward(
    talking_model: Path,
) -> None:
    async with claiming(talking_model, tasks=2, slots=4) as (mesh, http):
        await asyncio.sleep(0.1)
        assert mesh.worker.held == 0  # no agent has asked, so no deadline runs
        for score in (1.0, None):
            session = await Claimed.by(mesh, http)
            assert session.claimed["task"]["ground_truth"] in ("1", "2")
            key = session.claimed["api_key"]
            # The key alone identifies the session, and so does its address.
            for base_url in (session.claimed["base_url"], f"{mesh.url}/v1"):
                async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
                    assert (await client.models.list()).data[0].id == "policy"
                    await client.completions.create(model="m", prompt="x", max_tokens=3)
            assert (await session.shown())["answers"] == 2
            if score is None:
                for _ in range(2):  # posting twice equals posting once
                    assert (await session.post("finish")).status_code == 200
                continue
            reward = {"score": score, "components": {"steps": 2}}
            for _ in range(2):
                assert (await session.post("reward", **reward)).status_code == 200
            await mesh.until("ready", 1)
            assert status_and_code(await session.post("reward", score=9)) == (410, "session_ended")
        rows = await mesh.rows(2)
        rewards = [mesh.posted(uid) for uid in rows]
        assert sorted(r.score for r in rewards if r) == [1.0]
        assert None in rewards


async def test_claims_wait_for_rows_and_end_with_the_worker(talking_model: Path) -> None:
    async with claiming(talking_model, tasks=1) as (mesh, http):
        assert (await claim(mesh, http)).status_code == 201
        none = await http.post(f"{mesh.url}/v1/sessions", json={"wait_s": 0.2})
        assert status_and_code(none) == (408, "no_row")
        waiting = asyncio.create_task(claim(mesh, http))
        await until(lambda: mesh.sessions.demand)
        mesh.worker.drain()
        mesh.sessions.drain()
        assert (await waiting).status_code == 503
        # The claimed row goes back unchanged: a drain does not count as an attempt.
        await mesh.until("queued", 1)
        assert (await mesh.queue.ledger(RUN)).dead_lettered == {}


async def test_a_session_past_its_deadline_cannot_be_finished(
    talking_model: Path,
) -> None:
    async with claiming(talking_model, deadline_s=2.0, max_attempts=1) as (mesh, http):
        session = await Claimed.by(mesh, http)
        place, early = f"{session.claimed['base_url']}/reward", {"score": 1.0, "finish": False}
        assert (await http.post(place, json=early, headers=session.auth)).status_code == 200
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.TIMEOUT
        assert status_and_code(await session.post("finish")) == (410, "session_ended")
        assert status_and_code(await session.post("reward", score=1.0)) == (410, "session_ended")


async def test_a_session_without_requests_goes_back_unchanged(talking_model: Path) -> None:
    async with claiming(talking_model, max_attempts=1) as (mesh, http):
        for _ in range(2):
            session = await Claimed.by(mesh, http)
            assert (await session.post("finish")).status_code == 200
        await mesh.until("queued", 1)
        assert mesh.worker.stats.failed == 0


async def test_a_claim_whose_client_left_costs_no_attempt(talking_model: Path) -> None:
    async with claiming(talking_model, max_attempts=1) as (mesh, http):
        leaver = asyncio.create_task(mesh.sessions.claim(30))
        handed = mesh.sessions.hand_over

        def leave_at_once(session: Any, address: Any) -> bool:
            found = handed(session, address)
            leaver.cancel()  # exactly when the row comes
            return found

        mesh.sessions.hand_over = leave_at_once  # type: ignore[method-assign]
        await asyncio.gather(leaver, return_exceptions=True)
        await mesh.until("queued", 1)
        assert (await claim(mesh, http)).status_code == 201


async def test_claims_need_a_token_where_tokens_are_configured(
    talking_model: Path, tmp_path: Path
) -> None:
    from meshrl.rpc.credentials import new_token

    token, digest = new_token()
    other, other_digest = new_token()
    entries = [
        {"name": "a", "roles": ["claim"], "sha256": digest},
        {"name": "b", "roles": ["read"], "sha256": other_digest},
    ]
    tokens = tmp_path / "tokens.yaml"
    tokens.touch(0o600)
    tokens.write_text(json.dumps({"tokens": entries}))
    async with claiming(talking_model, tokens=tokens) as (mesh, http):
        assert (await claim(mesh, http)).status_code == 401
        assert (await claim(mesh, http, Authorization=f"Bearer {other}")).status_code == 403
        assert (await claim(mesh, http, Authorization=f"Bearer {token}")).status_code == 201
