"""Calls to this machine and the proxies of a company's environment; connections that are ended."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from meshrl.common.sockets import disconnect, join_address, reach_directly
from meshrl.rewardd.client import RewardClient

LOOPBACK = "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    "name", ["http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "grpc_proxy"]
)
def test_calls_to_this_machine_go_through_no_proxy(name: str) -> None:
    environment = {name: "http://proxy:3128"}
    reach_directly(environment)
    assert environment == {name: "http://proxy:3128", "no_proxy": LOOPBACK, "NO_PROXY": LOOPBACK}


def test_what_is_spared_already_stays_in_both_spellings() -> None:
    environment = {"http_proxy": "p", "no_proxy": "a.local, ::1", "NO_PROXY": "b.local"}
    for _ in range(2):
        reach_directly(environment)
        assert environment["no_proxy"] == environment["NO_PROXY"]
        assert environment["NO_PROXY"] == "a.local,::1,b.local,localhost,127.0.0.1"


@pytest.mark.parametrize(
    "environment",
    [{"NO_PROXY": "a"}, {"http_proxy": "", "PATH": "/bin"}, {"HTTP_PROXY": "p", "NO_PROXY": "*"}],
)
def test_an_environment_that_needs_nothing_stays_as_it_is(environment: dict[str, str]) -> None:
    before = dict(environment)
    reach_directly(environment)
    assert environment == before


def test_clients_of_the_mesh_s_http_services_use_no_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "")
    for url in ("http://rewards:8800/v1", "https://rewards:8800/v1"):
        with RewardClient(url) as direct, RewardClient(url, through_proxies=True) as told:
            asked = httpx.URL(url)
            assert direct._http._transport_for_url(asked) is direct._http._transport
            assert told._http._transport_for_url(asked) is not told._http._transport


def test_a_connection_is_ended_and_no_descriptor_stays_open(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
        socket.create_connection(listener.getsockname()) as other,
        listener.accept()[0],
        listener.accept()[0],
        (tmp_path / "file").open("w"),
    ):
        before = set(Path("/dev/fd").iterdir())
        for _ in range(3):
            disconnect([join_address(*caller.getsockname())])
        assert set(Path("/dev/fd").iterdir()) == before
        assert caller.recv(1) == b""
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
