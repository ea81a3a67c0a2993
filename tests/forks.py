"""Python processes of tests as forks of one that has imported the product: each would import torch anew for seconds.

    test ──▶ subprocess.Popen ──socket──▶ fork server (imports once) ──fork twice──▶ `python -m meshrl.cli up …`
                                                                                       └─fork──▶ its preloaders

`install` changes `subprocess.Popen`, and with it `asyncio.create_subprocess_exec`, for the commands that `_program`
names. The process is a child of the test all the same, with the files, environment, directory and arguments that it
asked for. Where a fork could differ, and until the server is ready, a fresh interpreter starts; with `TEST_FORKS=0`
in the environment always: for tests of the start itself, and for whoever doubts a result.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshrl import cli
from meshrl.common.python_process import PYTHON
from meshrl.launcher import preloader, preloading

ROOT = Path(__file__).parent.parent
MODULES = (
    "meshrl.cli.commands.up",
    "meshrl.cli.demo.command",
    "meshrl.http.rewards.app",
)
"""Modules that the server imports beside those of the preloaders."""
READ_AT_IMPORT = (
    "CUDA",
    "GRPC",
    "HF_",
    "LD_",
    "MALLOC",
    "MKL",
    "OMP",
    "OPENBLAS",
    "PYTHON",
    "TORCH",
    "TRANSFORMERS",
)
"""Variables that a library or the loader has read before a fork could change them."""
READ_LATER = {"TORCHINDUCTOR_CACHE_DIR"}
"""Among them, what torch itself sets in a process that imports enough of it: to what it takes without."""
REQUEST_BYTES = 1 << 17
SWITCH = "TEST_FORKS"

_exec: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_exec)


class ForkServer:
    """The test's end. Its process ends with the test's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = False
        self._control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(end.fileno()), preloader.PADDING],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env=self._env,
                pass_fds=[end.fileno()],
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        more: Mapping[str, Any],
        files: Sequence[int],
    ) -> int | None:
        """The process id of a child of this process that runs `argv`; None where only a fresh interpreter will do."""
        changed = {
            name for name in env.keys() | self._env.keys() if env.get(name) != self._env.get(name)
        } - READ_LATER
        if argv[1:3] == ["-m", "meshrl.cli"]:
            changed.discard("PYTHONPATH")
        if any(name.startswith(READ_AT_IMPORT) for name in changed):
            return None
        with self._lock:
            try:
                if not self._ready:
                    if not select.select([self._control], [], [], 0)[0]:
                        return None
                    self._ready = bool(self._control.recv(1))
                request = {"argv": argv, "env": dict(env), "parent": os.getpid(), **more}
                preloading._adopt_orphans(True)
                socket.send_fds(self._control, [json.dumps(request).encode()], files)
                return int(self._control.recv(64)) or None
            except (OSError, ValueError):
                return None
            finally:
                preloading._adopt_orphans(False)


_server: ForkServer | None = None


def install() -> None:
    """Let this process's children be forks where they can be."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def _execute_child(popen: Any, *args: Any, **kwargs: Any) -> None:
    """Instead of the method of `subprocess.Popen`, in a test."""
    global _server
    call = _signature.bind(popen, *args, **kwargs).arguments
    env = dict(os.environ) if call["env"] is None else call["env"]
    pid = None
    if env.get(SWITCH) != "0" and not call["pass_fds"] and _program(call) is not None:
        if _server is None:
            _server = ForkServer()
        pid = _server.fork(*_request(call, env))
    if pid is None:
        _exec(popen, *args, **kwargs)
    else:
        _started(popen, call, pid)


def _fork_preloader(popen: Any, *args: Any, **kwargs: Any) -> None:
    """Instead of that method, in a fork: the preloaders of `meshrl up` need not import anything again."""
    call = _signature.bind(popen, *args, **kwargs).arguments
    if _program(call) != "meshrl.launcher.preloader":
        _exec(popen, *args, **kwargs)
        return
    argv, env, more, files = _request(call, call["env"])
    ready, begun = os.pipe()
    if pid := os.fork():
        os.close(begun)
        os.read(ready, 1)  # it has its session: whoever started it may kill its group from now on
        os.close(ready)
        _started(popen, call, pid)
    else:
        os.close(ready)
        if more["session"]:
            os.setsid()
        os.close(begun)
        for descriptor in call["pass_fds"]:
            os.set_inheritable(descriptor, True)
        _run({"argv": argv, "env": env, **more}, files)


def _program(call: Mapping[str, Any]) -> str | None:
    """The module or script of a command `python [-P] [-m] …` or `PYTHON …` of ours; None for any other."""
    argv = [os.fspath(word) for word in call["args"]] if not isinstance(call["args"], str) else []
    if argv[:1] != [sys.executable] or call["preexec_fn"] is not None or call["shell"]:
        return None
    if any(
        call[name] not in (None, -1)
        for name in call
        if name.endswith(("gid", "gids", "uid", "umask"))
    ):
        return None
    words = _words(argv)
    if (
        words[0] == "-m"
        and words[1].startswith(("meshrl.", "tests.", "deploy."))
        and words[1] != __name__
    ):
        return words[1]
    ours = (f"{ROOT}/tests/", f"{ROOT}/docs/examples/")
    return words[0] if words[0].startswith(ours) else None


def _words(argv: Sequence[str]) -> Sequence[str]:
    """`-m MODULE …` or `FILE …` of a command of this Python."""
    if tuple(argv[: len(PYTHON)]) == PYTHON:
        words = argv[len(PYTHON) :]
        return words if words[0].endswith(".py") else ["-m", *words]
    return argv[2:] if argv[1] == "-P" else argv[1:]


def _request(
    call: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[list[str], Mapping[str, str], dict[str, Any], list[int]]:
    more = {
        "cwd": str(Path(call["cwd"] or ".").absolute()),
        "session": bool(call["start_new_session"]),
    }
    given = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
    return (
        [os.fspath(word) for word in call["args"]],
        env,
        more,
        [own if own != -1 else number for number, own in enumerate(given)],
    )


def _started(popen: Any, call: Mapping[str, Any], pid: int) -> None:
    popen.pid, popen._child_created = pid, True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(call[name] for name in pipes))


# --- in the server, and in its forks


def main() -> None:
    """Import, then fork on request until the test ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for module in (*preloader.LIGHT, *preloader.TORCH, *MODULES):
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    subprocess.Popen._execute_child = _fork_preloader  # type: ignore[attr-defined]
    control.send(b"r")
    while True:
        message, files, _, _ = socket.recv_fds(control, REQUEST_BYTES, 3)
        if not message:
            return
        request = json.loads(message)
        go, go_in = os.pipe()
        if (between := os.fork()) == 0:
            preloader._end_unless_forked_again()
            os.close(go_in)
            os.read(go, 1)  # from here on its parent is the test
            os.close(go)
            if os.getppid() != request["parent"]:
                os._exit(1)
            if request["session"]:
                os.setsid()
            control.send(str(os.getpid()).encode())
            control.close()
            _run(request, files)
        if os.waitpid(between, 0)[1] != 0:
            control.send(b"0")  # no room for another process now
        for descriptor in (go, go_in, *files):
            os.close(descriptor)


def _run(request: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, to its end."""
    code = 1
    try:
        for number, descriptor in enumerate([os.dup(descriptor) for descriptor in files]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        tempfile.tempdir = None
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        argv = request["argv"]
        preloader.show_command_line(argv)
        sys.orig_argv = list(argv)
        words = _words(argv)
        sys.path[:1] = (
            []
            if "-P" in argv[: -len(words)]
            else [request["cwd"] if words[0] == "-m" else str(Path(words[0]).parent)]
        )
        _add_python_path()
        _main(words)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


def _add_python_path() -> None:
    """Find what PYTHONPATH names without the new start of `meshrl`, which would be a fresh interpreter."""
    if named := os.environ.get("PYTHONPATH"):
        sys.path += [folder for folder in named.split(os.pathsep) if folder not in sys.path[1:]]
        cli.start_again = lambda module: None


def _main(words: Sequence[str]) -> None:
    if words[0] == "-m":
        sys.argv[:] = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
