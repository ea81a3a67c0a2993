"""The control socket of a running `up`: a Unix socket in the run's directory that only its owner can open.

    meshrl fleet ── {"verb": …} line ──▶ up.sock ──▶ operations      one request and one answer per connection
                 ◀── {"answer": …} or {"error": …} ──

waits for: a client's line, ASK_S; the operation itself. unblocked by: the client, or the end of `up`: the answer is
then an end of file. The next `up` replaces a socket that a killed one left behind: the run's lock says who lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeAlias

from meshrl.contract.errors import MeshError, UnavailableError, UserError, from_detail

SOCKET_NAME = "up.sock"
ASK_S = 5.0
"""A client that connects has this long to say what it wants."""

Answer: TypeAlias = Mapping[str, object]
Operation: TypeAlias = Callable[[Mapping[str, object]], Awaitable[Answer]]


@asynccontextmanager
async def control_socket(run_dir: Path, operations: Mapping[str, Operation]) -> AsyncIterator[None]:
    """Answer `operations` while the body runs. The caller holds the run's lock.

    Raises:
        UserError: the directory's file system has no sockets.
    """
    running: set[asyncio.Task[None]] = set()

    def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_serve(reader, writer, operations), name="up-control")
        running.add(task)
        task.add_done_callback(running.discard)

    (run_dir / SOCKET_NAME).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        with short_path(run_dir) as path:
            mask = os.umask(0o177)
            try:
                listener.bind(path)
            finally:
                os.umask(mask)
    except OSError as error:
        listener.close()
        raise UserError(f"{run_dir}: no control socket can be made here: {error}") from error
    server = await asyncio.start_unix_server(on_client, sock=listener)
    try:
        yield
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        (run_dir / SOCKET_NAME).unlink(missing_ok=True)


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, operations: Mapping[str, Operation]
) -> None:
    try:
        async with asyncio.timeout(ASK_S):
            line = await reader.readline()
        answer = await _answer(line, operations)
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
    except (OSError, TimeoutError, ValueError):
        pass  # the client went away, said nothing, or never ended its line: nobody reads the answer
    finally:
        writer.close()


async def _answer(line: bytes, operations: Mapping[str, Operation]) -> Mapping[str, object]:
    try:
        try:
            request = json.loads(line)
            operation = operations[request["verb"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"this `up` knows the operations {', '.join(operations)}") from error
        return {"answer": await operation(request)}
    except MeshError as error:
        return {"error": {"code": error.code, "message": str(error)}}


async def ask_up(run_dir: Path, operation: str, *, timeout_s: float, **arguments: object) -> Answer:
    """The answer of the `up` of `run_dir`.

    Raises:
        UnavailableError: none answers within `timeout_s`. MeshError: what the operation raised there.
    """
    try:
        async with asyncio.timeout(timeout_s):
            with short_path(run_dir) as path:
                reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(json.dumps({"verb": operation, **arguments}).encode() + b"\n")
                reply = json.loads(await reader.readline())
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError as error:
        raise UnavailableError(
            f"`up` in {run_dir} did not answer within {timeout_s:.0f} s"
        ) from error
    except (OSError, ValueError) as error:
        raise UnavailableError(f"`up` in {run_dir} does not answer; has it ended?") from error
    if "error" in reply:
        raise from_detail(reply["error"]["code"], reply["error"]["message"], {})
    answer: Answer = reply["answer"]
    return answer


@contextmanager
def short_path(run_dir: Path) -> Iterator[str]:
    """The socket's path in at most 108 bytes, which is all that a Unix socket's address holds."""
    directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)
