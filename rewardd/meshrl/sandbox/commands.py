"""Runs a launch script and says which programs it starts: stand-ins write their arguments down and do nothing.

    stdin  ◀── {"confinement", "limits", "script", "directory", "variables"}                        one line
    stdout ──▶ {"commands": [[name, argument, …], …], "code", "said"} or {"refused": why}           one line

`if`, `$(…)`, arrays and `case` are bash's business. The sandbox has no file of the user's but the script. Therefore
`cd` and `pwd` only keep count of where the script believes to be, commands that are not there succeed, and so
do those that would copy, install or wait. `python3 -c` is answered by this interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from meshrl.contract.types import Json
from meshrl.sandbox import confinement

STAND_INS = ("python", "python3", "torchrun", "ray", "uv", "accelerate", "deepspeed")
KEPT = frozenset({"PATH", "BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "TMPDIR", "IFS"})
"""Variables of the sandbox's own."""
MAX_BYTES = 1 << 20
"""Most bytes of the arguments of all commands together."""

STAND_IN = """#!/bin/bash
case $1 in -c | -) exec {python} -I "$@" ;; esac
printf '%s\\0' "$#" "${{0##*/}}" "$@" >> {record}
"""
EVERY_SHELL = r"""
PWD=${SCRIPT_PWD:-/}
cd() { local to=${*: -1}; case ${to:=$HOME} in /*) ;; -) to=$PWD ;; *) to=$PWD/$to ;; esac
       PWD=$(realpath -sm -- "$to"); export SCRIPT_PWD=$PWD; }
pwd() { echo "$PWD"; }
export PYTHONPATH=${PYTHONPATH-}
for ignored in . source mkdir cp mv rm ln touch chmod sleep ulimit tee pip pip3 curl wget git; do
    eval "$ignored() { :; }"
done
command_not_found_handle() { :; }
"""


def run(script: list[str], directory: str, variables: Mapping[str, str], deadline_s: float) -> Json:
    """The commands that `script` starts, its exit code (None: it did not end in time) and the last line it printed.

    Args:
        script: The path of the file, and its arguments.
        directory: Where it believes to be started.
        variables: Its environment.
        deadline_s: Wall-clock seconds.
    """
    own = Path(os.environ["TMPDIR"], ".stand-ins")
    record, setting = own / "record", own / "every_shell"
    own.mkdir()
    record.touch()
    setting.write_text(EVERY_SHELL)
    for name in STAND_INS:
        path = own / name
        path.write_text(STAND_IN.format(python=sys.executable, record=record))
        path.chmod(0o755)
    env = {name: value for name, value in variables.items() if name not in KEPT}
    env |= {"PATH": f"{own}:{os.environ['PATH']}", "BASH_ENV": str(setting)}
    env |= {"TMPDIR": os.environ["TMPDIR"], "SCRIPT_PWD": directory, "PS4": "+ "}
    shell = subprocess.Popen(
        ["/bin/bash", *script],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=(said := (own / "said").open("w+b")),
        stderr=subprocess.STDOUT,
    )
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = shell.wait(deadline_s)
    if code is None:
        shell.kill()
    with said, record.open("rb") as written:
        said.seek(max(0, said.tell() - MAX_BYTES))
        lines = said.read(MAX_BYTES).decode(errors="replace").splitlines()
        words = written.read(MAX_BYTES).decode(errors="replace").split("\0")
    told = [line for line in lines if line.strip() and not line.startswith("+")]
    return {"commands": _commands(words), "code": code, "said": told[-1] if told else ""}


def _commands(words: list[str]) -> list[list[str]]:
    """Each command of the record: the number of its arguments, its name, its arguments. A torn end is left out."""
    commands = []
    at = 0
    while at + 1 < len(words) and words[at].isdigit():
        end = at + 2 + int(words[at])
        if end < len(words):
            commands.append(words[at + 1 : end])
        at = end
    return commands


def main() -> None:
    """Confine this process, run the script, answer."""
    request = json.loads(sys.stdin.buffer.readline())
    answer: Json
    try:
        confinement.confine(request["confinement"], request["limits"])
        answer = run(
            request["script"],
            request["directory"],
            request["variables"],
            request["limits"]["deadline_s"],
        )
    except (OSError, ValueError) as error:
        answer = {"refused": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
