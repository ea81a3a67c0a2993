"""No client of ours takes a secret to another machine unencrypted, unless the network is said to be trusted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from meshrl.common import sockets
from meshrl.contract.errors import UserError
from meshrl.rewardd.judges.http import Config as HttpJudge
from meshrl.rollout.server_engine.http import HttpClient
from meshrl.rollout.tools.mcp_servers import _http
from meshrl.rollout.tools.ports import SearchConfig, ToolConfig
from meshrl.rollout.tools.search import Retriever
from meshrl.transferqueue.stores._redis_connection import RedisConnection

Client = Callable[[str], Awaitable[None]]


async def engine(host: str) -> None:
    client = HttpClient("vLLM", f"http://{host}:8000", key="k", silence_s=1, update_s=1)
    await client.close()


async def user_of_an_engine(host: str) -> None:
    client = HttpClient("vLLM", f"http://me:k@{host}:8000", key=None, silence_s=1, update_s=1)
    await client.close()


async def tool(host: str) -> None:
    config = ToolConfig(url=f"http://{host}:8000/mcp", headers={"X-Api-Key": "k"})
    async with _http(config):
        pass


async def retriever(host: str) -> None:
    Retriever(SearchConfig(url=f"http://me:k@{host}:8000/retrieve"))


async def retriever_with_a_query(host: str) -> None:
    Retriever(SearchConfig(url=f"http://{host}:8000/retrieve?n=3&api_key=mek@"))


async def tool_with_a_credential(host: str) -> None:
    async with _http(ToolConfig(url=f"http://{host}:8000/mcp", headers={"X-Credential": "k"})):
        pass


async def redis(host: str) -> None:
    RedisConnection([f"redis://:k@{host}:6379/0"])._client_of(f"redis://:k@{host}:6379/0")


async def redis_with_a_file(host: str) -> None:
    RedisConnection([f"redis://{host}:6379/0"], "k")._client_of(f"redis://{host}:6379/0")


CLIENTS = [
    engine,
    user_of_an_engine,
    tool,
    tool_with_a_credential,
    retriever,
    retriever_with_a_query,
    redis,
    redis_with_a_file,
]


@pytest.fixture(autouse=True)
def untrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_trusted", False)
    monkeypatch.delenv(sockets.TRUSTED_VARIABLE, raising=False)


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_secret_goes_to_no_other_machine_unencrypted(client: Client) -> None:
    with pytest.raises(
        UserError, match=r"would travel to .*//10\.1\.2\.3:.* unencrypted: use"
    ) as told:
        await client("10.1.2.3")
    assert "k@" not in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("client", CLIENTS)
async def test_it_stays_on_this_machine_or_goes_where_the_network_is_trusted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client("127.0.0.1")
    monkeypatch.setenv(sockets.TRUSTED_VARIABLE, "1")
    await client("10.1.2.3")


@pytest.mark.parametrize("headers", [{"X-Auth-Token": "k"}, {"Cookie": "k"}, {"api-key": "k"}, {}])
def test_a_judge_names_its_own_option(headers: dict[str, str]) -> None:
    user = "" if headers else "me:k@"
    config = HttpJudge(url=f"http://{user}10.1.2.3/score", headers=headers)
    assert config.tells_a_secret
    assert not config.model_copy(update={"allow_plain_http": True}).tells_a_secret
    assert not config.model_copy(update={"url": "https://me:k@10.1.2.3"}).tells_a_secret
