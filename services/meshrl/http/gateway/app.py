"""The gateway's HTTP app: FastAPI, OpenAPI at /openapi.json, pages at /docs.

A session has two addresses with the same API key: `/sessions/{id}/v1`, and `/v1`, where the key alone identifies it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from meshrl.contract.errors import CapacityError, ForbiddenError, UnauthenticatedError
from meshrl.contract.types import PostedReward
from meshrl.http.common import AsciiJSON, BodyLimit, presented_by
from meshrl.http.gateway import models as m
from meshrl.http.gateway.answers import (
    AnswerFormat,
    Format,
    StreamedAnswer,
    install,
    refusal,
    refused,
)
from meshrl.http.gateway.anthropic import CountBody, MessageFormat, MessagesBody
from meshrl.http.gateway.responses import ResponseFormat, ResponsesBody, SaidBefore
from meshrl.http.gateway.sessions import SessionTable, address
from meshrl.rollout.agents.agent import task_json
from meshrl.rollout.agents.answer_stream import AnswerStream
from meshrl.rollout.agents.requests import SessionAnswer, SessionEndedError, SessionRequest
from meshrl.rollout.agents.session import Address, AgentSession
from meshrl.rollout.tokenizer import ChatTokenizer
from meshrl.rpc.identity import CLAIM, Identity

T = TypeVar("T")
MODEL = "policy"
PROTECTED = ("/v1/", "/sessions/")
"""Paths that need the API key of a session."""
CLAIMS = "/v1/sessions"
"""Needs none: who claims a session has no key yet."""
SAMPLING = frozenset(
    f"/v1/{name}"
    for name in (
        "chat/completions",
        "completions",
        "responses",
        "messages",
        "messages/count_tokens",
        "models",
    )
)
MODELS = "/v1/models/"
"""The only route besides `SAMPLING` for agents in containers: their rewards come from tests."""
KEY_HEADERS = (b"authorization", b"x-api-key")
CONVERSATION = "x-session-id"
"""The header in which a client of several conversations names one, as routers read it, too."""
MAX_NAME = 256
CLIENT_GONE = 499
"""Status for a client that has disconnected, never read."""
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "wrong input, or no room for an answer",
        401: "no API key, or not one of a session",
        403: "another session's key",
        405: "no such method",
        410: "the session has ended",
        413: "too large",
        429: "too many requests at once",
        500: "the engine failed",
        503: "the engine is gone, or the worker drains",
    }.items()
}

_bearer = HTTPBearer(auto_error=False, description="A session's API key.")
SHOWS_KEY = [Depends(_bearer)]
"""For the OpenAPI document; `key_of` reads the key."""


def key_of(request: Request) -> str:
    """The Authorization header; of Anthropic's clients, which send `x-api-key`, the same made of that."""
    key = request.headers.get("x-api-key", "")
    return request.headers.get("authorization", "") or (f"Bearer {key}" if key else "")


def build_app(
    sessions: SessionTable,
    tokenizer: ChatTokenizer,
    *,
    max_body_bytes: int,
    identity: Identity | None,
) -> FastAPI:
    """The app; `identity` admits callers who claim sessions; None: no caller may."""
    app = FastAPI(
        title="meshrl gateway",
        version="1",
        description="Sessions of rows, for clients of OpenAI's and of Anthropic's API.",
        default_response_class=AsciiJSON,
    )
    app.add_middleware(BodyLimit, limit=max_body_bytes, refuse=refusal)
    # Added last, so it runs first.
    app.add_middleware(SessionAuth, sessions=sessions, identity=identity)
    install(app)

    @app.get("/health", tags=["service"])
    async def health() -> dict[str, Any]:
        """Whether the gateway serves."""
        return {"status": "serving", "sessions": sessions.open_sessions}

    sessions.row_app = partial(RowApp, app)
    app.include_router(_sessions(sessions, tokenizer), prefix="/v1")
    app.include_router(_session_routes(sessions, tokenizer), prefix="/v1")
    app.include_router(_session_routes(sessions, tokenizer), prefix="/sessions/{session_id}/v1")
    return app


class SessionAuth:
    """ASGI middleware: rejects a request before a byte of the body is read.

    Of a session: without its API key; that claims one: of a caller who may not.
    """

    def __init__(self, app: ASGIApp, sessions: SessionTable, identity: Identity | None) -> None:
        self._app = app
        self._sessions = sessions
        self._identity = identity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["path"].startswith(PROTECTED):
            try:
                self._check(Request(scope))
            except (UnauthenticatedError, ForbiddenError, CapacityError) as error:
                await refused(error)(scope, receive, send)
                return
            except SessionEndedError:
                pass  # the route answers it: some requests to an ended session are repetitions, and succeed
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        if request.scope["path"].rstrip("/") != CLAIMS:
            self._sessions.find(key_of(request))
            return
        if self._identity is None:
            raise ForbiddenError(
                "this worker gives out no sessions (rollout.program_options.external)"
            )
        self._identity.admit(CLAIM, presented_by(request))


class RowApp:
    """ASGI app for processes of one row's container: they sample for its session, whatever key they show."""

    def __init__(self, app: ASGIApp, address: Address) -> None:
        self._app = app
        self._prefix = urlsplit(address.base_url).path.removesuffix("/v1")
        self._key = (b"authorization", f"Bearer {address.api_key}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        path: str = scope["path"]
        if path not in SAMPLING and not path.startswith(MODELS):
            error = ForbiddenError(f"{path[:MAX_NAME]} is not for agents in containers")
            await refused(error)(scope, receive, send)
            return
        headers = [header for header in scope["headers"] if header[0] not in KEY_HEADERS]
        path = self._prefix + path
        changed = {"path": path, "raw_path": path.encode(), "headers": [*headers, self._key]}
        await self._app({**scope, **changed}, receive, send)


def _session_routes(sessions: SessionTable, tokenizer: ChatTokenizer) -> APIRouter:
    """Routes of OpenAI's API, and the route on which an agent posts its reward."""
    router = APIRouter(responses=PROBLEMS, dependencies=SHOWS_KEY)

    def find(request: Request) -> AgentSession:
        return sessions.find(key_of(request), request.path_params.get("session_id"))

    def named(asked: SessionRequest, request: Request) -> SessionRequest:
        return replace(asked, conversation=request.headers.get(CONVERSATION, "")[:MAX_NAME])

    async def answer(
        request: Request,
        body: m.ChatBody | m.CompletionBody | MessagesBody | ResponsesBody,
        asked: SessionRequest,
        format: Format,
    ) -> Response:
        session = find(request)
        used = asked.sampling if session.client_sampling else ()
        sessions.tell_ignored(session, {*body.ignored} - {*used})
        asked = named(asked, request)
        await session.look_at(asked)
        return await _answered(session.ask(asked), format, request, stream=bool(body.stream))

    def openai(body: m.ChatBody | m.CompletionBody, *, chat: bool, logprobs: bool) -> AnswerFormat:
        return AnswerFormat(
            chat=chat,
            model=body.model,
            tokenizer=tokenizer,
            logprobs=logprobs,
            usage=body.usage_in_stream,
            prompt=body.prompt_logprobs is not None,
            echo=isinstance(body, m.CompletionBody) and bool(body.echo),
        )

    @router.post("/chat/completions", tags=["openai"])
    async def chat_completions(body: m.ChatBody, request: Request) -> Response:
        """Answer a conversation; the answer becomes part of the session's row."""
        format = openai(body, chat=True, logprobs=bool(body.logprobs))
        return await answer(request, body, body.ask(), format)

    @router.post("/completions", tags=["openai"])
    async def completions(body: m.CompletionBody, request: Request) -> Response:
        """Continue a prompt; the answer becomes part of the session's row."""
        # 0 means: log-probs of the sampled tokens only
        format = openai(body, chat=False, logprobs=body.logprobs is not None)
        return await answer(request, body, body.ask(), format)

    @router.post("/responses", tags=["openai"])
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation, or continue that of another answer; it becomes part of the session's row."""
        before = sessions.said.setdefault(find(request), SaidBefore())
        known = before.up_to(body.previous_response_id)

        def keep(response: str, answer: SessionAnswer) -> None:
            before.keep(response, (*known, *body.messages()), answer)

        format = ResponseFormat(body=body, tokenizer=tokenizer, keep=keep)
        return await answer(request, body, body.ask(known), format)

    @router.post("/messages", tags=["anthropic"])
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation in Anthropic's form; the answer becomes part of the session's row."""
        format = MessageFormat(model=body.model, tokenizer=tokenizer, thinking=body.thinks)
        return await answer(request, body, body.ask(), format)

    @router.post("/messages/count_tokens", tags=["anthropic"])
    async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
        """Tokens of a conversation before its answer."""
        session, asked = find(request), named(body.ask(), request)
        await session.look_at(asked)
        return {"input_tokens": session.count_tokens(asked)}

    @router.get("/models", tags=["openai"])
    async def list_models(request: Request) -> dict[str, Any]:
        """The policy."""
        find(request)
        return {"object": "list", "data": [_model(MODEL)]}

    @router.get("/models/{model:path}", tags=["openai"])
    async def get_model(model: str, request: Request) -> dict[str, Any]:
        """The policy, under any name."""
        find(request)
        return _model(model)

    @router.post("/reward", tags=["sessions"])
    async def post_reward(body: m.RewardBody, request: Request) -> dict[str, Any]:
        """Post the reward of the session's conversation; see /v1/sessions/{id}/reward."""
        return _reward(sessions, body, key_of(request), request.path_params.get("session_id"))

    return router


def _sessions(sessions: SessionTable, tokenizer: ChatTokenizer) -> APIRouter:
    """Routes for external agents."""
    router = APIRouter(
        prefix="/sessions", tags=["sessions"], responses=PROBLEMS, dependencies=SHOWS_KEY
    )

    @router.post("", status_code=201, responses={408: {"description": "no row came"}})
    async def claim_session(body: m.ClaimBody, request: Request) -> Response:
        """Claim a row that waits for an external agent, as a session."""
        session = await _unless_disconnected(request, sessions.claim(body.wait_s))
        if session is not None and await request.is_disconnected():
            session.finished.set()  # the client does not get it: its row goes back
            session = None
        if session is None:
            return Response(status_code=CLIENT_GONE)
        place = address(str(request.base_url).rstrip("/"), session)
        return AsciiJSON(
            {
                "id": session.id,
                "base_url": place.base_url,
                "api_key": place.api_key,
                "task": task_json(session.task, session.uid, tokenizer),
            },
            201,
        )

    @router.get("/{session_id}")
    async def get_session(session_id: str, request: Request) -> dict[str, Any]:
        """State of a session."""
        session = sessions.find(key_of(request), session_id)
        return {
            "id": session.id,
            "answers": len(session.history.turns),
            "reward": session.reward.to_json() if session.reward else None,
        }

    @router.post("/{session_id}/reward")
    async def post_reward(session_id: str, body: m.RewardBody, request: Request) -> dict[str, Any]:
        """Post the reward of the session's conversation; of several the last counts.

        It replaces the reward service's score. The session of an external agent ends with it.
        """
        return _reward(sessions, body, key_of(request), session_id)

    @router.post("/{session_id}/finish")
    async def finish_session(session_id: str, request: Request) -> dict[str, Any]:
        """End the session of an external agent; without a reward its row is scored like others."""
        try:
            sessions.find(key_of(request), session_id).finished.set()
        except SessionEndedError:
            ended = sessions.ended(key_of(request))
            if ended is None or not ended.finished:  # for example by its deadline
                raise
        return {"id": session_id, "finished": True}

    return router


def _reward(
    sessions: SessionTable, body: m.RewardBody, authorization: str, session_id: str | None
) -> dict[str, Any]:
    reward = PostedReward(score=body.score, components=body.components)
    try:
        session = sessions.find(authorization, session_id)
    except SessionEndedError:
        ended = sessions.ended(authorization)
        if ended is None or not ended.finished or ended.reward != reward:
            raise  # posting the same reward twice is fine
        return {"id": ended.id, "reward": reward.to_json()}
    session.post(reward)
    if body.finish:
        session.finished.set()
    return {"id": session.id, "reward": reward.to_json()}


async def _answered(
    asking: AnswerStream, format: Format, request: Request, *, stream: bool
) -> Response:
    if stream:
        return StreamedAnswer(asking, format)
    try:
        answer = await _unless_disconnected(request, asking.whole())
    finally:
        asking.task.cancel()
    return (
        Response(status_code=CLIENT_GONE)
        if answer is None
        else AsciiJSON(format.complete(asking, answer))
    )


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; if the client disconnects before, cancel it and give None."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "meshrl"}
