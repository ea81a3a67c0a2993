"""The tool `python`: code of the policy, in one sandbox per worker, with variables that last as long as the row.

    worker ── PythonSandbox ── JSON lines ──▶ bubblewrap: meshrl.sandbox.interpreters ── fork ─▶ one process per row

What the code does wrong the policy observes: an exception, the deadline, too much memory. When the sandbox itself
ends or hangs, rows that have variables in it get an InfraError, and are repeated from their first call in a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Mapping

from typing_extensions import override

from meshrl.contract.errors import ConfigError, InfraError
from meshrl.contract.types import Json, Uid
from meshrl.rollout.tools.ports import Tool, ToolCaller, ToolConfig, ToolError
from meshrl.sandbox.limits import Limits
from meshrl.sandbox.sandbox import Isolation, Launch, no_bubblewrap, open_sandbox

INTERPRETERS = "meshrl.sandbox.interpreters"
PROCESSES = 1024
"""Processes and threads of all rows of a worker together."""
LINE_BYTES = 1 << 20
DESCRIPTION = (
    "Run Python code. Variables last until the end of the conversation. The result is what the code prints, and the"
    " value of an expression in its last line."
)


class PythonSandbox:
    """The sandbox of one worker: started with its first call, replaced by the next call when it has ended."""

    def __init__(self, config: ToolConfig) -> None:
        assert config.python is not None
        self._python = config.python
        self._concurrency = config.concurrency
        self._start_timeout_s = config.start_timeout_s
        self._limits = Limits(
            deadline_s=config.timeout_s,
            memory_bytes=config.python.memory_bytes,
            processes=PROCESSES,
            open_files=None,
        )
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Json]] = {}
        self._ids = itertools.count()
        self._rows: set[Uid] = set()
        self._robbed: set[Uid] = set()
        """Rows whose variables ended with a sandbox."""
        self._lock = asyncio.Lock()

    async def run(self, uid: Uid, code: str) -> str:
        """Run `code` in the interpreter of a row; returns its output.

        Raises:
            ToolError: the code ended its interpreter, or did not end in time.
            InfraError: the sandbox cannot be started, or has ended.
        """
        process = await self._started()
        if uid in self._robbed:
            raise InfraError("the row's variables ended with the sandbox of its tool python")
        self._rows.add(uid)
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await _send(process, {"id": number, "episode": str(uid), "code": code})
            told = await answer
        finally:
            del self._answers[number]
        if "fault" in told:
            raise InfraError(f"python: {told['fault']}")
        if "error" in told:
            raise ToolError(told["error"])
        output: str = told["output"]
        return output

    def release(self, uid: Uid) -> None:
        """End the interpreter of a finished row."""
        self._robbed.discard(uid)
        process = self._process
        if uid in self._rows and process is not None and process.stdin is not None:
            self._rows.discard(uid)
            process.stdin.write(_line({"end": str(uid)}))

    async def close(self) -> None:
        """End the sandbox and all in it; idempotent."""
        process, reader = self._process, self._reader
        if process is None or reader is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait({reader})

    async def _started(self) -> asyncio.subprocess.Process:
        """The running process, or a new one."""
        async with self._lock:
            if self._process is None:
                try:
                    async with asyncio.timeout(self._start_timeout_s):
                        await self._start()
                except TimeoutError:
                    problem = f"did not start within {self._start_timeout_s:g} s"
                    raise InfraError(f"the sandbox of the tool python {problem}") from None
            assert self._process is not None
            return self._process

    async def _start(self) -> None:
        # The first call tries bubblewrap, which takes a moment.
        if (why := await asyncio.to_thread(no_bubblewrap)) is not None:
            raise ConfigError(f"the tool python needs bubblewrap: {why}")
        sandbox = open_sandbox(Isolation.STRICT, self._limits)
        launch = sandbox.launch(INTERPRETERS, shares=self._concurrency)
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=launch.env,
            cwd=launch.folder,
            limit=LINE_BYTES,
            start_new_session=True,  # no Ctrl-C of a terminal reaches it
        )
        ready: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(process, launch, ready), name="tool python")
        try:
            settings = {"confinement": launch.confinement, "limits": self._limits.model_dump()}
            await _send(process, {**settings, "imports": self._python.imports})
            told = await ready
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        if "refused" in told:
            raise ConfigError(f"the tool python cannot start: {told['refused']}")
        self._process = process

    async def _read(
        self,
        process: asyncio.subprocess.Process,
        launch: Launch,
        ready: asyncio.Future[Json],
    ) -> None:
        """Hand each answer to the call that waits for it; at the end of the process, fail those that wait."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                told = json.loads(line)
                waiting = self._answers.get(told["id"]) if ready.done() else ready
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
        finally:
            self._process = None
            self._robbed |= self._rows
            self._rows.clear()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
            launch.discard()
            for waiting in (ready, *self._answers.values()):
                if not waiting.done():
                    problem = f"the sandbox of the tool python ended with exit code {code}"
                    waiting.set_exception(InfraError(problem))
            ready.exception()  # its caller may have left


class PythonTool(Tool):
    """The tool."""

    stateful = True

    def __init__(self, sandbox: PythonSandbox, name: str = "") -> None:
        self.name = name or "python"
        self.description = DESCRIPTION
        self.parameters: Mapping[str, Json] = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code."}},
            "required": ["code"],
        }
        self._sandbox = sandbox

    @override
    async def call(self, arguments: Mapping[str, Json], caller: ToolCaller) -> str:
        given = {**arguments, **caller.given}
        if set(given) != {"code"} or not isinstance(given["code"], str):
            raise ToolError(f"{self.name}: want one argument, code, a text")
        return await self._sandbox.run(caller.uid, given["code"])

    async def check(self, caller: ToolCaller) -> None:
        """Raise InfraError, always: the sandbox answers late runs itself, so this one hangs and is ended."""
        await self._sandbox.close()
        raise InfraError("the sandbox of the tool python did not answer")


def _line(message: Json) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def _send(process: asyncio.subprocess.Process, message: Json) -> None:
    """Raises InfraError where the process has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(_line(message))
        await process.stdin.drain()
    except (ConnectionError, RuntimeError) as error:
        raise InfraError("the sandbox of the tool python has ended") from error
