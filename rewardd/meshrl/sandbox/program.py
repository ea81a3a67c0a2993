"""Runs one program that the policy wrote: reads one request on stdin, writes the program's output to stdout.

    {"program", "memory_bytes"} with {"stdin"} | {"call", "arguments"} | {"before", "test", "word"}

`word` is printed when the tests have passed. The tests share a process with the program, so a program that looks
for the word can find it. Requests with `stdin` or `call` have no such secret: the caller compares their output.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import platform
import resource
import sys
from types import ModuleType
from typing import Any

from meshrl.sandbox import landlock, seccomp

MAX_OUTPUT = 1 << 20
"""Bytes that a program may print."""


def main() -> None:
    """Run the request; the exit code is 0 when nothing was raised."""
    request = json.loads(sys.stdin.buffer.read())
    bound = request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    confine_program()
    sys.stdin = io.TextIOWrapper(io.BytesIO(request.get("stdin", "").encode()), encoding="utf-8")
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    source = request.get("before", "") + request["program"]
    if "test" in request:
        _test(request, module)
    elif "call" in request:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, "program.py", "exec"), module.__dict__)
            result = _callable(module, request["call"])(*request["arguments"])
        print("\n" + json.dumps(result))
    else:
        with contextlib.suppress(SystemExit):  # a program may call sys.exit when it is done
            exec(compile(source, "program.py", "exec"), module.__dict__)
    sys.stdout.flush()


def confine_program() -> None:
    """Let this process neither start nor signal another one, and leave no file to later ones; it cannot be undone.

    They would find its answers there, or a full /tmp. Raises OSError.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT, MAX_OUTPUT))
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    if files := landlock.version():
        ctypes.CDLL(None).prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        landlock.restrict(["/"], [os.devnull])
    filter_ = seccomp.program(platform.machine(), alone_pid=os.getpid(), creates_files=bool(files))
    if filter_ is not None and seccomp.available():
        seccomp.install(filter_)


def _test(request: dict[str, str], module: ModuleType) -> None:
    word, test = request.pop("word"), request.pop("test")
    program, before = request["program"], request["before"]
    # A completion continues where the prompt ends; a whole program repeats it.
    try:
        code = compile(before + program, "program.py", "exec")
    except SyntaxError:
        code = compile(before + "    pass\n" + program, "program.py", "exec")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, module.__dict__)
        exec(compile(test, "test.py", "exec"), module.__dict__)
    print("\n" + word)


def _callable(module: ModuleType, name: str) -> Any:
    """The function, or the method of LeetCode's `Solution`."""
    if not hasattr(module, name) and hasattr(module, "Solution"):
        return getattr(module.Solution(), name)
    return getattr(module, name)


if __name__ == "__main__":
    main()
