"""MCP servers as tools: what they offer, what they say, and what becomes of calls when they die, hang or grow."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.errors import ConfigError, InfraError
from meshrl.contract.types import Media, Uid
from meshrl.images.messages import taken_out
from meshrl.launcher.address_book import free_port
from meshrl.rollout.tools import mcp_servers
from meshrl.rollout.tools.ports import ToolCall, ToolCaller, ToolConfig, ToolsConfig
from meshrl.rollout.tools.toolbox import TaskTools, ToolBuilder
from tests.doubles.scripted import task

from ..processes import python
from ..unit.rollout.chats import chat_tokenizer
from ..waiting import answered, gone

OFFICIAL = Path(__file__).with_name("mcp_server.py")
LIGHT = Path(__file__).with_name("mcp_light.py")
TOKENIZER = chat_tokenizer()


class Seeing:
    """The same tokenizer for a vision-language model."""

    reads_pictures = True

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def look_at(self, media: Any) -> None:
        raise NotImplementedError

    def with_places(self, ids: Any, media: Any) -> Any:
        raise NotImplementedError


class Bench:
    """The tools of a tool builder, for rows 0, 1, …"""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.builder: Any = None
        self.tools: Any = None

    async def open(self, **options: Any) -> TaskTools:
        light = [sys.executable, "-E", "-S", str(LIGHT), str(self.log)]
        given = {"command": light} | options
        if "url" in given:
            del given["command"]
        self.builder = ToolBuilder(ToolsConfig(tools=[ToolConfig(**given)]))
        self.tools = (await self.builder.toolbox()).of(task(TOKENIZER))
        return self.tools

    async def say(self, name: str, row: int = 0, **arguments: Any) -> str:
        caller = ToolCaller(task=task(TOKENIZER), uid=Uid("run", "t0", row))
        found: str = await self.tools.call(
            ToolCall(name=name, arguments=arguments), caller, TOKENIZER
        )
        return found

    def noted(self, what: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(what + " ") for line in lines if line.startswith(what + " ")]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "log")
    yield made
    if made.builder is not None:
        await made.builder.close()
    await gone(*map(int, made.noted("pid") + made.noted("child")))


async def test_a_servers_picture_is_a_part_for_a_model_that_sees_and_a_word_for_another(
    bench: Bench,
) -> None:
    tools = await bench.open(only=["draw"])
    caller = ToolCaller(task=task(TOKENIZER), uid=Uid("run", "t0", 0))
    png = b"\x89PNG\r\n\x1a\nnot looked into"
    call = ToolCall(name="draw", arguments={"data": base64.b64encode(png).decode()})
    seen = await tools.call(call, caller, Seeing())
    assert {"type": "image", "image": png} in seen
    assert [part["text"] for part in seen if part["type"] == "text"] != []
    _, media = taken_out([{"role": "tool", "content": seen}])
    assert media == (Media.of(png),)
    assert await tools.call(call, caller, TOKENIZER) == "the board\n[image]"
    broken = ToolCall(name="draw", arguments={"data": "no base64!"})
    assert "is not base64" in str(await tools.call(broken, caller, Seeing()))


async def test_a_server_lists_its_tools_and_answers_calls(bench: Bench) -> None:
    command = [sys.executable, str(OFFICIAL), str(bench.log)]
    tools = await bench.open(command=command, only=["add", "fail"])
    names = [schema["function"]["name"] for schema in tools.schemas()]
    assert names == ["add", "fail"]
    add = tools.schemas()[0]["function"]
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["properties"]["a"]["type"] == "integer"
    assert await bench.say("add", a=1, b=2) == "3"
    assert (await bench.say("fail")).startswith("Error: ")
    assert (await bench.say("add", a="x", b=2)).startswith("Error: ")
    assert await bench.say("wait") == "Error: no tool 'wait'; there are add, fail"
    assert len(bench.noted("pid")) == 1


async def test_rows_share_a_server_unless_it_is_stateful(bench: Bench) -> None:
    await bench.open()
    assert [await bench.say("tick", row) for row in (0, 1, 0)] == ["1", "2", "3"]
    await bench.builder.close()
    await bench.open(stateful=True)
    ticks = await asyncio.gather(*(bench.say("tick", row) for row in (0, 1)))
    assert ticks == ["1", "1"] and await bench.say("tick", 0) == "2"
    before = bench.noted("pid")
    bench.builder.release(Uid("run", "t0", 0))
    assert await bench.say("tick", 0) == "1" and await bench.say("tick", 1) == "2"
    assert len(bench.noted("pid")) == len(before) + 1


@pytest.mark.parametrize("how", ["die", "killed"])
async def test_a_server_that_dies_fails_its_calls_and_is_restarted(bench: Bench, how: str) -> None:
    await bench.open()
    calls = [asyncio.create_task(bench.say("wait")) for _ in range(3)]
    assert await bench.say("add", a=1, b=2) == "3"
    if how == "die":
        calls.append(asyncio.create_task(bench.say("die")))
    else:
        os.kill(int(bench.noted("pid")[0]), signal.SIGKILL)
    for found in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(found, InfraError) and "MCP server" in str(found)
    assert await bench.say("add", a=2, b=2) == "4"
    assert len(set(bench.noted("pid"))) == 2


async def test_a_hanging_call_is_observed_and_a_hanging_server_is_a_fault(bench: Bench) -> None:
    await bench.open(timeout_s=0.2)
    assert await bench.say("wait") == "Error: wait timed out after 0.2 s"
    assert len(bench.noted("pid")) == 1  # the same server continues
    await bench.builder.close()
    await bench.open(timeout_s=0.2, start_timeout_s=5)
    with pytest.raises(InfraError, match="does not answer any more"):
        await bench.say("stop")


async def test_a_server_that_never_lists_its_tools_is_a_fault(bench: Bench) -> None:
    mute = [sys.executable, "-E", "-S", str(LIGHT), str(bench.log), "mute"]
    async with asyncio.timeout(60):
        with pytest.raises(InfraError, match=r"did not list its tools within 5 s"):
            await bench.open(command=mute, start_timeout_s=5)


async def test_an_answer_without_end_is_cut_off_before_it_reaches_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_servers, "MOST_BYTES", 100_000)
    await bench.open()
    assert "more than 100000" in await bench.say("long", n=3_000_000)
    assert await bench.say("add", a=1, b=2) == "3"
    assert len(bench.noted("pid")) == 1


async def test_processes_that_a_server_started_end_with_it(bench: Bench) -> None:
    """The fixture waits for the end of every process that the server noted."""
    await bench.open()
    assert await bench.say("fork", count=5) == "forked"
    assert len(bench.noted("child")) == 5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"command": ["/nowhere/server"]}, "MCP server /nowhere/server cannot be started"),
        ({"command": [sys.executable, "-c", "pass"]}, "cannot be started"),
        (
            {
                "command": [sys.executable, "-c", "input(); input(); input()"],
                "start_timeout_s": 1.5,
            },
            "did not answer within 1.5 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "MCP server http://127.0.0.1:9/mcp cannot be reached"),
    ],
    ids=["no file", "ends", "mute", "nobody"],
)
async def test_a_server_that_does_not_start_is_a_fault(
    bench: Bench, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InfraError, match=problem):
        await bench.open(**options)


async def test_a_tool_that_a_server_does_not_have_is_named(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="has no tool 'divide' \\(it has add, "):
        await bench.open(only=["divide"])


async def test_attempts_that_fail_wait_longer_and_longer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(mcp_servers.asyncio, "sleep", sleep)
    server = mcp_servers.McpServer(ToolConfig(command=["/nowhere/server"]))
    for _ in range(9):  # whoever asks meanwhile shares the attempt
        found = await asyncio.gather(server.tools(), server.tools(), return_exceptions=True)
        assert [type(each) for each in found] == [InfraError, InfraError]
    assert [pause for pause in pauses if pause >= 0.5] == [0.5, 1, 2, 4, 8, 16, 30, 30]


@asynccontextmanager
async def http_server(log: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    async with python(OFFICIAL, log, port, stderr=asyncio.subprocess.DEVNULL) as process:
        await answered(lambda: accepts(port))
        yield process


async def accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def test_a_server_over_http_may_disappear_and_return(bench: Bench) -> None:
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}/mcp"
    async with http_server(bench.log, port) as process:
        await bench.open(url=url, headers={"X-Test": "1"})
        assert await bench.say("add", a=1, b=2) == "3"
        waiting = asyncio.create_task(bench.say("wait"))
        assert await bench.say("add", a=2, b=2) == "4"
        process.kill()
        with pytest.raises(InfraError, match="MCP server http"):
            await waiting
    with pytest.raises(
        InfraError, match=r"cannot be reached|closed the connection|failed|has ended"
    ):
        await bench.say("add", a=1, b=2)
    async with http_server(bench.log, port):
        assert await bench.say("add", a=5, b=2) == "7"
        await bench.builder.close()
