"""The reward registry over HTTP and gRPC: roles, rate limits, the audit log, and malformed requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from meshrl.common.sockets import Certificates
from meshrl.contract import errors
from meshrl.contract.types import Sample, Uid
from meshrl.http.common import problem
from meshrl.http.rewards.app import build_app
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.registry.building import open_registry
from meshrl.rewardd.registry.registry import Registry
from meshrl.rewardd.registry.types import Case, Submission
from meshrl.rpc.audit_log import AuditedChanges, RewardAuditLog
from meshrl.rpc.clients.operators import RewardRegistryClient
from meshrl.rpc.credentials import MeshRole, new_token
from meshrl.rpc.http_server import serving_http
from meshrl.rpc.identity import TokenStore, registry_rates
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import RewardRegistryServicer, RewardServicer
from meshrl.sandbox.sandbox import no_bubblewrap
from meshrl.v1 import reward_registry_pb2 as pb

from ..certificates import issue

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
MAX_BODY = 100_000
ROLES = {"reader": ["read"], "writer": ["submit"], "boss": ["read", "submit", "operate"]}


def source(score: float) -> str:
    return HEAD + f"    return {score}\n"


@dataclass
class Service:
    registry: Registry
    http: str
    grpc: str
    audit: Path
    tokens: dict[str, str]

    def client(self, who: str = "") -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.tokens[who]}"} if who else {}
        return httpx.AsyncClient(base_url=self.http, headers=headers, timeout=60)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


def write_tokens(path: Path) -> dict[str, str]:
    new = {name: new_token() for name in ROLES}
    entries = [{"name": n, "roles": ROLES[n], "sha256": digest} for n, (_, digest) in new.items()]
    path.touch(0o600)
    path.write_text(yaml.safe_dump({"tokens": entries}))
    return {name: token for name, (token, _) in new.items()}


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    closed: bool = False,
    tls: Certificates | None = None,
    verifiers: Path | None = None,
    roles: Mapping[str, MeshRole] | None = None,
    **rates: float,
) -> AsyncIterator[Service]:
    base = directory / "base.py"
    base.write_text(source(-1))
    tokens = write_tokens(directory / "tokens.yaml") if closed else {}
    config = RewardConfig.model_validate(
        {
            "custom_reward_function": {"path": base},
            "deadline_s": 5,
            "registry": {"max_versions": 20},
            "sandbox": "weak" if no_bubblewrap() else "strict",
        }
    )
    store = TokenStore(directory / "tokens.yaml") if closed else None
    limits = {"requests": 1e6, "submissions": 1e6, **rates}
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(open_registry(config, directory / "rewards"))
        audit = RewardAuditLog(directory / "rewards" / "audit.jsonl")
        stack.callback(audit.close)
        changes = AuditedChanges(registry, audit)
        server_settings = ServerSettings(
            metrics_port=None,
            drain_grace_s=1,
            tls=tls or Certificates(),
            certificate_roles=roles or {},
            verifiers=verifiers,
        )
        identity = server_settings.identity(store, registry_rates(**limits))
        identity.refused = audit.refused
        servicers = [
            RewardServicer(registry.judge, registry.judge),
            RewardRegistryServicer(registry, changes),
        ]
        server = await stack.enter_async_context(
            GrpcServer(server_settings, servicers, identity=identity)
        )
        await server.ready()
        app = build_app(registry, changes, identity, MAX_BODY)
        address = await stack.enter_async_context(
            serving_http(app, "127.0.0.1", 0, server_settings.tls, refuse=problem)
        )
        path = directory / "rewards" / "audit.jsonl"
        yield Service(registry, address, server.address, path, tokens)


def sample(solution: str) -> Sample:
    return Sample(
        uid=Uid("run", "t", 0), data_source="", solution=solution, ground_truth=None, extra_info={}
    )


async def test_a_reward_lives_through_http_from_submission_to_retirement(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, service.client() as http:
        body = {
            "name": "reward",
            "source": source(1),
            "tests": [{"solution": "x", "score": 1}],
            "limits": {"deadline_s": 2, "memory_bytes": 5e8},
        }
        first = await http.post("/v1/rewards", json=body)
        assert (first.status_code, first.json()["created"], first.json()["tests"]) == (201, True, 1)
        body |= {"source": source(2), "tests": [], "note": "better", "limits": {"processes": 4}}
        second = await http.post("/v1/rewards", json=body)
        assert second.status_code == 201
        one, two = first.json()["hash"], second.json()["hash"]
        listed = (await http.get("/v1/rewards")).json()
        assert (listed["scoring"], listed["followed"]) == (two, "reward")
        name = (await http.get("/v1/rewards/reward")).json()
        assert (name["current"], name["versions"]) == (two, [one, two])
        shown = (await http.get(f"/v1/rewards/reward/versions/{one[:8]}")).json()
        assert (shown["source"], shown["hash"]) == (source(1), one)
        assert shown["limits"] == {"deadline_s": 2, "memory_bytes": 5e8}
        newest = (await http.get("/v1/rewards/reward/versions/current")).json()
        assert newest["limits"] == {"processes": 4}
        diff = await http.get("/v1/rewards/reward/diff", params={"old": one})
        assert diff.text.splitlines()[-2:] == ["-    return 1", "+    return 2"]
        tried = await http.post(
            "/v1/rewards/reward/score", json={"samples": [{"solution": "x"}], "version": one}
        )
        assert [(s["score"], s["reward_hash"]) for s in tried.json()] == [(1.0, one)]
        compared = await http.post(
            "/v1/rewards/reward/compare", json={"a": one, "samples": [{"solution": "x"}]}
        )
        assert compared.json()["largest"] == [
            {"uid": "try/sample/0.0", "a": 1.0, "b": 2.0, "text": "x"}
        ]
        back = await http.post("/v1/rewards/reward/rollback", json={})
        assert back.json()["current"] == one
        gone = await http.post("/v1/rewards/reward/retire", json={"version": two})
        assert gone.json()["retired"] == [two]
        assert (await http.get("/health")).json() == {"status": "serving", "scoring": one}
        done = [(e["action"], e["hash"], e["result"]) for e in service.lines()]
    assert done == [
        ("submit", one, "done"),
        ("submit", two, "done"),
        ("roll_back", one, "done"),
        ("retire", two, "done"),
    ]


async def test_a_refusal_is_problem_json_with_the_line(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, service.client() as http:

        async def refused(**body: Any) -> tuple[int, str, str]:
            answer = await http.post("/v1/rewards", json={"name": "reward", **body})
            assert answer.headers["content-type"] == "application/problem+json"
            problem = answer.json()
            assert problem["status"] == answer.status_code
            return answer.status_code, problem["code"], problem["detail"]

        assert await refused(source="def f(:\n") == (
            422,
            "user",
            "the source, line 1: invalid syntax",
        )
        failing = [{"solution": "x", "score": 9}]
        status, code, detail = await refused(source=source(1), tests=failing)
        assert (status, code) == (422, "user")
        assert detail.startswith("test 0 failed: the score is 1, expected 9")
        status, _, detail = await refused(source=source(1), extra=3)
        assert (status, detail) == (422, "extra: Extra inputs are not permitted")
        missing = await http.get("/v1/rewards/nobody")
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
        large = await http.post("/v1/rewards", json={"name": "reward", "source": "#" * MAX_BODY})
        assert (large.status_code, large.json()["code"]) == (413, "capacity")

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(MAX_BODY // 1000 + 2):
                yield b" " * 1000

        kind = {"content-type": "application/json"}
        streamed = await http.post("/v1/rewards", content=endless(), headers=kind)
        assert streamed.status_code == 413
        other = await http.post("/v1/rewards", content=b"x", headers={"content-type": "text/plain"})
        assert other.status_code == 415


async def test_grpc_does_the_same_as_http(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, RewardRegistryClient(service.grpc) as client:
        case = Case(solution="x", score=1.0, ground_truth={"a": [1]}, extra_info={"b": None})
        limits = {"deadline_s": 2.5}
        submission = Submission(name="reward", source=source(1), cases=(case,), limits=limits)
        accepted = await client.submit(submission)
        two = (await client.submit(Submission(name="reward", source=source(2)))).hash
        assert (accepted.created, accepted.cases) == (True, 1)
        names = await client.names()
        assert (names.scoring, names.followed, [n.name for n in names.names]) == (
            two,
            "reward",
            ["reward"],
        )
        shown = await client.get("reward", accepted.hash)
        assert (shown.content, dict(shown.limits)) == (source(1).encode(), limits)
        assert (await client.diff("reward", accepted.hash)).endswith("+    return 2\n")
        assert [s.score for s in await client.score("reward", "", [sample("x")] * 600)] == [
            2.0
        ] * 600
        found = await client.compare("reward", accepted.hash, two, [sample("x")])
        assert (found.mean_a, found.mean_b) == (1.0, 2.0)
        assert (await client.roll_back("reward")).current == accepted.hash
        assert two in (await client.retire("reward", two)).retired
        with pytest.raises(errors.ConflictError, match="was retired"):
            await client.roll_back("reward", two)
        with pytest.raises(errors.UserError, match="the source, line 1"):
            await client.submit(Submission(name="reward", source="def f(:\n"))
        with pytest.raises(
            errors.NotFoundError, match="no reward is called 'rewart'; did you mean"
        ):
            await client.get("rewart")


async def test_a_token_allows_what_its_roles_allow_and_no_token_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, closed=True) as service:
        body = {"name": "reward", "source": source(1)}
        async with service.client() as nobody:
            for answer in (
                await nobody.get("/v1/rewards"),
                await nobody.post("/v1/rewards", json=body),
            ):
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        async with service.client("reader") as reader:
            assert (await reader.get("/v1/rewards")).status_code == 200
            refused = await reader.post("/v1/rewards", json=body)
            assert refused.status_code == 403
            assert refused.json()["detail"] == "reader may not do this: it needs the role submit"
        async with service.client("writer") as writer:
            assert (await writer.post("/v1/rewards", json=body)).status_code == 201
            assert (await writer.get("/v1/rewards")).status_code == 403
            back = await writer.post("/v1/rewards/reward/rollback", json={})
            assert back.status_code == 403
        guess = {"Authorization": "Bearer mrl_guess"}
        async with httpx.AsyncClient(base_url=service.http, headers=guess) as guesser:
            assert (await guesser.get("/v1/rewards")).json()["code"] == "unauthenticated"
        assert [(e["who"], e["action"], e["result"]) for e in service.lines()] == [
            ("", "submit", "unauthenticated"),
            ("", "submit", "forbidden"),
            ("writer", "submit", "done"),
            ("", "roll_back", "forbidden"),
        ]
        secrets = "".join(path.read_text() for path in [service.audit, tmp_path / "tokens.yaml"])
        assert not any(token in secrets for token in service.tokens.values())
        assert stat.S_IMODE(service.audit.stat().st_mode) == 0o600


async def test_grpc_needs_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, closed=True) as service:
        async with RewardRegistryClient(service.grpc) as nobody:
            with pytest.raises(errors.UnauthenticatedError, match="needs a token"):
                await nobody.names()
        monkeypatch.setenv("MESHRL_TOKEN", service.tokens["writer"])
        async with RewardRegistryClient(service.grpc) as writer:
            await writer.submit(Submission(name="reward", source=source(1)))
            with pytest.raises(errors.ForbiddenError, match="needs the role read"):
                await writer.names()


async def test_a_token_can_be_revoked_while_the_service_runs(tmp_path: Path) -> None:
    async with serving(tmp_path, closed=True) as service, service.client("reader") as reader:
        assert (await reader.get("/v1/rewards")).status_code == 200
        (tmp_path / "tokens.yaml").write_text("tokens: [{name: }]")
        assert (await reader.get("/v1/rewards")).status_code == 200  # a broken file changes nothing
        (tmp_path / "tokens.yaml").write_text("tokens: []")
        assert (await reader.get("/v1/rewards")).status_code == 401


async def test_too_many_requests_are_refused_with_the_time_to_retry(tmp_path: Path) -> None:
    async with serving(tmp_path, requests=3) as service, service.client() as http:
        codes = [(await http.get("/v1/rewards")).status_code for _ in range(4)]
        assert codes == [200, 200, 200, 429]
        last = await http.get("/v1/rewards")
        assert int(last.headers["retry-after"]) >= 1
        assert (await http.get("/health")).status_code == 200


async def test_a_slow_submission_does_not_block_others(tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(2)\n" + source(1)
    async with serving(tmp_path) as service, service.client() as http:
        submitting = asyncio.create_task(
            http.post("/v1/rewards", json={"name": "slow", "source": slow})
        )
        await asyncio.sleep(0.1)
        assert (await http.get("/v1/rewards")).json()["names"] == []
        assert not submitting.done()
        assert (await submitting).status_code == 201


def mutual(directory: Path) -> Certificates:
    mine = issue(directory / "tls", trustme.CA())
    return replace(mine, client_ca=mine.ca)


async def test_mutual_tls_admits_only_clients_with_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssl

    tls = mutual(tmp_path)
    async with serving(tmp_path, tls=tls) as service:
        assert service.http.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(tls.ca))
        async with httpx.AsyncClient(base_url=service.http, verify=trusting) as stranger:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await stranger.get("/v1/rewards")
        trusting.load_cert_chain(str(tls.cert), str(tls.key))
        async with httpx.AsyncClient(base_url=service.http, verify=trusting) as known:
            assert (await known.get("/v1/rewards")).status_code == 200
        monkeypatch.setenv("MESHRL_TLS_CA", str(tls.ca))
        async with RewardRegistryClient(service.grpc, retry_s=0) as client:
            with pytest.raises(errors.UnavailableError):
                await client.names()
        monkeypatch.setenv("MESHRL_TLS_CERT", str(tls.cert))
        monkeypatch.setenv("MESHRL_TLS_KEY", str(tls.key))
        async with RewardRegistryClient(service.grpc, retry_s=0) as client:
            assert (await client.names()).followed == "reward"


async def test_a_certificate_may_do_over_either_server_what_its_role_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssl

    tls = mutual(tmp_path)
    body = {"name": "reward", "source": source(1)}
    trusting = ssl.create_default_context(cafile=str(tls.ca))
    trusting.load_cert_chain(str(tls.cert), str(tls.key))
    for file, variable in ((tls.ca, "CA"), (tls.cert, "CERT"), (tls.key, "KEY")):
        monkeypatch.setenv(f"MESHRL_TLS_{variable}", str(file))
    async with (
        serving(tmp_path, tls=tls, roles={"localhost": MeshRole.READER}) as service,
        httpx.AsyncClient(base_url=service.http, verify=trusting) as http,
        RewardRegistryClient(service.grpc, retry_s=0) as client,
    ):
        assert (await http.get("/v1/rewards")).status_code == 200
        assert (await http.post("/v1/rewards", json=body)).status_code == 403
        assert (await client.names()).followed == "reward"
        with pytest.raises(errors.ForbiddenError):
            await client.submit(Submission(name="reward", source=source(1)))


METHODS: dict[str, Callable[[bytes], Any]] = {
    "SubmitReward": pb.SubmitRewardRequest.FromString,
    "ListRewards": pb.ListRewardsRequest.FromString,
    "GetReward": pb.RewardRef.FromString,
    "DiffRewards": pb.RewardPair.FromString,
    "RollBackReward": pb.RewardRef.FromString,
    "RetireReward": pb.RewardRef.FromString,
    "TryReward": pb.TryRewardRequest.FromString,
    "CompareRewards": pb.CompareRewardsRequest.FromString,
}
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}


async def test_malformed_and_oversized_grpc_messages_end_as_errors_of_the_caller(
    tmp_path: Path,
) -> None:
    import random

    draw = random.Random(7)
    good = pb.SubmitRewardRequest(name="reward", source="def f(:", deps=["a"]).SerializeToString()
    seen: set[grpc.StatusCode] = set()
    async with serving(tmp_path) as service:
        big = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(service.grpc, options=big) as channel:
            calls = {
                name: channel.unary_unary(f"/meshrl.v1.RewardRegistry/{name}") for name in METHODS
            }
            for name, call in calls.items():
                spoiled = [bytes(draw.randrange(256) for _ in range(size)) for size in (1, 9, 60)]
                for _ in range(20):
                    cut = bytearray(good[: draw.randrange(1, len(good))])
                    cut[draw.randrange(len(cut))] = draw.randrange(256)
                    spoiled.append(bytes(cut))
                for data in spoiled:
                    try:
                        await call(data, timeout=30)
                    except grpc.aio.AioRpcError as error:
                        assert error.code() not in OURS, (name, data, error.details())
                        seen.add(error.code())
            with pytest.raises(grpc.aio.AioRpcError) as oversized:
                await calls["SubmitReward"](b"\n" * (65 << 20), timeout=60)
            assert oversized.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with RewardRegistryClient(service.grpc) as client:
            assert (await client.names()).scoring == service.registry.base
    assert grpc.StatusCode.INVALID_ARGUMENT in seen


async def test_no_valid_or_invalid_request_is_answered_5xx(
    tmp_path: Path,
) -> None:
    import schemathesis
    from schemathesis.generation import GenerationMode

    async with serving(tmp_path) as service, service.client() as http:
        await http.post("/v1/rewards", json={"name": "reward", "source": source(1)})
        document = (await http.get("/openapi.json")).json()
        schema = schemathesis.openapi.from_dict(document)
        schema.config.base_url = service.http
        answers: list[int] = []

        def fuzz() -> None:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                for found in schema.get_all_operations():
                    operation = found.ok()
                    strategy = operation.as_strategy(generation_mode=mode)
                    # What takes no input cannot be asked wrongly.
                    with contextlib.suppress(Unsatisfiable):
                        _ask(strategy, answers)

        await asyncio.to_thread(fuzz)
        assert (await http.get("/health")).status_code == 200
    assert [code for code in answers if code >= 500] == []
    assert len(answers) > 100
    assert {200, 404, 422} <= set(answers)


def _ask(strategy: Any, answers: list[int]) -> None:
    @seed(1)
    @settings(
        max_examples=6,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def ask(case: Any) -> None:
        answers.append(case.call(timeout=30).status_code)

    ask()


@given(text=st.text(max_size=200))
@settings(max_examples=50, database=None, derandomize=True)
def test_any_authorization_header_is_either_refused_or_known(text: str) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as directory:
        tokens = write_tokens(Path(directory) / "tokens.yaml")
        store = TokenStore(Path(directory) / "tokens.yaml")
        assert store.find(f"Bearer {tokens['boss']}").name == "boss"
        with pytest.raises(errors.UnauthenticatedError):
            store.find(text)
