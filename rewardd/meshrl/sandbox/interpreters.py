"""Runs Python that a policy wrote: one interpreter per episode, all in one sandbox.

    stdin  ◀── {"confinement", "limits", "imports"}, then {"id", "episode", "code"} for each run, {"end": episode}
    stdout ──▶ {"ready"} or {"refused"}, then {"id", "output" | "error" | "fault"} for each run      one line each

    this process ── fork ─▶ server: reads the requests, writes the answers
     (the sandbox)          │ ▲ │
          ▲                 │ │ └── code, output: a socket of each episode ──┐
          │ "fork", a socket│ │                                              ▼
          └─────────────────┘ └── pid            fork ─▶ interpreter of episode a: reads code, keeps its variables
        zygote ──────────────────────────────────fork ─▶ interpreter of episode b

The zygote is what interpreters are copies of. No request, answer or name of an episode ever comes into its memory, so
an interpreter finds none of another row in its own. It may neither make files nor start or signal processes, so that
episodes cannot reach each other. Of late runs and episodes that have ended, the zygote kills the process.

`error`: what became of the interpreter (late, crashed); `fault`: the sandbox has no room for one. A fork costs a
few milliseconds, a sandbox for each episode would cost a tenth of a second or more. When the server or the zygote
dies, the other one ends, and so the sandbox.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import random
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import NoReturn

from meshrl.contract.types import Json
from meshrl.sandbox import confinement
from meshrl.sandbox.program import confine_program

CHUNK = 1 << 16
MAX_OUTPUT = 1 << 15
"""Characters of a run's output that are kept: half from its beginning, half from its end."""
MAX_REPLY_BYTES = 1 << 20
"""A longer reply did not come from our code."""
OPEN_FILES = 64
FILE = "<python>"
NUMBER = struct.Struct("<q")
"""Messages between server and zygote, beside a socket: FORK, or a pid that is to end; a pid, or how it ended."""
FORK = 0


class Zygote:
    """The process that interpreters are forked from, as the server sees it."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def fork(self, end: socket.socket) -> int:
        """An interpreter that talks by `end`; its pid. Raises OSError where there is no room for one."""
        socket.send_fds(self._link, [NUMBER.pack(FORK)], [end.fileno()])
        pid = self._answer()
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def end(self, pid: int) -> int:
        """Kill an interpreter, unless it has ended by itself; how it ended, as `os.waitpid` says it."""
        self._link.send(NUMBER.pack(pid))
        return self._answer()

    def _answer(self) -> int:
        found = self._link.recv(NUMBER.size)
        if not found:
            sys.exit("the zygote has ended")
        number: int = NUMBER.unpack(found)[0]
        return number


def fork_interpreters(link: socket.socket) -> None:
    """Serve as the zygote: do what the server at the other end of `link` says, until it ends."""
    while True:
        said, ends, _, _ = socket.recv_fds(link, NUMBER.size, 1)
        if not said:
            return
        pid: int = NUMBER.unpack(said)[0]
        if pid == FORK:
            try:
                answer = os.fork()
            except OSError as error:
                answer = -(error.errno or 1)
            else:
                if answer == 0:
                    interpret(ends[0])
        else:
            # It may have closed its socket and continue. One that has ended keeps its status until it is waited for.
            os.kill(pid, signal.SIGKILL)
            _, answer = os.waitpid(pid, 0)
        for end in ends:
            os.close(end)
        link.send(NUMBER.pack(answer))


class Episode:
    """The process of one episode, as this process sees it."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.end = end
        self.run: Json = None
        """The id of what it runs; None: nothing."""
        self.deadline = float("inf")
        self.unsent = b""
        self.reply = b""


class Interpreters:
    """Starts, feeds and ends the processes of the episodes; one thread, no wait without a deadline."""

    def __init__(self, zygote: Zygote, deadline_s: float) -> None:
        self._zygote = zygote
        self._deadline_s = deadline_s
        self._episodes: dict[str, Episode] = {}
        self._selector = selectors.DefaultSelector()
        self._requests = b""

    def serve(self) -> None:
        """Answer requests until there are no more."""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            soonest = min((each.deadline for each in self._episodes.values()), default=float("inf"))
            left = None if soonest == float("inf") else max(0.0, soonest - time.monotonic())
            for key, events in self._selector.select(left):
                if key.fd == 0:
                    if not self._read_requests():
                        return
                elif self._episodes.get(key.data) is not None:
                    self._exchange(key.data, events)
            for name, episode in list(self._episodes.items()):
                if episode.deadline <= time.monotonic():
                    self._end(name, f"timed out after {self._deadline_s:g} s")

    def _read_requests(self) -> bool:
        """False at their end."""
        data = os.read(0, CHUNK)
        *lines, self._requests = (self._requests + data).split(b"\n")
        for request in map(json.loads, lines):
            if "end" in request:
                self._end(request["end"], "")
            else:
                self._run(request)
        return bool(data)

    def _run(self, request: Json) -> None:
        name = request["episode"]
        try:
            episode = self._episodes.get(name) or self._start(name)
        except OSError as error:
            reply(id=request["id"], fault=f"no interpreter can be started: {error}")
            return
        if episode.run is not None:
            reply(id=request["id"], error="the episode's last run has not ended")
            return
        episode.run = request["id"]
        episode.deadline = time.monotonic() + self._deadline_s
        episode.unsent += json.dumps(request["code"]).encode() + b"\n"
        self._selector.modify(episode.end, selectors.EVENT_READ | selectors.EVENT_WRITE, name)

    def _start(self, name: str) -> Episode:
        ours, theirs = socket.socketpair()
        try:
            pid = self._zygote.fork(theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        episode = self._episodes[name] = Episode(pid, ours)
        episode.unsent = json.dumps(name).encode() + b"\n"
        self._selector.register(ours, selectors.EVENT_READ, name)
        return episode

    def _exchange(self, name: str, events: int) -> None:
        """Send what is left of the code, read what is there of the reply."""
        episode = self._episodes[name]
        try:
            if events & selectors.EVENT_WRITE:
                episode.unsent = episode.unsent[episode.end.send(episode.unsent) :]
                if not episode.unsent:
                    self._selector.modify(episode.end, selectors.EVENT_READ, name)
            data = episode.end.recv(CHUNK) if events & selectors.EVENT_READ else None
        except OSError:
            data = b""
        if data is None:
            return
        episode.reply += data
        if not data:
            self._end(name, "")
        elif episode.run is None or len(episode.reply) > MAX_REPLY_BYTES:
            self._end(name, "it wrote into the pipe of its interpreter")
        elif episode.reply.endswith(b"\n"):
            self._pass_on(name, episode)

    def _pass_on(self, name: str, episode: Episode) -> None:
        """Pass the run's output on; code that forges it in the pipe deceives only the policy that wrote the code."""
        try:
            output = json.loads(episode.reply)
        except ValueError:
            output = None
        if not isinstance(output, str):
            self._end(name, "it wrote into the pipe of its interpreter")
            return
        readable = output[: 2 * MAX_OUTPUT].encode("utf-8", "replace").decode()
        reply(id=episode.run, output=readable)
        episode.run, episode.deadline, episode.reply = None, float("inf"), b""

    def _end(self, name: str, why: str) -> None:
        """Kill an episode's process, and answer its run."""
        episode = self._episodes.pop(name, None)
        if episode is None:
            return
        self._selector.unregister(episode.end)
        episode.end.close()
        status = self._zygote.end(episode.pid)
        if episode.run is not None:
            code = os.waitstatus_to_exitcode(status)
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            reply(
                id=episode.run,
                error=f"{why or f'the interpreter ended ({how})'}; its variables are lost",
            )


class BoundedOutput(io.TextIOBase):
    """The output of a run: its beginning and its end."""

    def __init__(self) -> None:
        self._head = self._tail = ""
        self._left_out = 0

    def write(self, text: str) -> int:
        """Any amount."""
        kept = text[: MAX_OUTPUT // 2 - len(self._head)]
        self._head += kept
        tail = self._tail + text[len(kept) :]
        self._left_out += max(0, len(tail) - MAX_OUTPUT // 2)
        self._tail = tail[-(MAX_OUTPUT // 2) :]
        return len(text)

    def writable(self) -> bool:
        """Yes."""
        return True

    def text(self) -> str:
        """The text, with a mark where its middle was left out."""
        gap = f"\n... {self._left_out} characters ...\n" if self._left_out else ""
        return self._head + gap + self._tail


def interpret(fd: int) -> NoReturn:
    """The process of an episode: run each line of code that arrives after its name, in one namespace."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.dup2(fd, 3)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        confine_program()
        sys.modules["__main__"] = module = ModuleType("__main__")
        with open(3, "rb", closefd=False) as requests, open(3, "wb", 0, closefd=False) as replies:
            random.seed(json.loads(requests.readline()))
            for line in requests:
                said = json.dumps(run(json.loads(line), module)).encode() + b"\n"
                while said:
                    said = said[replies.write(said) :]
        code = 0
    finally:
        os._exit(code)


def run(code: str, module: ModuleType) -> str:
    """Run `code` and return its output, the value of an expression at its end, and the exception that ended it."""
    output = BoundedOutput()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            tree = ast.parse(code, FILE)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, FILE, "exec"), module.__dict__)
            if isinstance(last, ast.Expr):
                shown = eval(compile(ast.Expression(last.value), FILE, "eval"), module.__dict__)
                output.write("" if shown is None else f"{shown!r}\n")
        except SystemExit:
            pass
        except BaseException as error:
            output.write("".join(_told(error)))
    return output.text()


def _told(error: BaseException) -> Iterator[str]:
    """The line of the code, and the error: no frame of ours."""
    error.__context__ = error.__cause__ = None
    told = traceback.TracebackException.from_exception(error, limit=-1)
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == FILE
    ]
    if lines:
        yield f"line {lines[-1]}: "
    yield from told.format_exception_only()


def reply(**message: Json) -> None:
    """One line to the service, whole."""
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]


def main() -> None:
    """Confine this process, import what the recipe names, then serve."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        settings = json.loads(stdin.readline())
    try:
        confinement.confine(settings["confinement"], settings["limits"])
        for name in settings["imports"]:
            importlib.import_module(name)
    except Exception as error:
        reply(refused=f"{type(error).__name__}: {error}")
        return
    ours, theirs = socket.socketpair()
    if (server := os.fork()) == 0:
        theirs.close()
        reply(ready=True)
        Interpreters(Zygote(ours), settings["limits"]["deadline_s"]).serve()
        return
    ours.close()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # the requests and answers are the server's
        os.dup2(null, standard)
    fork_interpreters(theirs)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) and 1)


if __name__ == "__main__":
    main()
