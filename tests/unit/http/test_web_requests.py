"""Requests from web pages of other sites are refused, whatever they ask for; programs are served."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from meshrl.common.sockets import Certificates
from meshrl.http.common import problem
from meshrl.http.gateway.answers import refusal
from meshrl.rpc.http_server import serving_http
from meshrl.rpc.web_origin import hosts_of

FORM = {"content-type": "multipart/form-data; boundary=b"}
JSON = {"content-type": "application/json"}


def echo() -> FastAPI:
    app = FastAPI()

    @app.api_route("/", methods=["GET", "POST"])
    async def root(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving_http(
            echo(), "127.0.0.1", 0, Certificates(), allowed_hosts=["mesh.example"], refuse=problem
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:7903"},
        {"host": "localhost.evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "127.0.0.1@evil.example"},
        {"host": ""},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "[::1"},
    ],
    ids=str,
)
async def test_a_page_of_another_site_can_neither_read_nor_change_anything(
    client: httpx.AsyncClient, method: str, headers: dict[str, str]
) -> None:
    answer = await client.request(method, "/", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["code"] == "forbidden"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:5", "10.1.2.3"])
async def test_names_of_this_machine_and_addresses_are_served(
    client: httpx.AsyncClient, host: str
) -> None:
    assert (await client.get("/", headers={"host": host})).status_code == 200
    assert (await client.get("/", headers={"host": "mesh.example:80"})).status_code == 200


def test_a_server_on_all_addresses_answers_to_the_name_of_its_machine() -> None:
    assert socket.gethostname().lower() in hosts_of("0.0.0.0")
    assert hosts_of("10.0.0.1", ["Mesh.Example."]) == {"localhost", "10.0.0.1", "mesh.example"}


async def test_a_host_that_is_sent_twice_is_refused(client: httpx.AsyncClient) -> None:
    twice: Any = [("host", "localhost"), ("origin", "null"), ("origin", str(client.base_url))]
    assert (await client.get("/", headers=twice)).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        (FORM, 415),
        (FORM | {"authorization": "Bearer mrl_"}, 415),
        (FORM | {"sec-fetch-site": "same-origin"}, 415),
        (JSON, 200),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
    ids=str,
)
async def test_a_body_must_say_what_it_is(
    client: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    assert (await client.post("/", content=b"{}", headers=headers)).status_code == status


async def test_json_of_the_servers_own_page_and_a_request_without_a_body_are_served(
    client: httpx.AsyncClient,
) -> None:
    own = JSON | {"origin": str(client.base_url).rstrip("/")}
    assert (await client.post("/", content=b"{}", headers=own)).status_code == 200
    assert (await client.post("/")).status_code == 200


async def test_the_gateway_refuses_in_the_format_of_its_clients() -> None:
    async with (
        serving_http(echo(), "127.0.0.1", 0, Certificates(), refuse=refusal) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
    ):
        answer = await client.get("/", headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
