"""The reward service: the run's judge, its registry, the stage that adds `reward` to rows.

queue ◀─leases, writes─ RewardStage ──▶ ActiveRewardJudge ◀── Registry ◀── Identity ◀── gRPC, HTTP
▲
RewardServicer (gRPC) ──┘
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, closing

from meshrl.common.sockets import is_loopback
from meshrl.config.recipe import Recipe
from meshrl.http.common import problem
from meshrl.http.rewards.app import build_app
from meshrl.launcher.stage_service import (
    STAGE_GRACE_S,
    find_runs,
    until_run_differs,
    work_until_stopped,
)
from meshrl.rewardd.config import RegistryConfig
from meshrl.rewardd.registry.building import open_registry
from meshrl.rewardd.reward_stage import RewardStage, token_ends
from meshrl.rpc.audit_log import AuditedChanges, RewardAuditLog
from meshrl.rpc.http_server import serving_http
from meshrl.rpc.identity import Identity, TokenStore, registry_rates
from meshrl.rpc.queue_connection import connect_mesh_queue
from meshrl.rpc.runtime import GrpcServer, ServerSettings, ServiceContext, Servicer, permit_insecure
from meshrl.rpc.servicers import RewardRegistryServicer, RewardServicer

log = logging.getLogger(__name__)


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Serve until stopped."""
    config = recipe.reward.registry
    settings = context.settings.model_copy(update={"authenticated": config.tokens is not None})
    identity = _identity(config, settings)
    # Without protection the service scores, but takes no submissions.
    submissions = _protected(config, settings)
    directory = config.dir if config.dir is not None else recipe.run.path / "rewards"
    async with AsyncExitStack() as stack:
        # A function that cannot be loaded ends the service here, before any row waits for it.
        registry = await stack.enter_async_context(open_registry(recipe.reward, directory))
        audit = stack.enter_context(closing(RewardAuditLog(directory / "audit.jsonl")))
        identity.refused = audit.refused
        changes = AuditedChanges(registry, audit)
        registry_servicer = RewardRegistryServicer(registry, changes)
        queue = await stack.enter_async_context(connect_mesh_queue(recipe, context))
        servicers: list[Servicer] = [RewardServicer(registry.judge, registry.judge)]
        if submissions:
            servicers.append(registry_servicer)
        server = GrpcServer(settings, servicers, identity=identity)
        await stack.enter_async_context(server)
        if submissions and config.http_port is not None:
            app = build_app(registry, changes, identity, config.max_request_bytes)
            registry_servicer.http_address = await stack.enter_async_context(
                serving_http(
                    app,
                    settings.host,
                    config.http_port,
                    settings.tls,
                    allowed_hosts=config.allowed_hosts,
                    refuse=problem,
                )
            )
        stage = RewardStage(
            queue,
            await find_runs(queue, recipe),
            registry.judge,
            worker=context.name,
            keep_inputs=(recipe.run.name,) if recipe.reward.mixed_versions == "rescore" else (),
            token_rewards=(recipe.run.name,) if recipe.reward.token_rewards else (),
            token_ends=token_ends(recipe.tokenizer_dir) if recipe.reward.token_rewards else None,
        )
        await server.ready()
        await work_until_stopped(
            server,
            stage.run(grace_s=STAGE_GRACE_S),
            stage.drain,
            until_run_differs(queue, recipe),
        )


def _protected(config: RegistryConfig, settings: ServerSettings) -> bool:
    """True if only this machine can connect, or callers need tokens or certificates."""
    return config.tokens is not None or settings.tls.mutual or is_loopback(settings.host)


def _identity(config: RegistryConfig, settings: ServerSettings) -> Identity:
    """Raises UserError if anybody on the network could submit."""
    if config.tokens is not None and settings.tls.cert is None and not is_loopback(settings.host):
        permit_insecure(
            settings,
            f"host {settings.host!r} can be reached from other machines, and tokens would travel unencrypted: "
            "set tls.cert and tls.key, or bind 127.0.0.1",
            f"{settings.host} takes tokens unencrypted",
            host=settings.host,
        )
    if not _protected(config, settings):
        permit_insecure(
            settings,
            f"host {settings.host!r} can be reached from other machines, where anybody could submit a reward: "
            "set reward.registry.tokens (meshrl reward token) or tls.client_ca, or bind 127.0.0.1",
            f"{settings.host} is open to everybody: it takes no submissions",
            host=settings.host,
        )
    return settings.identity(
        TokenStore(config.tokens) if config.tokens is not None else None,
        registry_rates(config.requests_per_minute, config.submissions_per_minute),
    )
