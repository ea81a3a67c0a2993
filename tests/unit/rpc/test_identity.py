"""Every method of every service asks who calls; the table of methods and roles decides, and knows every method."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pkgutil
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import meshrl.v1
from meshrl.common.sockets import Certificates
from meshrl.contract.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    ForbiddenError,
    MeshError,
    UnauthenticatedError,
    UserError,
)
from meshrl.rpc import credentials, tls
from meshrl.rpc.clients.operators import QueueAdminClient
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.clients.services import RolloutClient, TrainerClient
from meshrl.rpc.credentials import Credential, MeshRole, ensure_credentials, new_token
from meshrl.rpc.identity import (
    CLAIM,
    METHODS,
    METRICS,
    TOKENS,
    Identity,
    Presented,
    RateLimit,
    TokenStore,
)
from meshrl.rpc.runtime import GrpcServer, ServerSettings, require_loopback
from meshrl.weights.fleet import fetch_fleet

from ...certificates import issue

REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def methods() -> dict[str, MethodDescriptor]:
    """Every method of every service, as the generated code describes it."""
    found = {}
    for module in pkgutil.iter_modules(meshrl.v1.__path__):
        if not module.name.endswith("_pb2"):
            continue
        descriptor = importlib.import_module(f"meshrl.v1.{module.name}").DESCRIPTOR
        for service in descriptor.services_by_name.values():
            found |= {f"/{service.full_name}/{method.name}": method for method in service.methods}
    return found


class AnswersAll:
    """A servicer that has all methods of one service and answers each with an empty message."""

    waits: frozenset[str] = frozenset()

    def __init__(self, service: str, called: list[str]) -> None:
        self.service = service
        self._called = called

    def attach(self, server: grpc.aio.Server) -> None:
        handlers = {}
        for name, method in methods().items():
            if name.startswith(f"/{self.service}/"):
                handlers[method.name] = self._handler(name, method)
        generic = grpc.method_handlers_generic_handler(self.service, handlers)
        server.add_generic_rpc_handlers((generic,))

    def _handler(self, name: str, method: MethodDescriptor) -> object:
        async def one(request: object, context: object) -> bytes:
            self._called.append(name)
            return b""

        async def many(request: object, context: object) -> AsyncIterator[bytes]:
            self._called.append(name)
            yield b""

        asks = "stream" if method.client_streaming else "unary"
        if method.server_streaming:
            return getattr(grpc, f"{asks}_stream_rpc_method_handler")(many)
        return getattr(grpc, f"{asks}_unary_rpc_method_handler")(one)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ensure_credentials(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(credentials.TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv(credentials.FILE_VARIABLE, raising=False)
    credentials.use(None)
    yield
    credentials.use(None)


@asynccontextmanager
async def serving(run_dir: Path, called: list[str] | None = None) -> AsyncIterator[GrpcServer]:
    settings = ServerSettings(
        metrics_port=None, drain_grace_s=0, verifiers=credentials.verifiers_file(run_dir)
    )
    services = sorted({name.split("/")[1] for name in methods()})
    servicers = [AnswersAll(service, [] if called is None else called) for service in services]
    async with GrpcServer(settings, servicers) as server:
        yield server


async def status(channel: grpc.aio.Channel, name: str, token: str | None) -> grpc.StatusCode:
    """The status of a call with empty messages."""
    method = methods().get(name)
    asks, answers = (method.client_streaming, method.server_streaming) if method else (True, True)
    kind = f"{'stream' if asks else 'unary'}_{'stream' if answers else 'unary'}"
    metadata = None if token is None else (("authorization", f"Bearer {token}"),)
    request = iter([b""]) if asks else b""
    call = getattr(channel, kind)(name)(request, metadata=metadata, timeout=60)
    try:
        if answers:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def token_of(run_dir: Path, role: MeshRole) -> str:
    return credentials.file_of_role(run_dir, role).read_text().strip()


def roles_of(
    identity: Identity, authorization: str, names: Sequence[str] | None = None
) -> frozenset[MeshRole]:
    return identity.principal(Presented(authorization=authorization, names=names)).roles


def test_every_method_of_every_service_is_in_the_table_and_nothing_else_is() -> None:
    assert len(methods()) > 40
    assert set(METHODS) == {*methods(), REFLECTION}


async def test_each_role_may_call_its_methods_and_no_other(run_dir: Path) -> None:
    tokens = {role: token_of(run_dir, role) for role in MeshRole}
    async with serving(run_dir) as server, grpc.aio.insecure_channel(server.address) as channel:
        for name in METHODS:
            for role, token in tokens.items():
                code = await status(channel, name, token)
                if role in METHODS[name]:
                    assert code not in REFUSALS, (name, role)
                else:
                    assert code is grpc.StatusCode.PERMISSION_DENIED, (name, role)


async def test_the_rollout_credential_acquires_no_run(run_dir: Path) -> None:
    called: list[str] = []
    credential = Credential(token_of(run_dir, MeshRole.ROLLOUT))
    async with (
        serving(run_dir, called) as server,
        QueueClient(server.address, retry_s=0, credential=credential) as queue,
    ):
        with pytest.raises(ForbiddenError, match=r"/Acquire is for operator, trainer; .* rollout"):
            await queue.acquire("a", "me")
    assert called == []


async def test_a_call_without_a_credential_of_this_run_reaches_no_method(
    run_dir: Path, tmp_path: Path
) -> None:
    session_key = secrets.token_urlsafe(32)  # as a gateway makes it: of no use elsewhere
    another, _ = new_token()
    called: list[str] = []
    async with (
        serving(run_dir, called) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for name in METHODS:
            for token in (None, another, session_key):
                code = await status(channel, name, token)
                assert code is grpc.StatusCode.UNAUTHENTICATED, (name, token)
    assert called == []


async def test_health_asks_nobody(run_dir: Path) -> None:
    async with serving(run_dir) as server, grpc.aio.insecure_channel(server.address) as channel:
        await server.ready()
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async for seen in stub.Watch(health_pb2.HealthCheckRequest(), timeout=60):
            assert seen.status == health_pb2.HealthCheckResponse.SERVING
            break


async def test_a_method_that_is_not_in_the_table_is_refused_to_everybody(run_dir: Path) -> None:
    identity = Identity(credentials.verifiers_file(run_dir))
    operator = Presented(authorization=f"Bearer {token_of(run_dir, MeshRole.OPERATOR)}")
    with pytest.raises(ForbiddenError, match="is for nobody"):
        identity.admit("/meshrl.v1.Queue/Unknown", operator)


async def test_every_kind_of_call_of_the_clients_presents_the_credential(run_dir: Path) -> None:
    credentials.use_run_directory(run_dir)
    called: list[str] = []
    async with serving(run_dir, called) as server:
        async with RolloutClient(server.address, retry_s=0) as rollout:
            with pytest.raises(CorruptError, match="version is missing"):  # the empty message
                await rollout.stats()
        async with QueueAdminClient(server.address, retry_s=0) as admin:
            with pytest.raises(MeshError, match="format"):
                async for _ in admin.export():
                    pass
        async with TrainerClient(server.address, retry_s=0) as trainer:
            with pytest.raises(CorruptError, match="version is missing"):
                async for _ in trainer.watch():
                    pass
        await fetch_fleet(server.address, 60)
        async with QueueClient(server.address, retry_s=0) as queue:
            await queue.close_feed("a")
        channel = tls.blocking_channel(server.address)
        renewal = channel.unary_unary("/meshrl.v1.Queue/Renew").future(b"", timeout=60)
        await asyncio.to_thread(renewal.result)
        channel.close()
    names = {name.rpartition("/")[2] for name in called}
    assert names == {"GetStats", "Backup", "Watch", "Fleet", "CloseFeed", "Renew"}


def test_credentials_are_private_and_made_once(tmp_path: Path) -> None:
    threads = [threading.Thread(target=ensure_credentials, args=(tmp_path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = tmp_path / "credentials"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*MeshRole, "verifiers.json"])
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["credentials"]
    verifiers = (folder / "verifiers.json").read_text()
    for role in MeshRole:
        assert token_of(tmp_path, role) not in verifiers
        identity = Identity(folder / "verifiers.json")
        assert roles_of(identity, f"Bearer {token_of(tmp_path, role)}") == {role}


def test_a_run_from_before_a_role_gets_it_and_keeps_the_others(tmp_path: Path) -> None:
    ensure_credentials(tmp_path)
    file = credentials.verifiers_file(tmp_path)
    verifiers = json.loads(file.read_text())
    trainer, was = token_of(tmp_path, MeshRole.TRAINER), token_of(tmp_path, MeshRole.AGENT)
    del verifiers["agent"]  # as after a kill between the two files: this token is nobody's
    verifiers["reader"] = []  # withdrawn by hand
    file.write_text(json.dumps(verifiers))
    threads = [threading.Thread(target=ensure_credentials, args=(tmp_path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    identity = Identity(file)
    agent = token_of(tmp_path, MeshRole.AGENT)
    assert agent != was and roles_of(identity, f"Bearer {agent}") == {MeshRole.AGENT}
    assert roles_of(identity, f"Bearer {trainer}") == {MeshRole.TRAINER}
    assert json.loads(file.read_text())["reader"] == []
    folder = file.parent
    assert sorted(path.name for path in folder.iterdir()) == sorted([*MeshRole, "verifiers.json"])
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_loose_credential_is_refused_and_a_loose_directory_is_closed(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = credentials.file_of_role(run_dir, MeshRole.TRAINER)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        Credential(file)
    file.chmod(0o440)
    assert Credential(file).metadata() == (
        ("authorization", f"Bearer {token_of(run_dir, MeshRole.TRAINER)}"),
    )
    file.parent.chmod(0o755)
    ensure_credentials(run_dir)
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [record for record in caplog.messages if "now only its owner may enter" in record]


def test_changed_files_count_without_a_restart(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(credentials.time, "monotonic", lambda: now[0])
    verifiers = credentials.verifiers_file(run_dir)
    identity = Identity(verifiers)
    credential = Credential(credentials.file_of_role(run_dir, MeshRole.TRAINER))
    ((_, before),) = credential.metadata()
    token, digest = new_token()
    verifiers.write_text(json.dumps({"trainer": [digest]}))
    credentials.file_of_role(run_dir, MeshRole.TRAINER).write_text(token)
    assert roles_of(identity, before) == {MeshRole.TRAINER}  # looked at once a second
    now[0] += 1.0
    assert credential.metadata() == (("authorization", f"Bearer {token}"),)
    assert roles_of(identity, f"Bearer {token}") == {MeshRole.TRAINER}
    with pytest.raises(UnauthenticatedError):
        roles_of(identity, before)
    verifiers.write_text("{")
    now[0] += 1.0
    assert roles_of(identity, f"Bearer {token}") == {MeshRole.TRAINER}  # a broken file: as before


def test_a_certificate_names_a_role_and_a_credential_beside_it_only_narrows_it(
    run_dir: Path,
) -> None:
    roles = {"spiffe://mesh/rollout": MeshRole.ROLLOUT, "admin": MeshRole.OPERATOR}
    identity = Identity(credentials.verifiers_file(run_dir), certificates=roles)
    trainer = f"Bearer {token_of(run_dir, MeshRole.TRAINER)}"
    assert roles_of(identity, "", ["rollout-3", "spiffe://mesh/rollout"]) == {MeshRole.ROLLOUT}
    assert roles_of(identity, trainer, ["admin"]) == {MeshRole.TRAINER}
    assert roles_of(identity, trainer, ["spiffe://mesh/rollout"]) == frozenset()
    for authorization in ("", trainer):
        with pytest.raises(ForbiddenError, match="certificate of stranger has no role here"):
            roles_of(identity, authorization, ["stranger"])
    unnamed = Identity(credentials.verifiers_file(run_dir))
    assert roles_of(unnamed, trainer, ["stranger"]) == {MeshRole.TRAINER}
    with pytest.raises(ForbiddenError, match=r"name it in tls\.roles"):
        roles_of(unnamed, "", ["stranger"])


REWARDS = "/meshrl.v1.RewardRegistry"
OF_WORD = {
    "read": {METRICS, *(name for name, roles in METHODS.items() if MeshRole.READER in roles)},
    "submit": {f"{REWARDS}/SubmitReward"},
    "operate": {f"{REWARDS}/RollBackReward", f"{REWARDS}/RetireReward"},
    "claim": {CLAIM},
}


def test_a_word_of_a_tokens_file_allows_its_methods_and_includes_no_other_word(
    run_dir: Path,
) -> None:
    assert set(TOKENS) == set(OF_WORD)
    made = {word: new_token() for word in OF_WORD}
    file = run_dir / "tokens.yaml"
    file.touch(0o600)
    lines = [
        {"name": f"who-may-{word}", "roles": [word], "sha256": digest}
        for word, (_, digest) in made.items()
    ]
    file.write_text(json.dumps({"tokens": lines}))
    reader = {"ann": MeshRole.READER}
    for certificates, names in ((None, None), (reader, ["ann"])):
        identity = Identity(
            credentials.verifiers_file(run_dir), certificates=certificates, tokens=TokenStore(file)
        )
        for word, methods in OF_WORD.items():
            shown = Presented(authorization=f"Bearer {made[word][0]}", names=names)
            for method in (*METHODS, METRICS, CLAIM):
                allowed = method in methods and (names is None or word == "read")
                try:
                    assert identity.admit(method, shown).name == f"who-may-{word}"
                    assert allowed, (word, method, names)
                except ForbiddenError:
                    assert not allowed, (word, method, names)


def test_who_is_not_known_is_counted_by_address_and_who_is_by_name(run_dir: Path) -> None:
    method = f"{REWARDS}/ListRewards"
    identity = Identity(
        credentials.verifiers_file(run_dir), rates={method: [RateLimit("requests", 2)]}
    )
    refused: list[tuple[str, str]] = []
    identity.refused = lambda name, shown, error: refused.append((shown.peer, error.code))
    reader = f"Bearer {token_of(run_dir, MeshRole.READER)}"
    for peer in ("10.0.0.1", "10.0.0.2"):
        for _ in range(2):
            with pytest.raises(UnauthenticatedError):
                identity.admit(method, Presented(authorization="Bearer guess", peer=peer))
        with pytest.raises(CapacityError):
            identity.admit(method, Presented(authorization="Bearer guess", peer=peer))
        assert identity.admit(method, Presented(authorization=reader, peer=peer)).peer == peer
    with pytest.raises(CapacityError, match="more than 2 requests a minute"):
        identity.admit(method, Presented(authorization=reader, peer="10.0.0.3"))
    codes = ["unauthenticated", "unauthenticated", "capacity"]
    assert [code for _, code in refused] == [*codes, *codes, "capacity"]


async def test_over_mutual_tls_the_certificate_says_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    mine = issue(tmp_path / "queue", authority, "queue")
    assert mine.cert is not None
    settings = ServerSettings(
        metrics_port=None,
        drain_grace_s=0,
        tls=Certificates(cert=mine.cert, key=mine.key, client_ca=mine.ca),
        certificate_roles={"worker": MeshRole.ROLLOUT},
    )
    wanted = {
        "worker": {"Lease": grpc.StatusCode.OK, "Acquire": grpc.StatusCode.PERMISSION_DENIED},
        "stranger": dict.fromkeys(("Lease", "Acquire"), grpc.StatusCode.PERMISSION_DENIED),
    }
    async with GrpcServer(settings, [AnswersAll("meshrl.v1.Queue", [])]) as server:
        for name, codes in wanted.items():
            theirs = issue(tmp_path / name, authority, name)
            for file in ("ca", "cert", "key"):
                monkeypatch.setenv(f"MESHRL_TLS_{file.upper()}", str(getattr(theirs, file)))
            async with tls.channel(server.address) as channel:
                for method, code in codes.items():
                    assert await status(channel, f"/meshrl.v1.Queue/{method}", None) is code


def test_beyond_loopback_a_server_needs_certificates_or_an_explicit_choice(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verifiers = credentials.verifiers_file(run_dir)
    given: Mapping[str, object] = {"host": "0.0.0.0", "verifiers": verifiers}
    with pytest.raises(UserError, match="not encrypted"):
        require_loopback(ServerSettings.model_validate(given))
    encrypted = Certificates(cert=Path("c"), key=Path("k"))
    require_loopback(ServerSettings.model_validate({**given, "tls": encrypted}))
    with pytest.raises(UserError, match="not authenticated"):
        require_loopback(ServerSettings(host="0.0.0.0", tls=encrypted))
    assert not caplog.messages
    require_loopback(ServerSettings.model_validate({**given, "allow_insecure_bind": True}))
    assert any("INSECURE" in line for line in caplog.messages)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_metrics_ask_too(run_dir: Path, host: str) -> None:
    settings = ServerSettings(
        host=host,
        drain_grace_s=0,
        allow_insecure_bind=True,
        verifiers=credentials.verifiers_file(run_dir),
    )

    async with GrpcServer(settings, []) as server:

        def read(token: str | None) -> int:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            url = f"http://127.0.0.1:{server.metrics_port}/metrics"
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(url, headers=headers), timeout=60
                ) as answer:
                    assert b"python_info" in answer.read()
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                error.close()
                return error.code

        assert await asyncio.to_thread(read, None) == 401
        rollout = token_of(run_dir, MeshRole.ROLLOUT)
        assert await asyncio.to_thread(read, rollout) == 403
        reader = token_of(run_dir, MeshRole.READER)
        assert await asyncio.to_thread(read, reader) == 200


def test_a_credential_is_one_word(tmp_path: Path) -> None:
    for text in ("", "two words", "ünïcode"):
        with pytest.raises(ConfigError, match="one word"):
            Credential(text)
    with pytest.raises(ConfigError, match="No such file"):
        Credential(tmp_path / "absent")


def test_a_service_presents_its_role_and_no_process_that_it_starts_inherits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    credentials.open_run_directory(run_dir)
    told = credentials.service_environment(run_dir, "rollout")
    monkeypatch.setenv(credentials.TOKEN_VARIABLE, "of whoever started it")
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert not any(token_of(run_dir, role) in str(told) for role in MeshRole)
    credentials.use_for_service(
        run_dir,
        "rollout",
        credential_file=Path(told[credentials.FILE_VARIABLE]),
        verifiers=Path(told[credentials.VERIFIERS_VARIABLE]),
    )
    assert not [name for name in credentials.PRIVATE if name in os.environ]
    presented = credentials.in_use()
    assert presented is not None
    ((_, authorization),) = presented.metadata()
    assert authorization == f"Bearer {token_of(run_dir, MeshRole.ROLLOUT)}"
    assert credentials.verifiers_in_use() == credentials.verifiers_file(run_dir)


def test_a_run_from_before_gets_credentials_and_is_closed_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    credentials.use_for_service(tmp_path, "queue")
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert caplog.messages == [
        f"{tmp_path} was open to other users (mode 755): now only its owner may enter"
    ]
    assert credentials.in_use() is None  # the queue calls nobody
    caplog.clear()
    credentials.use_for_service(tmp_path, "deduplication")
    presented = credentials.in_use()
    assert presented is not None and presented.path is not None
    assert presented.path.name == "stage"
    assert not caplog.messages
