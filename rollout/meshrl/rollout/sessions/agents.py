"""Who leads a conversation: a function in this process, or a command in a process group of its own.

Both are given where their session is, and the task as JSON. A function may return what the conversation was worth.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json, PostedReward, Task, Uid
from meshrl.rollout.sessions.gateway import Address
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.tools import subprocess_guard
from meshrl.rollout.user_functions import load_function

FUNCTION = "rollout.program_options.function"
LEASH = Path(subprocess_guard.__file__)
OUTPUT_BYTES = 4096
"""Of the end of a command's output: what a failure is told by."""
MAX_LINE_BYTES = 1 << 20
CHATTY = ("httpx", "httpx2", "openai")
"""Clients in this process that would log every request."""
PRIVATE = ("MESHRL_", "OPENAI_")
"""Variables of the worker that its agents do not inherit, by their beginning."""


class AgentError(Exception):
    """The agent failed: it raised, or ended with another code than 0."""


class Agent(Protocol):
    """Leads one conversation to its end."""

    async def __call__(self, task: Mapping[str, Json], address: Address) -> PostedReward | None:
        """What it was worth, where the agent says so here. Raises AgentError. Cancelling it ends the agent."""
        ...


def task_json(task: Task, uid: Uid, tokenizer: Tokenizer) -> dict[str, Json]:
    """What an agent is told of its task."""
    prompt = tokenizer.decode(task.prompt_ids.tolist())
    messages = [{"role": m.role, "content": m.content} for m in task.messages]
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


def posted(found: object) -> PostedReward | None:
    """A number, or a mapping with `score` and further numbers, as a reward; None is none.

    Raises:
        UserError: it is something else, or not finite.
    """
    if found is None:
        return None
    given = dict(found) if isinstance(found, Mapping) else {"score": found}
    numbers: dict[str, float] = {}
    for name, value in given.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"a reward's {name} is {value!r:.80}, want a finite number")
        numbers[str(name)] = float(value)
    if "score" not in numbers:
        raise UserError(f"a reward has {', '.join(numbers) or 'nothing'}, want a score")
    return PostedReward(score=numbers.pop("score"), components=numbers)


class FunctionAgent:
    """`function(base_url=…, api_key=…, task=…)`. A coroutine function is awaited, any other runs in a thread.

    A thread cannot be ended. One that runs past its deadline finds its session closed and is left to itself.
    """

    def __init__(self, name: str) -> None:
        """`name` is `package.module.function`, or `path/to/file.py:function`. Raises ConfigError."""
        self._name = name
        self._function = load_function(name, FUNCTION)
        for chatty in CHATTY:
            logging.getLogger(chatty).setLevel(logging.WARNING)

    async def __call__(self, task: Mapping[str, Json], address: Address) -> PostedReward | None:
        """See `Agent`."""
        arguments = {"base_url": address.base_url, "api_key": address.api_key, "task": task}
        try:
            if inspect.iscoroutinefunction(self._function):
                return posted(await self._function(**arguments))
            return posted(await _in_thread(lambda: self._function(**arguments), self._name))
        except Exception as error:
            raise AgentError(f"{self._name}: {type(error).__name__}: {error}") from error


class CommandAgent:
    """A command with OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the task as JSON on stdin.

    It and all that it starts end with the worker, whichever way that ends.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self._command = tuple(command)
        self._cwd = cwd
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE)}
        self._env = {**inherited, **env}

    async def __call__(self, task: Mapping[str, Json], address: Address) -> PostedReward | None:
        """See `Agent`; a command says what it was worth by `POST {OPENAI_BASE_URL}/reward`."""
        given = {"OPENAI_BASE_URL": address.base_url, "OPENAI_API_KEY": address.api_key}
        leashed = (sys.executable, "-S", "-E", str(LEASH), str(os.getpid()), str(MAX_LINE_BYTES))
        process = await asyncio.create_subprocess_exec(
            *(*leashed, *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._env, **given},
            cwd=self._cwd,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.gather(_tail(process), _tell(process, task))
            code = await process.wait()
        finally:
            await _end(process)
        if code:
            said = output.decode(errors="replace").strip().splitlines()
            raise AgentError(f"{self._command[0]} ended with {code}: {said[-1] if said else ''}")
        return None


async def _tell(process: asyncio.subprocess.Process, task: Mapping[str, Json]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not care for it
        process.stdin.write(json.dumps(task).encode() + b"\n")
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()


async def _tail(process: asyncio.subprocess.Process) -> bytes:
    """The end of the output; the rest is read and forgotten, so that nobody waits for a full pipe."""
    assert process.stdout is not None
    kept = b""
    while piece := await process.stdout.read(1 << 16):
        kept = (kept + piece)[-OUTPUT_BYTES:]
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """Everything that the command started, its leash included."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        await asyncio.shield(process.wait())


async def _in_thread(call: Callable[[], Any], name: str) -> Any:
    """`call` in a daemon thread of its own: a pool would make sessions wait for each other."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:  # SystemExit too: somebody waits for the end, whatever it is
            failure = error if isinstance(error, Exception) else AgentError(repr(error))
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
