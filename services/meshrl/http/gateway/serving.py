"""Starts the gateway of a rollout worker if its program needs one, and writes its address to the run's directory."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from meshrl.common.files import replace_file
from meshrl.common.sockets import Certificates, is_loopback
from meshrl.config.recipe import Recipe, uses_gateway
from meshrl.contract.errors import UserError
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rollout.tokenizer import ChatTokenizer
from meshrl.rpc.http_server import ConnectionLimits
from meshrl.rpc.identity import CLAIM, Identity, RateLimit, TokenStore
from meshrl.rpc.runtime import ServerSettings, permit_insecure

log = logging.getLogger(__name__)


@asynccontextmanager
async def gateway_of(
    recipe: Recipe,
    tokenizer: ChatTokenizer,
    settings: ServerSettings,
    *,
    name: str,
) -> AsyncIterator[SessionTable | None]:
    """The gateway of worker `name`, open while the body runs; None if the run's program needs none.

    Raises:
        UserError: anybody could reach it, or it cannot listen on its port.
    """
    if not uses_gateway(recipe):
        yield None
        return
    # Imported here: with it comes FastAPI, which a run without agents can do without.
    from meshrl.http.gateway.answers import refusal
    from meshrl.http.gateway.app import build_app
    from meshrl.rpc.http_server import serving_http

    config = recipe.rollout.gateway
    identity = _identity(recipe, settings)
    sessions = SessionTable(prompt_tokens=recipe.data.max_prompt_length)
    app = build_app(sessions, tokenizer, max_body_bytes=config.max_request_bytes, identity=identity)
    # No TLS on loopback: certificates do not name loopback addresses.
    tls = Certificates() if is_loopback(config.host) else settings.tls
    port = config.port + _number(name) if config.port else 0
    async with serving_http(
        app,
        config.host,
        port,
        tls,
        name="gateway",
        limits=ConnectionLimits(config.max_connections),
        allowed_hosts=config.allowed_hosts,
        refuse=refusal,
    ) as url:
        sessions.url = url
        with _address_file(recipe.run.path / "gateways" / f"{name}.json", url):
            try:
                yield sessions
            finally:
                sessions.drain()


def _identity(recipe: Recipe, settings: ServerSettings) -> Identity | None:
    """Admits callers who claim sessions; None: no caller may. Raises UserError if any client of the network could."""
    config = recipe.rollout.gateway
    external = bool(recipe.rollout.program_options.get("external"))
    local = is_loopback(config.host)
    if not external:
        if not local:
            raise UserError(
                f"rollout.gateway.host: {config.host!r} can be reached from other machines, and the agents of "
                "this run are started here: want 127.0.0.1 (only program_options.external needs another)"
            )
        return None
    encrypted = settings.tls.cert is not None
    if not (local or encrypted) and config.tokens is not None:
        permit_insecure(
            settings,
            f"rollout.gateway.host: {config.host!r} can be reached from other machines, and tokens and the keys "
            "of sessions would travel unencrypted: set tls.cert and tls.key, or bind 127.0.0.1",
            f"the gateway on {config.host} takes tokens and keys unencrypted",
        )
    protected = local or config.tokens is not None or settings.tls.mutual
    if not protected:
        permit_insecure(
            settings,
            f"rollout.gateway.host: {config.host!r} can be reached from other machines, where anybody could "
            "claim sessions: set rollout.gateway.tokens (role: claim) or tls.client_ca, or bind 127.0.0.1",
            f"the gateway on {config.host} is open to everybody, so no sessions can be claimed",
        )
        return None
    tokens = TokenStore(config.tokens) if config.tokens is not None else None
    return settings.identity(tokens, {CLAIM: [RateLimit("requests", config.claims_per_minute)]})


def _number(name: str) -> int:
    """Number of a worker on its machine: 3 for `rollout-3`."""
    match = re.search(r"-(\d+)$", name)
    return int(match[1]) if match else 0


@contextmanager
def _address_file(path: Path, url: str) -> Iterator[None]:
    """A file with the gateway's address, while it serves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"url": url, "pid": os.getpid()}) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
