"""Agents that lead a conversation: a function in this process, or a command in its own process group.

Both get the address of their session and the task as JSON. A function may return the reward of the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from meshrl.common import process_guard
from meshrl.common.sockets import reach_directly
from meshrl.common.user_functions import load_function
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json, PostedReward, Task, Uid
from meshrl.images.messages import as_openai
from meshrl.rollout.agents.session import Address
from meshrl.rollout.tokenizer import Tokenizer

FUNCTION = "rollout.program_options.function"
OUTPUT_BYTES = 4096
"""How much of the end of a command's output is kept, for the message of a failure."""
MAX_LINE_BYTES = 1 << 20
MOST_LOST = 256
"""Threads of agents that run on although their rows have ended."""
CHATTY_LOGGERS = ("httpx", "httpx2", "openai")
"""Libraries that would log every request of an agent in this process."""
PRIVATE = ("MESHRL_", "OPENAI_")
"""Prefixes of the worker's environment variables that its agents do not inherit."""


class AgentError(Exception):
    """The agent failed: an exception, or an exit code other than 0."""

    def __init__(self, message: str, *, conversation: str | None = None) -> None:
        """`conversation` as in `Led`."""
        super().__init__(message)
        self.conversation = conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """How an agent ended."""

    reward: PostedReward | None = None
    """None: it returns none."""
    conversation: str | None = None
    """The name of the conversation that becomes the row, of those in its session; None: whichever."""


class Agent(Protocol):
    """Leads one session to its end."""

    async def __call__(self, task: Mapping[str, Json], address: Address) -> Led:
        """How it ended. Raises AgentError. Cancelling the call ends the agent."""
        ...


def task_json(task: Task, uid: Uid, tokenizer: Tokenizer) -> dict[str, Json]:
    """The task as an agent gets it."""
    prompt = tokenizer.decode(task.prompt_ids.tolist())
    messages = as_openai(task.messages, task.media)
    return {
        "run": task.run,
        "task_id": task.task_id,
        "index": uid.index,
        "attempt": uid.attempt,
        "prompt": prompt,
        "messages": messages or [{"role": "user", "content": prompt}],
        "data_source": task.data_source,
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.extra_info),
        "deadline_s": task.deadline_s,
    }


def posted(value: object) -> PostedReward | None:
    """A number, or a mapping with `score` and further numbers, as a reward; None: no reward.

    Raises:
        UserError: the value is of another type, or not finite.
    """
    if value is None:
        return None
    entries = dict(value) if isinstance(value, Mapping) else {"score": value}
    numbers: dict[str, float] = {}
    for name, number in entries.items():
        try:
            numbers[str(name)] = float(number) if isinstance(number, int | float) else math.nan
        except OverflowError:
            numbers[str(name)] = math.inf
        if not math.isfinite(numbers[str(name)]):
            raise UserError(f"a reward's {name} is {number!r:.80}, want a finite number")
    if "score" not in numbers:
        raise UserError(f"a reward has {', '.join(numbers) or 'nothing'}, want a score")
    return PostedReward(score=numbers.pop("score"), components=numbers)


class FunctionAgent(Agent):
    """`function(base_url=…, api_key=…, task=…)`. A coroutine function is awaited, any other runs in a thread.

    A thread cannot be ended: one that runs past its deadline finds its session closed, and is not waited for. While
    `MOST_LOST` of them have not returned no other is started.
    """

    def __init__(self, name: str) -> None:
        """`name` is `package.module.function`, or `path/to/file.py:function`. Raises ConfigError."""
        self._name = name
        self._function = load_function(name, FUNCTION)
        self._lost = 0
        for chatty in CHATTY_LOGGERS:
            logging.getLogger(chatty).setLevel(logging.WARNING)

    @override
    async def __call__(self, task: Mapping[str, Json], address: Address) -> Led:
        arguments = {"base_url": address.base_url, "api_key": address.api_key, "task": task}
        try:
            if inspect.iscoroutinefunction(self._function):
                return Led(reward=posted(await self._function(**arguments)))
            return Led(reward=posted(await self._in_thread(arguments)))
        except Exception as error:
            raise AgentError(f"{self._name}: {type(error).__name__}: {error}") from error

    async def _in_thread(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function in its own daemon thread: with a pool, sessions would wait for each other."""
        if self._lost >= MOST_LOST:
            raise AgentError(f"{self._lost} calls never returned")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if done.cancelled():
                self._lost -= 1  # it returned after all
            elif error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result: Any = None
            failure: BaseException | None = None
            try:
                result = self._function(**arguments)
            except (
                BaseException
            ) as error:  # SystemExit too: the caller waits for the end of the thread
                failure = error if isinstance(error, Exception) else AgentError(repr(error))
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(settle, result, failure)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        try:
            return await done
        finally:
            self._lost += done.cancelled()


class CommandAgent(Agent):
    """A command with the session's address in its environment (OPENAI_BASE_URL, ...) and the task as JSON on stdin.

    The command and all processes that it starts end when the worker ends, in whatever way.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self._command = tuple(command)
        self._cwd = cwd
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE)}
        self._env = {**inherited, **env}
        reach_directly(self._env)  # its gateway is here

    @override
    async def __call__(self, task: Mapping[str, Json], address: Address) -> Led:
        """A command sets its reward with `POST {OPENAI_BASE_URL}/reward`."""
        process = await asyncio.create_subprocess_exec(
            *process_guard.guarded_command(self._command, grace_s=0, line_bytes=MAX_LINE_BYTES),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._env, **address.environment},
            cwd=self._cwd,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.gather(_tail(process), _send_task(process, task))
            code = await process.wait()
        finally:
            await _end(process)
        if code:
            lines = output.decode(errors="replace").strip().splitlines()
            raise AgentError(f"{self._command[0]} ended with {code}: {lines[-1] if lines else ''}")
        return Led()


async def _send_task(process: asyncio.subprocess.Process, task: Mapping[str, Json]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not read its stdin
        process.stdin.write(json.dumps(task).encode() + b"\n")
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()


async def _tail(process: asyncio.subprocess.Process) -> bytes:
    """The end of the output; the rest is read and dropped, so that the command never waits for a full pipe."""
    assert process.stdout is not None
    tail = b""
    while data := await process.stdout.read(1 << 16):
        tail = (tail + data)[-OUTPUT_BYTES:]
    return tail


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the command and everything that it started, its guard included."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.shield(process.wait())
