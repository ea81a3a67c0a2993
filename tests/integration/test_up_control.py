"""The control socket of `up`: who may connect, what it answers, what a killed `up` leaves of it."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshrl.contract.errors import ConflictError, UnavailableError, UserError
from meshrl.launcher.control import SOCKET_NAME, Answer, ask_up, control_socket, short_path


async def echo(request: Mapping[str, object]) -> Answer:
    return {"said": request["word"]}


async def refuse(request: Mapping[str, object]) -> Answer:
    raise ConflictError("the run is over and drains")


VERBS = {"echo": echo, "refuse": refuse}


async def test_an_operation_is_answered_and_its_error_is_raised_again(tmp_path: Path) -> None:
    async with control_socket(tmp_path, VERBS):
        assert await ask_up(tmp_path, "echo", timeout_s=5, word="hi") == {"said": "hi"}
        with pytest.raises(ConflictError, match="over and drains"):
            await ask_up(tmp_path, "refuse", timeout_s=5)
        with pytest.raises(UserError, match="knows the operations echo, refuse"):
            await ask_up(tmp_path, "explode", timeout_s=5)
    assert not (tmp_path / SOCKET_NAME).exists()


async def test_only_its_owner_may_open_it(tmp_path: Path) -> None:
    async with control_socket(tmp_path, VERBS):
        mode = (tmp_path / SOCKET_NAME).stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600


async def test_a_socket_that_a_killed_up_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left, short_path(tmp_path) as path:
        left.bind(path)
    with pytest.raises(UnavailableError, match="has it ended"):
        await ask_up(tmp_path, "echo", timeout_s=5, word="hi")
    async with control_socket(tmp_path, VERBS):
        assert await ask_up(tmp_path, "echo", timeout_s=5, word="hi") == {"said": "hi"}


async def test_a_directory_with_a_path_longer_than_a_sockets_address_will_do(
    tmp_path: Path,
) -> None:
    directory = tmp_path / ("d" * 100) / ("e" * 100)
    directory.mkdir(parents=True)
    async with control_socket(directory, VERBS):
        assert await ask_up(directory, "echo", timeout_s=5, word="hi") == {"said": "hi"}


@pytest.mark.parametrize("line", [b"not json\n", b"[]\n", b"{}\n", b"null\n"])
async def test_nonsense_is_answered_with_what_would_be_right(tmp_path: Path, line: bytes) -> None:
    async with control_socket(tmp_path, VERBS):
        with short_path(tmp_path) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        answer = json.loads(await reader.readline())
        writer.close()
    assert answer["error"]["code"] == "user" and "echo, refuse" in answer["error"]["message"]


async def test_a_client_that_leaves_or_says_nothing_holds_up_nobody(tmp_path: Path) -> None:
    async with control_socket(tmp_path, VERBS):
        with short_path(tmp_path) as path:
            _, gone = await asyncio.open_unix_connection(path)
            _, silent = await asyncio.open_unix_connection(path)
        gone.write(b"{" * 200_000)  # longer than any line that is read
        gone.close()
        assert await ask_up(tmp_path, "echo", timeout_s=5, word="hi") == {"said": "hi"}
    silent.close()


async def test_an_up_that_ends_in_the_middle_is_unavailable(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def never(request: Mapping[str, object]) -> Answer:
        begun.set()
        await asyncio.Event().wait()
        return {}

    async with control_socket(tmp_path, {"never": never}):
        pending = asyncio.create_task(ask_up(tmp_path, "never", timeout_s=30))
        await begun.wait()
    with pytest.raises(UnavailableError, match="has it ended"):
        await pending
