"""External agents: they claim sessions at the gateways of rollout workers and lead them, over simulated HTTP.

    agent ──claim──▶ gateway of a worker ──▶ SessionTable ◀── the program `openai`, which hands a row over
      └──chat completions, reward──▶ Session ──▶ engine

The gateway is the product's own app. An HTTP request is one call of the simulated network; where the call breaks, the
app is told that its client has left, as an HTTP server does.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import grpc
from typing_extensions import override

from meshrl.contract.types import Uid
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rpc.identity import Identity
from meshrl.rpc.runtime import Servicer
from tests.simulation.call import Channel
from tests.simulation.conversations import (
    MOST_TURNS,
    TURN_END,
    ChatTokenizer,
    CheckedConversations,
    replied,
    score_of,
)
from tests.simulation.network import Network

METHOD: Final = "/http/Request"
CLAIM_S: Final = 5.0
"""How long an agent waits for a row at one worker."""
REQUEST_S: Final = 60.0
"""An HTTP client's patience for an answer."""
MOST_TRIES: Final = 4
"""Most tries of one request: HTTP clients repeat broken ones."""
PAUSE_S: Final = 1.0
BODY_BYTES: Final = 1 << 20

Answer = tuple[int, dict[str, Any]]
"""Status and body. Status 0: the connection broke, and nobody knows whether the request was worked on."""


def gateway_address(worker: str) -> str:
    """The address of a rollout worker's gateway."""
    return f"{worker}:8000"


class HttpServicer(Servicer):
    """An HTTP server of one ASGI app."""

    service: Final = "http"
    waits: Final[frozenset[str]] = frozenset()

    def __init__(self, app: Any, problem: Callable[[str], None]) -> None:
        """`problem` hears of exceptions that the app lets through."""
        self._app = app
        self._problem = problem

    @override
    def attach(self, server: grpc.aio.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(self._request, bytes, bytes)
        generic = grpc.method_handlers_generic_handler(self.service, {"Request": handler})
        server.add_generic_rpc_handlers((generic,))

    async def _request(self, data: bytes, context: Any) -> bytes:
        asked = json.loads(data)
        body = json.dumps(asked["body"]).encode()
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": body}]
        status, answer = 500, bytearray()

        async def receive() -> dict[str, Any]:
            if not messages:
                await left.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))

        scope = _scope(asked, len(body), context.peer())
        working = asyncio.create_task(self._app(scope, receive, send), name="http-request")
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            left.set()
            await asyncio.gather(working, return_exceptions=True)
            raise
        except Exception as error:
            self._problem(f"the gateway let an error through: {type(error).__name__}: {error}")
        return json.dumps([status, json.loads(answer or b"{}")]).encode()


def _scope(asked: Mapping[str, Any], body_bytes: int, peer: str) -> dict[str, Any]:
    """The ASGI scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": asked["path"],
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", asked["host"].encode()),
            (b"content-type", b"application/json"),
            (b"content-length", str(body_bytes).encode()),
            (b"authorization", f"Bearer {asked['key']}".encode()),
        ],
        "client": (peer, 1),
        "server": (asked["host"], 80),
    }


def gateway_app(sessions: SessionTable, problem: Callable[[str], None]) -> HttpServicer:
    """The product's gateway, open to everybody who can reach it."""
    from meshrl.http.gateway.app import build_app  # FastAPI, which few seeds need

    identity = Identity(None, asks=False)
    app = build_app(sessions, ChatTokenizer(), max_body_bytes=BODY_BYTES, identity=identity)
    return HttpServicer(app, problem)


class Agent:
    """One external agent: claims rows, one after the other, until it is told to stop."""

    def __init__(
        self,
        network: Network,
        workers: Sequence[str],
        draw: random.Random,
        conversations: CheckedConversations,
    ) -> None:
        self._network = network
        self._workers = workers
        self._draw = draw
        self._conversations = conversations
        self._stopping = False

    def stop(self) -> None:
        """End after the session that it leads."""
        self._stopping = True

    async def run(self) -> None:
        """Lead sessions."""
        while not self._stopping:
            host = gateway_address(self._draw.choice(self._workers))
            status, session = await self._ask(host, "/v1/sessions", {"wait_s": CLAIM_S})
            if status == 201:
                await self._lead(host, session)
            elif status != 408:
                await asyncio.sleep(PAUSE_S)

    async def _lead(self, host: str, session: dict[str, Any]) -> None:
        """One conversation to its end, or until it can continue no more."""
        task, key = session["task"], session["api_key"]
        path = session["base_url"].partition(host)[2]
        uid = str(Uid(task["run"], task["task_id"], task["index"], task["attempt"]))
        messages = list(task["messages"])
        turns = self._draw.randint(1, MOST_TURNS)
        for turn in range(turns):
            body = {"model": "policy", "messages": messages, "stop": [TURN_END]}
            status, answer = await self._insist(host, f"{path}/chat/completions", body, key)
            if status != 200:
                return
            said = answer["choices"][0]["message"]
            text = said["content"]
            messages.append({"role": "assistant", "content": text})
            if turn + 1 < turns:
                messages.append({"role": "user", "content": replied(text)})
        score = score_of(turns)
        self._conversations.posted.setdefault(uid, set()).add(score)
        reward = {"score": score, "finish": True}
        await self._insist(host, f"/v1/sessions/{session['id']}/reward", reward, key)

    async def _insist(self, host: str, path: str, body: dict[str, Any], key: str) -> Answer:
        """Repeat a request that broke, or for which there was no room."""
        for _ in range(MOST_TRIES):
            status, answer = await self._ask(host, path, body, key)
            if status not in (0, 429):
                break
            await asyncio.sleep(self._draw.uniform(0.0, PAUSE_S))
        return status, answer

    async def _ask(self, host: str, path: str, body: dict[str, Any], key: str = "") -> Answer:
        asked = json.dumps({"host": host, "path": path, "body": body, "key": key}).encode()
        send = Channel(self._network, host).unary_unary(METHOD, bytes, bytes)
        try:
            status, answer = json.loads(await send([asked], timeout=REQUEST_S))
        except grpc.aio.AioRpcError:
            return 0, {}
        return status, answer
