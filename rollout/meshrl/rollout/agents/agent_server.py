"""An agent that is started once per worker and leads all of its conversations: JSON lines on stdin and stdout.

    worker ──{"id": 1, "base_url", "api_key", "task"}──▶ server      a conversation begins
           ──{"cancel": 1}─────────────────────────────▶             its row has ended, or its deadline has passed
           ◀──{"ready": true}───────────────────────────             once, before anything else
           ◀──{"id": 1, "reward": 0.5 | {…} | null}─────             or {"id": 1, "error": "…"}

With "conversation" in an answer it names the one that becomes the row, of several in its session; with "note" it says
what the run should know: the worker logs each note once.

consumes: conversations. waits for: the answer. unblocked by: the answer, the server's end, or the row's deadline,
which cancels the call. A server that does not answer a cancelled conversation either, or is not ready in time, is
killed; the next conversation starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from meshrl.common import process_guard
from meshrl.common.sockets import reach_directly
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json
from meshrl.rollout.agents.agent import (
    MAX_LINE_BYTES,
    PRIVATE,
    Agent,
    AgentError,
    Led,
    posted,
)
from meshrl.rollout.agents.session import Address

log = logging.getLogger(__name__)

STDERR_BYTES = 4096
"""How much of the end of a server's stderr is kept, for the message of its end."""


class AgentServer(Agent):
    """Call `start` before the first row, so that a server that cannot start is the recipe's fault."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        start_timeout_s: float = 120.0,
        cancel_timeout_s: float = 10.0,
    ) -> None:
        """Nothing is started yet.

        Args:
            command: A program and its arguments.
            env: Additional environment variables.
            start_timeout_s: The longest time until it is ready.
            cancel_timeout_s: The longest time until it answers a cancelled conversation.
        """
        self._command = tuple(command)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE)}
        self._env = {**inherited, **env}
        reach_directly(self._env)  # its gateway is here
        self._start_timeout_s = start_timeout_s
        self._cancel_timeout_s = cancel_timeout_s
        self._numbers = itertools.count(1)
        self._notes: set[str] = set()
        self._server: _Server | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the server. Raises ConfigError where it does not get ready."""
        try:
            await self._ready()
        except AgentError as error:
            raise ConfigError(f"rollout.program: {error}") from error

    async def aclose(self) -> None:
        """Kill the server and all that it started; idempotent."""
        if self._server:
            await self._server.kill("the worker ends")
            self._server = None

    @override
    async def __call__(self, task: Mapping[str, Json], address: Address) -> Led:
        server, number = await self._ready(), next(self._numbers)
        call = {"id": number, "base_url": address.base_url, "api_key": address.api_key}
        answer = server.expect(number)
        try:
            await server.send({**call, "task": task})
            found = await asyncio.shield(answer)
        except asyncio.CancelledError:
            server.cancel(number, self._cancel_timeout_s)
            raise
        conversation = found.get("conversation")
        if (note := found.get("note")) and note not in self._notes:
            self._notes.add(note)
            log.warning("%s: %s", server.name, note)
        if (fault := found.get("error")) is not None:
            # The guard's answer for a line that is too long has an object.
            said = str(fault["message"] if isinstance(fault, dict) else fault)[:2000]
            raise AgentError(said, conversation=conversation)
        try:
            return Led(reward=posted(found.get("reward")), conversation=conversation)
        except UserError as error:
            raise AgentError(f"{self._command[0]}: {error.message}") from error

    async def _ready(self) -> _Server:
        """The running server, or a new one. Raises AgentError."""
        async with self._starting:
            if self._server is None or self._server.ended:
                self._server = None
                process = await self._spawn()
                server = _Server(process, Path(self._command[0]).name)
                try:
                    async with asyncio.timeout(self._start_timeout_s):
                        await asyncio.shield(server.ready)
                except TimeoutError:
                    await server.kill("not ready in time")
                    raise AgentError(
                        f"{server.name} was not ready after {self._start_timeout_s:g} s{server.said()}"
                    ) from None
                except BaseException:
                    await server.kill("its start was given up")
                    raise
                self._server = server
            return self._server

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *process_guard.guarded_command(self._command, grace_s=0, line_bytes=MAX_LINE_BYTES),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=2 * MAX_LINE_BYTES,
            env=self._env,
            start_new_session=True,
        )


class _Server:
    """One process, and the conversations that wait for its answers."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.name = name
        self.ended = False
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._watched: set[asyncio.Task[None]] = set()
        self._killed = ""
        self._stderr = b""
        self._writing = asyncio.Lock()
        self._reading = asyncio.create_task(self._read(), name=f"agent-server-{process.pid}")

    def expect(self, number: int) -> asyncio.Future[dict[str, Any]]:
        """The answer to `number`; AgentError if the server ends before."""
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        if self.ended:
            self._fail_all("has ended")
        return answer

    async def send(self, message: Mapping[str, Any]) -> None:
        """Write a line; a server that is gone fails the answer instead."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
            async with self._writing:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                await self._process.stdin.drain()

    def cancel(self, number: int, timeout_s: float) -> None:
        """Tell the server to cancel `number`; kill it if it does not answer even then."""
        if number in self._waiting:
            watch = asyncio.create_task(self._cancelled(number, timeout_s))
            self._watched.add(watch)
            watch.add_done_callback(self._watched.discard)

    async def kill(self, why: str) -> None:
        """End the process and what it started."""
        if self._process.returncode is None:
            log.info("%s is killed: %s", self.name, why)
            self._killed = why
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        others = self._watched - {asyncio.current_task()}
        for watch in others:
            watch.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._reading

    def said(self) -> str:
        """The last line of its stderr, as the end of a message."""
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:500]}" if lines else ""

    async def _cancelled(self, number: int, timeout_s: float) -> None:
        answer = self._waiting[number]
        try:
            async with asyncio.timeout(timeout_s):
                await self.send({"cancel": number})
                await asyncio.wait({answer})
        except TimeoutError:
            await self.kill(
                f"it does not answer {timeout_s:g} s after a conversation was cancelled"
            )
        if answer.done() and not answer.cancelled():
            answer.exception()  # nobody else asks

    async def _read(self) -> None:
        """Give each answer to its request, until the process ends."""
        await asyncio.gather(self._read_lines(), self._read_stderr())
        code = await self._process.wait()
        self._fail_all(f"was killed: {self._killed}" if self._killed else f"ended with {code}")

    async def _read_lines(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                log.warning("%s wrote what is no JSON object: %.200r", self.name, line)
            elif message.get("ready") is True:
                if not self.ready.done():
                    self.ready.set_result(None)
            elif answer := self._waiting.pop(message.get("id", 0), None):
                answer.set_result(message)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(1 << 16):
            self._stderr = (self._stderr + data)[-STDERR_BYTES:]

    def _fail_all(self, what: str) -> None:
        self.ended = True
        waiting, self._waiting = self._waiting, {}
        ends: list[asyncio.Future[Any]] = [*waiting.values(), self.ready]
        for end in ends:
            if not end.done():
                end.set_exception(AgentError(f"{self.name} {what}{self.said()}"))
                end.exception()  # also where nobody waits
