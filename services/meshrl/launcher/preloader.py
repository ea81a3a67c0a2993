"""The program that imports what services import, once, and forks a process for each start of one.

    up ──exec──▶ gRPC, pydantic ─┬──────▶ light: the queue, FastAPI   ──fork twice──▶ queue, reward, feeder
                                 └─fork─▶ torch: torch, transformers  ──fork twice──▶ trainer, reference, rollout

A service becomes a child of `up`, which adopts it: the process between the two forks ends at once. Each of the two
preloaders keeps one thread, calls no gRPC and initialises no CUDA, so a fork is as good as a fresh interpreter.

consumes: requests on stdin, a socket: JSON, and the descriptor of the service's log lines. waits for: the next one.
unblocked by: the end of `up`, which closes the socket. produces: `ready`; then the process id of each service.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meshrl.common.plain_text import counted
from meshrl.common.process_guard import die_with_parent, die_with_supervisor
from meshrl.common.python_process import PYTHON
from meshrl.launcher.import_table import KeepTable

LIGHT = (
    "meshrl.cli.commands.serve",
    "meshrl.launcher.services.queue",
    "meshrl.launcher.services.reward",
    "meshrl.launcher.prompts",
    "meshrl.trainer.data.feeder",
    "meshrl.transferqueue.stores.disk",
)
"""Modules that bring the imports of services without torch; the first one is what all services need."""
TORCH = (
    "meshrl.launcher.services.trainer",
    "meshrl.launcher.services.rollout",
    "meshrl.trainer.reference.stage",
    "meshrl.rollout.engines.torch",
    "transformers.models.auto.tokenization_auto",
)
"""Modules that bring the imports of the others."""
NAME = (*PYTHON, "meshrl.launcher.preloader")
CONTROL = 0
"""The descriptor of the socket to `up`."""
READY = b"ready"
REQUEST_BYTES = 1 << 16
PADDING = "." * 4096
"""An argument that makes room for the command line of a service: see `show_command_line`."""


def main() -> None:
    """Import, fork on request, and in a fork run the service."""
    die_with_supervisor()
    descriptor, light_modules, torch_modules, _padding = sys.argv[1:]
    torch_control = socket.socket(fileno=int(descriptor))
    show_command_line((*NAME, "light"))
    # A collection during the imports finds no garbage and walks every object again: a tenth of their time.
    gc.disable()
    shared, *rest = light_modules.split(",")
    _import([shared])
    light = os.getpid()
    if os.fork() == 0:
        die_with_parent(light)
        os.dup2(torch_control.fileno(), CONTROL)
        show_command_line((*NAME, "torch"))
        sys.meta_path.insert(0, KeepTable)
        _import(torch_modules.split(","))
    else:
        _import(rest)
    torch_control.close()
    if reason := _cannot_fork():
        sys.exit(f"error: {reason}")
    # What exists now is garbage in no fork: a collection there would only copy the pages.
    gc.freeze()
    gc.enable()
    control = socket.socket(fileno=CONTROL)
    control.send(READY)
    argv = _fork_on_request(control)
    if argv is not None:
        _run(argv)


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _cannot_fork() -> str:
    """Why a fork of this process would not be like a fresh interpreter; empty where it is."""
    if threads := _other_threads():
        names = f"{counted(len(threads), 'thread')} ({', '.join(threads)})"
        return f"the imports started {names}, which a fork would not have"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports initialised CUDA, which a fork cannot use"
    return ""


def _other_threads() -> list[str]:
    """Names of this process's threads but the main one, as its libraries or Python named them."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    tasks = {int(task.name): task for task in Path("/proc/self/task").iterdir()}
    del tasks[os.getpid()]
    return [
        named.get(number) or (task / "comm").read_text().strip()
        for number, task in sorted(tasks.items())
    ]


def _fork_on_request(control: socket.socket) -> list[str] | None:
    """Fork until `up` ends; then None. Returns the command line in each fork, which is a service from then on."""
    while True:
        message, (*descriptors,), _, _ = socket.recv_fds(control, REQUEST_BYTES, 1)
        if not message:
            return None
        request = json.loads(message)
        go, go_in = os.pipe()
        between = os.fork()
        if between == 0:
            _end_unless_forked_again()
            os.close(go_in)
            # Nothing to read: the preloader has died, and `up` starts the service itself.
            if not os.read(go, 1) or os.getppid() != request["parent"]:
                os._exit(1)
            os.close(go)
            control.send(str(os.getpid()).encode())
            _detach(control, *descriptors)
            os.environ.update(request["env"])
            argv: list[str] = request["argv"]
            return argv
        os.close(go)
        _, status = os.waitpid(between, 0)
        if status == 0:
            # From here on the service is a child of `up`.
            os.write(go_in, b"g")
        else:
            control.send(b"0")
        for descriptor in (go_in, *descriptors):
            os.close(descriptor)


def _end_unless_forked_again() -> None:
    """Return in a second fork only; the process between ends, with 1 if there can be no second one."""
    try:
        ended = os.fork() != 0
    except OSError:
        os._exit(1)
    if ended:
        os._exit(0)


def _detach(control: socket.socket, lines: int) -> None:
    """Be what `up` would have started: a session of its own, nothing to read, `lines` for what it prints."""
    os.setsid()
    control.detach()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(lines, 1)
    os.dup2(lines, 2)
    os.close(nothing)
    os.close(lines)


def _run(argv: Sequence[str]) -> None:
    """Run the module behind PYTHON in `argv`, with its arguments, as the interpreter would."""
    # `random` draws a seed after a fork by itself. Torch begins with the same constant in every process.
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    show_command_line(argv)
    module, *arguments = argv[len(PYTHON) :]
    sys.orig_argv = list(argv)
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def show_command_line(argv: Sequence[str]) -> None:
    """Let `ps` show `argv`, cut where the memory of this process's own command line ends."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end in proc(5)
    room = end - start - 1
    shown = b"".join(os.fsencode(word) + b"\0" for word in argv)[: max(room, 0)]
    if room > 0:
        ctypes.memset(start, 0, room)
        ctypes.memmove(start, shown, len(shown))


if __name__ == "__main__":
    main()
