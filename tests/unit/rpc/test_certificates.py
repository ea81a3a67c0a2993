"""Certificates that are replaced while servers and clients run."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path

import grpc
import pytest
import trustme
from fastapi import FastAPI
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse

from meshrl.common.sockets import Certificates
from meshrl.rpc import tls
from meshrl.rpc.http_server import serving_http, serving_metrics
from meshrl.rpc.runtime import GrpcServer, ServerSettings

from ...certificates import issue
from .test_runtime import health_of

SERVING = 1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "RELOAD_S", 0.0)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


async def shown(address: str, authority: trustme.CA) -> str:
    """The serial number of the certificate that a server shows on a new connection."""
    host, _, port = address.rpartition("/")[2].rpartition(":")

    def ask() -> str:
        context = ssl.create_default_context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        authority.configure_trust(context)
        with (
            socket.create_connection((host, int(port)), 20) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as encrypted,
        ):
            return str((encrypted.getpeercert() or {})["serialNumber"])

    return await asyncio.to_thread(ask)


async def test_a_certificate_that_is_replaced_is_shown_to_new_connections_and_open_ones_go_on(
    tmp_path: Path, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = issue(tmp_path, authority)
    settings = ServerSettings(metrics_port=None, tls=mine)
    app = FastAPI()
    refuse = PlainTextResponse("no")
    monkeypatch.setenv("MESHRL_TLS_CA", str(mine.ca))
    async with (
        GrpcServer(settings, []) as server,
        serving_http(app, "127.0.0.1", 0, mine, refuse=lambda *_: refuse) as http,
        serving_metrics(CollectorRegistry(), "0.0.0.0", 0, mine) as metrics_port,
        tls.channel(server.address) as channel,
    ):
        await server.ready()
        assert await health_of(channel, "") == SERVING
        servers = (server.address, http, f"127.0.0.1:{metrics_port}")
        first = {await shown(each, authority) for each in servers}
        assert len(first) == 1
        issue(tmp_path, authority)
        second = {await shown(each, authority) for each in servers}
        assert len(second) == 1 and first != second
        assert await health_of(channel, "") == SERVING


async def test_a_certificate_that_does_not_fit_its_key_is_told_of_and_the_one_before_stays(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    mine = issue(tmp_path, authority)
    settings = ServerSettings(metrics_port=None, tls=mine)
    async with GrpcServer(settings, []) as server:
        first = await shown(server.address, authority)
        with caplog.at_level(logging.ERROR):
            issue(tmp_path, authority, key=False)
            assert await shown(server.address, authority) == first
        assert "what was read before stays valid: tls: " in caplog.text
        issue(tmp_path, authority)
        assert await shown(server.address, authority) != first


async def test_a_client_shows_the_certificate_that_its_file_holds_and_trusts_the_authority_of_then(
    tmp_path: Path, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = trustme.CA()
    served = issue(tmp_path / "server", authority)
    mine = issue(tmp_path / "client", authority)
    mutual = Certificates(cert=served.cert, key=served.key, client_ca=served.ca)
    for name in ("ca", "cert", "key"):
        monkeypatch.setenv(f"MESHRL_TLS_{name.upper()}", str(getattr(mine, name)))
    settings = ServerSettings(metrics_port=None, tls=mutual)
    async with GrpcServer(settings, []) as server, tls.channel(server.address) as channel:
        await server.ready()
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == SERVING
        issue(tmp_path / "client", authority, key=False)
        assert await health_of(channel, "") == SERVING
        for folder in ("server", "client"):
            issue(tmp_path / folder, other)
        assert await health_of(channel, "") == SERVING
        server.stop()
        await server.until_stopped()
        assert (await watching.read()).status != SERVING  # on the connection of before


async def test_a_client_that_is_closed_leaves_no_connection_of_before_open(
    tmp_path: Path, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = issue(tmp_path, authority)
    monkeypatch.setenv("MESHRL_TLS_CA", str(mine.ca))
    settings = ServerSettings(metrics_port=None, tls=mine)
    async with GrpcServer(settings, []) as server:
        channel = tls.channel(server.address)
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watching.read()
        issue(tmp_path, authority)
        await health_of(channel, "")
        await channel.close(None)
        assert await watching.code() is grpc.StatusCode.CANCELLED
