"""`python zygote.py LISTENER MODULE …`: imports a server's modules once, then forks for `sitecustomize.py`.

It runs in the server's own environment, where meshrl is not installed, and ends when its stdin does. A fork is ended
when who asked for it has gone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

REQUEST_BYTES = 1 << 17


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # another version may have moved it
            importlib.import_module(module)
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        # A look at a model's class would import vLLM once more, in a process of its own, so as not to touch a GPU.
        registry._run_in_subprocess = lambda look: look()  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    # By the file of the fork's process: who asked for it, and its number.
    asked: dict[int, tuple[socket.socket, int]] = {}
    while True:
        connections = {connection: file for file, (connection, _) in asked.items()}
        ready, _, _ = select.select([0, listener, *asked, *connections], [], [])
        if 0 in ready:
            for _, pid in asked.values():
                end_group(pid)
            return
        for each in ready:
            if each is listener:
                connection = listener.accept()[0]
                message, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
                if (pid := os.fork()) == 0:
                    os.setsid()
                    for own in (listener, connection, *(other for other, _ in asked.values())):
                        own.close()
                    run(json.loads(message), files)
                for file in files:
                    os.close(file)
                with contextlib.suppress(OSError):
                    connection.send(str(pid).encode())
                asked[os.pidfd_open(pid)] = connection, pid
            elif each in asked:
                connection, pid = asked.pop(each)
                os.close(each)
                status = os.waitpid(pid, 0)[1]
                with contextlib.suppress(OSError):
                    connection.send(str(status).encode())
                connection.close()
            elif connections[each] in asked:  # it says nothing: it has gone
                end_group(asked[connections[each]][1])


def end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run(request: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, to its end."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        tempfile.tempdir = None
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()  # type: ignore[attr-defined]
        paths = request["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        sys.argv[:] = request["command"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
