"""The service's end of one scoring process: start, send, receive, ask where it is, kill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

from meshrl.contract.errors import ConfigError, CorruptError, InfraError
from meshrl.contract.nouns import Json
from meshrl.rewardd import frames
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.pipes import PipeReader, PipeWriter
from meshrl.rewardd.rule import Rule

log = logging.getLogger(__name__)
output_log = logging.getLogger("meshrl.rewardd.output")

TAIL_BYTES = 16_384
"""How much of what a process printed is remembered."""
LINES_PER_S = 20
"""How much of it is passed on to the log; the rest is counted."""
KILL_WAIT_S = 5.0
WHERE_WAIT_S = 2.0
"""On a busy machine even a signal takes its time; usually the answer is there in a millisecond."""
WHERE_SIGNAL = signal.SIGUSR2
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class _Pipe(asyncio.Protocol):
    """One of our ends; `lost` when its transport is through with it."""

    def __init__(self) -> None:
        self.lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


class _Output:
    """What a process prints: its end is remembered, a bounded part of it logged."""

    def __init__(self, name: str) -> None:
        self.tail = bytearray()
        self._name = name
        self._second = 0
        self._lines = 0
        self._hidden = 0

    def take(self, data: bytes) -> None:
        """Called with every chunk, and with nothing at the end."""
        if not data and self._hidden:
            output_log.info("%s: %d more lines were not logged", self._name, self._hidden)
        self.tail += data[-TAIL_BYTES:]
        del self.tail[:-TAIL_BYTES]
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._lines = second, 0
        for line in data[:4096].splitlines():
            if self._lines >= LINES_PER_S:
                self._hidden += 1
                continue
            self._lines += 1
            output_log.info("%s: %s", self._name, line[:500].decode(errors="replace"))
        self._hidden += data[4096:].count(b"\n")


class Worker:
    """One scoring process with a rule loaded. `wake` is set when it said something or ended."""

    def __init__(self, name: str, wake: asyncio.Event) -> None:
        self.concurrent = False
        self._name = name
        self._wake = wake
        self._output = _Output(name)
        self._messages: deque[Json | None] = deque()
        self._decoder = frames.Decoder()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: PipeWriter | None = None
        self._listening: list[PipeReader] = []

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    async def start(self, rule: Rule, config: RewardConfig) -> None:
        """Spawn a fresh interpreter and load the rule in it; on any failure nothing is left running.

        Raises:
            ConfigError: the rule cannot be loaded; says what is wrong with it.
            InfraError: the process ended by a signal that nobody of ours sent.
        """
        # A new session: Ctrl-C in the terminal is not for it, and what it spawns dies with it.
        process = subprocess.Popen(  # noqa: ASYNC220 - returns after fork and exec, a millisecond
            [sys.executable, "-P", "-m", "meshrl.rewardd.host", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        assert process.stdin and process.stdout and process.stderr
        self._process = process
        self._requests = PipeWriter(process.stdin)
        self._listening = [
            PipeReader(process.stdout, self._hear),
            PipeReader(process.stderr, self._output.take),
        ]
        self._send(
            {
                "load": rule.to_json(),
                "deadline_s": config.deadline_s,
                "cpu_limit_s": config.cpu_limit_s,
                "memory_limit_bytes": config.memory_limit_bytes,
            }
        )
        await self._await_ready(rule, config.start_deadline_s)

    async def _await_ready(self, rule: Rule, deadline_s: float) -> None:
        files = ", ".join(f.path or f.module for f in rule.functions)
        try:
            async with asyncio.timeout(deadline_s):
                while not self._messages:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            where = await self.where()
            raise ConfigError(f"{files} did not load within {deadline_s:g} s{where}") from None
        message = self._messages.popleft()
        if message is None:
            code = await self.kill()
            text = f"{files} ended the scoring process while being loaded: {self.epitaph(code)}"
            # A kill from outside (out of memory, an operator) says nothing about the file: worth another try.
            raise (InfraError if code == -signal.SIGKILL else ConfigError)(text)
        if "refused" in message:
            raise ConfigError(message["refused"])
        self.concurrent = bool(message["concurrent"])

    def _hear(self, data: bytes) -> None:
        try:
            self._messages.extend(self._decoder.feed(data) if data else [None])
        except CorruptError as error:
            log.warning("%s", error)
            self._messages.append(None)
        self._wake.set()

    def _send(self, message: Json) -> None:
        assert self._requests is not None
        self._requests.write(frames.encode(message))

    def score(self, encoded: Sequence[bytes]) -> None:
        """Send samples, each a JSON object with an `id`; results come as `messages`."""
        assert self._requests is not None
        body = b'{"score":[' + b",".join(encoded) + b"]}"
        self._requests.write(frames.HEADER.pack(len(body)) + body)

    @property
    def messages(self) -> deque[Json | None]:
        """What it said and nobody has read; None when it has ended."""
        return self._messages

    async def where(self) -> str:
        """` at file:line in function`: what it executes now, or an empty string."""
        if self._process is None or self._process.poll() is not None:
            return ""
        del self._output.tail[:]
        self._process.send_signal(WHERE_SIGNAL)
        deadline = time.monotonic() + WHERE_WAIT_S
        while (line := _user_line(self._output.tail)) == "" and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return line

    def epitaph(self, code: int | None) -> str:
        """How it ended, where, and the last line that it printed."""
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (out of memory, or an operator)"
        else:
            how = f"exit code {code}"
        where = _user_line(self._output.tail) if code and code < 0 else ""
        lines = self._output.tail.decode(errors="replace").strip().splitlines()
        last = f"; it printed last: {lines[-1][:200]!r}" if lines and not where else ""
        return how + where + last

    async def kill(self) -> int | None:
        """End the process and its children and reap it; idempotent. Returns the exit code, -n for signal n."""
        process = self._process
        if process is None:
            return None
        code = process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_WAIT_S
        while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - a child tells no loop
            await asyncio.sleep(0.002)
        if process.returncode is None:
            log.error("scoring process %d does not end (stuck in the kernel)", process.pid)
        if self._requests is not None:
            self._requests.close()
        for pipe in self._listening:
            pipe.close()
        return code if code is not None else process.returncode


def _user_line(dump: bytes | bytearray) -> str:
    """The innermost frame of a faulthandler dump that is neither ours nor the library's."""
    for match in FRAME.finditer(dump.decode(errors="replace")):
        file, line, function = match.groups()
        if "/lib/python" not in file and "/rewardd/meshrl/" not in file:
            return f" at {file}:{line} in {function}"
    return ""
