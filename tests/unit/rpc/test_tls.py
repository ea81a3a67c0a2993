"""No credential leaves the machine unencrypted, unless somebody has said that the network is trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshrl.cli.root import main
from meshrl.client import Queue
from meshrl.common import sockets
from meshrl.common.sockets import stays_here
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import AddressBook, ServiceAddress
from meshrl.launcher.service import is_serving
from meshrl.rpc import credentials, tls
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.credentials import Credential
from meshrl.rpc.interceptors import Behavior
from meshrl.rpc.runtime import GrpcServer, ServerSettings

HERE = ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/queue")
ELSEWHERE = (
    "10.0.0.1:1",
    "queue:1",
    "queue.example:1",
    "0.0.0.0:1",
    "[fe80::1]:1",
    "127.0.0.1.example:1",
    "localhost.example:1",
    "dns:///10.0.0.1:1",
    "ipv4:10.0.0.1:1",
    "127.0.0.1@10.0.0.1:1",
    "10.0.0.1",
)


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (sockets.TRUSTED_VARIABLE, tls.CA_VARIABLE, *credentials.PRIVATE):
        monkeypatch.delenv(name, raising=False)
    credentials.use(Credential("secret"))
    yield
    credentials.use(None)


@pytest.mark.parametrize("address", ELSEWHERE)
async def test_a_credential_goes_to_no_other_machine_unencrypted(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not stays_here(address)
    for open_channel in (tls.channel, tls.blocking_channel):
        with pytest.raises(UserError, match=r"unencrypted.*MESHRL_ALLOW_INSECURE_BIND=1"):
            open_channel(address)
    with pytest.raises(UserError, match="unencrypted"):
        QueueClient(address, credential=Credential("another"))
    monkeypatch.setenv(sockets.TRUSTED_VARIABLE, "0")
    with pytest.raises(UserError, match="unencrypted"):
        tls.channel(address)
    monkeypatch.setenv(sockets.TRUSTED_VARIABLE, "1")
    await tls.channel(address).close(None)


@pytest.mark.parametrize("address", HERE)
async def test_on_this_machine_nothing_need_be_said(address: str) -> None:
    assert stays_here(address)
    await tls.channel(address).close(None)


async def test_with_certificates_nothing_need_be_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = tmp_path / "ca"
    ca.write_bytes(trustme.CA().cert_pem.bytes())
    monkeypatch.setenv(tls.CA_VARIABLE, str(ca))
    await tls.channel("10.0.0.1:1").close(None)


async def test_who_shows_no_credential_may_call() -> None:
    credentials.use(None)
    await tls.channel("10.0.0.1:1").close(None)


async def test_a_program_is_told_when_it_connects() -> None:
    with pytest.raises(UserError, match="unencrypted"):
        async with Queue.connect("10.0.0.1:1"):
            pass


@pytest.mark.parametrize(
    "words",
    [
        ["ledger", "--queue", "10.0.0.1:1", "--run", "a"],
        ["status", "--queue", "10.0.0.1:1", "--run", "a"],
        ["fleet", "--trainer", "10.0.0.1:1"],
        ["fleet", "--trainer", "10.0.0.1:1", "drain", "rollout-0"],
        ["reward", "--reward", "10.0.0.1:1", "list"],
    ],
)
def test_a_command_says_so_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert (
        line.startswith("error: a credential would travel to 10.0.0.1:1") and line.count("\n") == 1
    )


async def test_health_is_asked_without_a_credential() -> None:
    shown: list[str] = []

    def seen(method: str, behavior: Behavior) -> Behavior:
        async def run(request: object, context: grpc.aio.ServicerContext) -> object:
            shown.extend(key for key, _ in context.invocation_metadata() or ())
            return await behavior(request, context)

        return run

    settings = ServerSettings(metrics_port=None, drain_grace_s=0)
    async with GrpcServer(settings, [], interceptors=[seen]) as server:
        await server.ready()
        entry = ServiceAddress(kind="", host="127.0.0.1", port=server.port, metrics_port=0)
        assert await is_serving(entry)
        assert "user-agent" in shown and "authorization" not in shown


async def test_a_proxy_of_the_environment_gets_no_unencrypted_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        for name in ("grpc_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv(sockets.TRUSTED_VARIABLE, "1")
        settings = ServerSettings(metrics_port=None, drain_grace_s=0)
        async with GrpcServer(settings, []) as there, tls.channel(there.address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=60
            )
    assert heard == []


def test_commands_of_a_run_are_told_what_up_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = AddressBook(run="a", recipe=tmp_path / "recipe.yaml", services={}, trusted_network=True)
    book.save(tmp_path / "mesh.json")
    assert AddressBook.load(tmp_path / "mesh.json").trusted_network
    (tmp_path / "mesh.json").write_text('{"run": "a", "recipe": "recipe.yaml", "services": {}}')
    assert not AddressBook.load(tmp_path / "mesh.json").trusted_network
    monkeypatch.setattr(sockets, "_trusted", False)
    assert not sockets.trusts_network()
    sockets.trust_network()
    assert sockets.trusts_network()
