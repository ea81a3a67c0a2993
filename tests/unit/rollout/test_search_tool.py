"""The tool `search`: passages of a folder, a retriever over HTTP and its faults, and Search-R1's format of a row."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.config import read_options
from meshrl.contract.errors import ConfigError, InfraError
from meshrl.contract.types import Json, Uid
from meshrl.rollout.programs import tools as program
from meshrl.rollout.tools.formats import search_r1
from meshrl.rollout.tools.ports import SearchConfig, ToolCall, ToolCaller, ToolsConfig
from meshrl.rollout.tools.search import passages, search_function
from meshrl.rollout.tools.toolbox import ToolBuilder
from tests.doubles.scripted import END, Scripted, task

from .chats import chat_tokenizer

TOKENIZER = chat_tokenizer()
UID = Uid("run", "t0", 0)


@asynccontextmanager
async def searching(options: Mapping[str, Any] | None = None, **search: Any) -> AsyncIterator[Any]:
    """From a query to what the policy observes."""
    config = read_options(
        ToolsConfig, {"tools": [{"search": search, **(options or {})}]}, where="o"
    )
    builder = ToolBuilder(config)
    tools = (await builder.toolbox()).of(task(TOKENIZER))

    async def ask(query: str) -> str:
        call = ToolCall(name="search", arguments={"query": query})
        return await tools.call(call, ToolCaller(task=task(TOKENIZER), uid=UID), TOKENIZER)

    try:
        yield ask
    finally:
        await builder.close()


async def found(query: str, options: Mapping[str, Any] | None = None, **search: Any) -> str:
    async with searching(options, **search) as ask:
        answer: str = await ask(query)
    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "towns.txt").write_text("Tirim lies at a lake.\n\n\nSanek has a tower.\n")
    people = [
        {"contents": "Belod\nborn in Sanek"},
        {"title": "Mira", "text": "born in Tirim by a lake"},
    ]
    (tmp_path / "more").mkdir()
    (tmp_path / "more/people.jsonl").write_text("\n".join(map(json.dumps, people)))
    (tmp_path / "ignored.csv").write_text("a,b")
    return tmp_path


def test_a_folder_is_read_as_passages_with_titles(folder: Path) -> None:
    assert list(passages(folder, "o")) == [
        ("Belod", "born in Sanek"),
        ("Mira", "born in Tirim by a lake"),
        ("towns", "Tirim lies at a lake."),
        ("towns", "Sanek has a tower."),
    ]


async def test_the_best_passages_are_shown_and_none_that_shares_no_word(folder: Path) -> None:
    pytest.importorskip("bm25s")
    assert await found("where was Belod born?", folder=str(folder), top_k=1) == (
        "Doc 1(Title: Belod) born in Sanek"
    )
    both = await found("LAKE", folder=str(folder))
    assert both.count("Doc ") == 2 and "Mira" in both and "Tirim lies" in both
    for nothing in ("zebra", "", "?!"):
        assert await found(nothing, folder=str(folder)) == ""


@pytest.mark.parametrize(
    ("line", "problem"), [("{}", "people.jsonl:3: no passage"), ("born", ":3: no passage")]
)
def test_a_line_that_is_no_passage_is_named(folder: Path, line: str, problem: str) -> None:
    with (folder / "more/people.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(ConfigError, match=problem):
        list(passages(folder, "o"))


def test_a_search_has_one_source_that_exists(tmp_path: Path) -> None:
    for options in ({}, {"folder": "a", "url": "b"}):
        with pytest.raises(ConfigError, match="exactly one of folder and url"):
            read_options(SearchConfig, options, where="o")
    with pytest.raises(ConfigError, match=r"tools\.0\.search\.folder: no such folder"):
        tool = {"search": {"folder": str(tmp_path / "gone")}}
        program.check(read_options(ToolsConfig, {"tools": [tool]}, where="o"))
    pytest.importorskip("bm25s")
    with pytest.raises(ConfigError, match="no passages in the files"):
        program.build({"tools": [{"search": {"folder": str(tmp_path)}}]})


def test_the_package_of_the_index_says_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("bm25s")
    caplog.set_level("DEBUG")
    search = search_function(SearchConfig(folder=folder), "o")
    assert search("lake") and not [each for each in caplog.records if each.name == "bm25s"]


@asynccontextmanager
async def retriever(
    status: int, answer: Json, asked: list[Json], ended: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """A server that gives every request one answer, or none: status 0. With `ended` it keeps connections."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.split("content-length: ")[1].split("\r\n")[0])
        asked.append(json.loads(await reader.readexactly(size)))
        body = json.dumps(answer).encode()
        close = "" if ended else "connection: close\r\n"
        said = f"HTTP/1.1 {status} x\r\n{close}content-length: {len(body)}\r\n\r\n"
        if status:
            writer.write(said.encode() + body)
            await writer.drain()
        if (ended or not status) and not await reader.read() and ended:
            ended.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/retrieve"


async def test_a_retriever_is_asked_as_search_r1_asks() -> None:
    hits = [[{"document": {"id": "7", "contents": '"Belod"\nborn in Sanek'}, "score": 2.5}]]
    asked: list[Json] = []
    async with retriever(200, {"result": hits}, asked) as url:
        assert await found("Belod", url=url, top_k=2) == "Doc 1(Title: Belod) born in Sanek"
    assert asked == [{"queries": ["Belod"], "topk": 2, "return_scores": True}]


@pytest.mark.parametrize(
    ("status", "answer"), [(500, {}), (200, {}), (200, {"result": [[{"document": {}}]]})]
)
async def test_a_retriever_that_fails_is_a_fault_and_no_observation(
    status: int, answer: Json
) -> None:
    async with retriever(status, answer, []) as url:
        with pytest.raises(InfraError, match=f"failed: HTTP {status}"):
            await found("Belod", url=url)


async def test_a_retriever_that_is_away_is_a_fault_and_a_refused_query_an_observation() -> None:
    async with retriever(422, {"detail": "too long"}, []) as url:
        assert "Error: the retriever refuses the query" in await found("Belod", url=url)
    with pytest.raises(InfraError, match="does not answer"):
        await found("Belod", url=url)


@pytest.mark.parametrize(
    ("turn", "query"),
    [
        ("I look. <search> a b </search>", "a b"),
        ("<search>a</search><search>b</search>", "b"),
        ("<search>a</search> so <answer>b</answer>", None),
        ("<search>a", None),
        ("</search><answer>b</answer>", None),
    ],
)
def test_the_last_query_of_a_turn_is_its_call(turn: str, query: str | None) -> None:
    assert [call.arguments["query"] for call in search_r1.parse(turn)] == ([query] if query else [])


async def test_what_is_found_follows_in_the_same_turn_and_is_not_trained_on(folder: Path) -> None:
    pytest.importorskip("bm25s")
    turns = ["<search>Belod</search>", f"<answer>Sanek</answer>{END}"]
    policy = Scripted(TOKENIZER, turns)
    tool = {"search": {"folder": str(folder), "top_k": 1}}
    built = program.build({"tools": [tool], "format": "search_r1"})
    asked = task(TOKENIZER)
    rollout = await built(asked, UID, policy, TOKENIZER)
    row = rollout.trajectory
    observed = "\n\n<information>Doc 1(Title: Belod) born in Sanek</information>\n\n"
    said = policy.text(row.tokens[len(asked.prompt_ids) :])
    assert said == turns[0] + observed + turns[1]
    assert policy.text(row.tokens[row.loss_mask.astype(bool)]) == "".join(turns)
    assert policy.requests[0].prompt_ids.tolist() == asked.prompt_ids.tolist()
    assert policy.requests[0].sampling.stop[-2:] == ("</search>", "</answer>")
    assert [each["role"] for each in rollout.messages] == ["assistant", "tool", "assistant"]


async def test_a_retriever_that_hangs_is_a_fault_and_no_observation() -> None:
    async with retriever(0, {}, []) as url, asyncio.timeout(60):
        with pytest.raises(InfraError, match=f"the retriever {url} does not answer in time"):
            await found("Belod", {"timeout_s": 0.2}, url=url)


async def test_the_connections_of_a_retriever_end_with_the_tools() -> None:
    ended = asyncio.Event()
    async with retriever(200, {"result": [[]]}, [], ended) as url:
        async with searching(url=url) as ask:
            await ask("x")
            assert not ended.is_set()
        async with asyncio.timeout(10):
            await ended.wait()


async def test_an_answer_without_end_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.rollout.tools.search.MAX_BYTES", 100)
    long = [[{"document": {"contents": "t\n" + "x" * 200}}]]
    async with retriever(200, {"result": long}, []) as url:
        with pytest.raises(InfraError, match="failed: HTTP 200"):
            await found("x", url=url)
