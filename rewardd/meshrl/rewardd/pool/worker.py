"""The service's end of one scoring process: its pipes, start, send, receive, find its current line, kill.

The pipes work on any event loop, and we close their file descriptors ourselves, exactly once: the transports of
asyncio and uvloop disagree on who closes the descriptor of a pipe whose other end has closed, and closing a number
twice may close another file that has got it since.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from meshrl.contract.errors import ConfigError, CorruptError, InfraError
from meshrl.contract.types import Json
from meshrl.rewardd.pool.messages import HEADER, encode_frame, printable
from meshrl.rewardd.pool.rule import RewardRule
from meshrl.sandbox.sandbox import Isolation, Launch, Sandbox, StrictSandbox

log = logging.getLogger(__name__)
output_log = logging.getLogger("meshrl.rewardd.output")

SCORING_PROCESS = "meshrl.rewardd.pool.scoring_process"
CHUNK = 1 << 16
MAX_REPLY_BYTES = 1 << 20
"""Replies are small: a longer one did not come from our code."""
TAIL_BYTES = 16_384
"""Bytes of a process's output that are remembered."""
LINES_PER_S = 20
"""Lines of output that are logged each second; the others are counted."""
KILL_WAIT_S = 5.0
MAX_UNREAD = 64 << 20
"""Bytes of answers that may arrive before the pool reads the first of them."""
WHERE_WAIT_S = 2.0
"""Usually the answer takes a millisecond; on a busy machine a signal can take longer."""
WHERE_SIGNAL = signal.SIGUSR2
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class PipeReader:
    """Calls `on_data` with each chunk that arrives and once, with an empty one, at the end."""

    def __init__(self, file: IO[bytes], on_data: Callable[[bytes], None]) -> None:
        self._file = file
        self._fd = file.fileno()
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._open = True
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> bool:
        """Read one chunk; False when there is none, now or ever."""
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._fd)
        self._on_data(data)
        return bool(data)

    def close(self, drain: int = 16) -> None:
        """Read at most `drain` chunks that have arrived already, then close. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        while drain > 0 and self._readable():
            drain -= 1
        self._loop.remove_reader(self._fd)
        self._file.close()


class PipeWriter:
    """Buffers what the pipe does not accept at once. Ignores a closed other end: the reader notices it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._fd = file.fileno()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._buffer = bytearray()
        os.set_blocking(self._fd, False)

    def write(self, data: bytes) -> None:
        """Never blocks."""
        if self._open:
            waiting = bool(self._buffer)
            self._buffer += data
            if not waiting:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._buffer:
                del self._buffer[: os.write(self._fd, self._buffer[: 4 * CHUNK])]
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._flush)
        except BrokenPipeError:
            self.close()
        else:
            self._loop.remove_writer(self._fd)

    def close(self) -> None:
        """Drop the rest of the buffer. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_writer(self._fd)
            self._buffer.clear()
            self._file.close()


class FrameDecoder:
    """Reads frames from chunks of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Json]:
        """The frames that `chunk` completes.

        Raises:
            CorruptError: the bytes are not frames.
        """
        self._buffer += chunk
        frames, start = [], 0
        while len(self._buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, start)
            if size > MAX_REPLY_BYTES:
                raise CorruptError(f"a scoring process announced a reply of {size} bytes")
            end = start + HEADER.size + size
            if len(self._buffer) < end:
                break
            try:
                frames.append(json.loads(self._buffer[start + HEADER.size : end]))
            except (ValueError, RecursionError) as error:
                raise CorruptError(f"a scoring process sent no JSON: {error}") from error
            start = end
        del self._buffer[:start]
        return frames


class _Output:
    """Output of a process: its end is remembered, and a limited number of lines is logged."""

    def __init__(self, name: str, limit: int | None, on_excess: Callable[[], None]) -> None:
        self.tail = bytearray()
        self.printed = 0
        """Bytes since the last answer."""
        self._limit = limit
        self._on_excess = on_excess
        self._name = name
        self._second = 0
        self._lines = 0
        self._hidden = 0

    def take(self, data: bytes) -> None:
        """Called with every chunk, and with an empty one at the end."""
        self.printed += len(data)
        if self._limit is not None and self.printed > self._limit:
            self._on_excess()
            return
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


class ScoringWorker:
    """One scoring process with a rule loaded. `wake` is set when it sent a message or ended."""

    def __init__(self, name: str, wake: asyncio.Event, sandbox: Sandbox) -> None:
        self.concurrent = False
        self.batched = False
        self.breach = ""
        """How it broke the protocol, if it did; then it is killed."""
        self._sandbox = sandbox
        self._wake = wake
        self._output = _Output(name, sandbox.limits.output_bytes, self._on_excess_output)
        self._messages: deque[Json | None] = deque()
        self._unread = 0
        self._decoder = FrameDecoder()
        self._launch: Launch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: PipeWriter | None = None
        self._readers: list[PipeReader] = []
        self._open_ends = 0
        self._all_closed = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the running process."""
        assert self._process is not None
        return self._process.pid

    async def start(self, rule: RewardRule) -> None:
        """Start a fresh interpreter and load the rule in it; on a failure nothing is left running.

        Raises:
            ConfigError: the rule cannot be loaded; says why.
            InfraError: the process was killed from outside.
        """
        # A new session: it gets no Ctrl-C from the terminal, and its children are killed with it.
        launch = self._launch = self._sandbox.launch(SCORING_PROCESS)
        process = subprocess.Popen(  # noqa: ASYNC220 - returns after fork and exec, a millisecond
            launch.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=launch.env,
            cwd=launch.folder,
        )
        assert process.stdin and process.stdout and process.stderr
        self._process = process
        self._requests = PipeWriter(process.stdin)
        self._open_ends = 2
        self._readers = [
            PipeReader(process.stdout, self._on_stdout),
            PipeReader(process.stderr, self._on_stderr),
        ]
        limits = self._sandbox.limits
        self._send(
            {
                "load": rule.to_json(),
                "confinement": launch.confinement,
                "limits": limits.model_dump(),
            }
        )
        await self._await_ready(rule, limits.start_deadline_s)

    async def _await_ready(self, rule: RewardRule, deadline_s: float) -> None:
        files = ", ".join(f.path or f.module for f in rule.functions)
        try:
            async with asyncio.timeout(deadline_s):
                while not self._messages:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            line = await self.current_line()
            raise ConfigError(f"{files} did not load within {deadline_s:g} s{line}") from None
        message = self._messages.popleft()
        if message is None:
            code = await self.kill()
            text = f"{files} ended the scoring process while being loaded: {self.exit_reason(code)}"
            # Out of memory or an operator: the file may be good, so that a retry makes sense.
            raise (InfraError if code == -signal.SIGKILL else ConfigError)(text)
        if isinstance(message, dict) and "refused" in message:
            raise ConfigError(printable(str(message["refused"])))
        try:
            self.concurrent, self.batched = bool(message["concurrent"]), bool(message["batched"])
        except (KeyError, TypeError):
            await self.kill()
            raise ConfigError(
                f"{files} wrote into the scoring process's pipe while being loaded"
            ) from None

    def _on_stdout(self, data: bytes) -> None:
        if not data:
            self._end_of_pipe()
        if self.breach:
            return
        try:
            messages = self._decoder.feed(data) if data else [None]
        except CorruptError as error:
            self.kill_for(f"wrote into the pipe of the scoring process: {error}")
        else:
            if data and messages:
                self._output.printed = 0  # a sample is done
            self._unread = self._unread + len(data) if self._messages else len(data)
            if self._unread > MAX_UNREAD:
                self.kill_for("wrote into the pipe of the scoring process without end")
            else:
                self._messages.extend(messages)
        self._wake.set()

    def _on_stderr(self, data: bytes) -> None:
        if not data:
            self._end_of_pipe()
        self._output.take(data)

    def _end_of_pipe(self) -> None:
        self._open_ends -= 1
        if self._open_ends == 0:
            self._all_closed.set()

    def _on_excess_output(self) -> None:
        self.kill_for(f"printed more than {self._sandbox.limits.output_bytes} bytes")

    def kill_for(self, breach: str) -> None:
        """Kill a process whose function broke the protocol, and ignore its further output."""
        if not self.breach:
            self.breach = breach
            self._kill_group()
            self._messages.append(None)
            self._wake.set()

    @property
    def orphans(self) -> int:
        """Number of processes that a function started and that still run; 0 outside of a strict sandbox."""
        if self._process is None or not isinstance(self._sandbox, StrictSandbox):
            return 0
        return self._sandbox.orphans(self._process.pid)

    def _send(self, message: Json) -> None:
        assert self._requests is not None
        self._requests.write(encode_frame(message))

    def score(self, encoded: Sequence[bytes]) -> None:
        """Send samples, each a JSON object with an `id`; results come as `messages`."""
        assert self._requests is not None
        body = b'{"score":[' + b",".join(encoded) + b"]}"
        self._requests.write(HEADER.pack(len(body)) + body)

    @property
    def messages(self) -> deque[Json | None]:
        """Unread messages; None stands for the end of the process."""
        return self._messages

    async def current_line(self) -> str:
        """` at file:line in function`: the line that it executes now, or an empty string."""
        if self._process is None or self._process.poll() is not None:
            return ""
        pid = self._sandbox.process(self._process.pid)
        if pid is None:
            return ""
        del self._output.tail[:]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, WHERE_SIGNAL)
        deadline = time.monotonic() + WHERE_WAIT_S
        while (line := _user_line(self._output.tail)) == "" and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return line

    def exit_reason(self, code: int | None) -> str:
        """How it ended, at which line, and the last line that it printed."""
        if self.breach:
            return self.breach
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
        self._kill_group()
        # The pipes close when the last process of the sandbox has ended, even one that left the group.
        if self._sandbox.level is Isolation.STRICT:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT_S):
                    await self._all_closed.wait()
        deadline = time.monotonic() + KILL_WAIT_S
        while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - no event tells the loop of its end
            await asyncio.sleep(0.002)
        if process.returncode is None:
            log.error("scoring process %d does not end (stuck in the kernel)", process.pid)
        if self._requests is not None:
            self._requests.close()
        for pipe in self._readers:
            pipe.close()
        if self._launch is not None:
            self._launch.discard()
        code = code if code is not None else process.returncode
        if code is not None and code > 128 and self._sandbox.level is Isolation.STRICT:
            return 128 - code  # bubblewrap reports the signal of its child as a shell does
        return code

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _user_line(dump: bytes | bytearray) -> str:
    """The innermost frame of a faulthandler dump that is neither in meshrl nor in the standard library."""
    for match in FRAME.finditer(dump.decode(errors="replace")):
        file, line, function = match.groups()
        if "/lib/python" not in file and "/rewardd/meshrl/" not in file:
            return f" at {file}:{line} in {function}"
    return ""
