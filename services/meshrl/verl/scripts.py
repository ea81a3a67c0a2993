"""From a launch script to the verl command in it.

bash runs the script in the strict sandbox, with stand-ins for what it starts (`meshrl.sandbox.commands`).
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json
from meshrl.sandbox.limits import Limits
from meshrl.sandbox.sandbox import StrictSandbox, no_bubblewrap
from meshrl.verl.programs import VerlCommand, VerlProgram, chosen

PROGRAM = "meshrl.sandbox.commands"
LIMITS = Limits(deadline_s=10.0, processes=64, open_files=256)
NO_COMMAND = (
    "no verl command found; want a line like python3 -m verl.trainer.main_ppo key=value ..."
)
BARE = ("HOME", "LANG", "PWD", "USER")
"""Variables of the user's that a script sees; it may write whatever it sees into the recipe."""
_UNREAD = re.compile(r""""(?:\\.|[^"\\])*"|'[^']*'|(?<![^\s;])#[^\n]*""")
"""Text in quotes (variables in double ones only), and comments."""
_OVERRIDE = re.compile(r"[+~\w]+\.[\w.]+=\S*")
_USES = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_SETS = re.compile(r"\b([A-Za-z_]\w*)(?:\[[^]\n]*\])?\+?=|\bfor\s+(\w+)|\$\{(\w+):?=")
_READS = re.compile(r"\b(?:read|mapfile|readarray|getopts|select|declare|local)\b([^\n;]*)")
"""Commands that set the variables among their words."""
_OF_BASH = frozenset(
    (
        "BASH_SOURCE",
        "EUID",
        "HOSTNAME",
        "PATH",
        "RANDOM",
        "SECONDS",
        "SHLVL",
        "UID",
        "OLDPWD",
        "IFS",
    )
)
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
"""Python modules that verl imports first, and that may change anything of it."""
_EXTERNAL = re.compile(rf"""\b{EXTERNAL}=["']?([\w.,/-]+)""")
GRACE_S = 20.0
"""Seconds that the sandbox may take besides the script."""


def started(
    script: str,
    environment: Mapping[str, str],
    path: Path | None = None,
    arguments: Sequence[str] = (),
) -> tuple[VerlCommand, list[str]]:
    """The command of `script` that trains, and the names of the other programs that it starts.

    Args:
        script: Its text: a launch script, a command, or its overrides alone.
        environment: Variables that it does not set itself, such as HOME.
        path: Its file; None: it has none.
        arguments: What follows the script (`$1`, `$@`). An override that it does not pass on is added.

    Raises:
        ConfigError: it cannot be run or read, or starts no program of verl's; says why and where.
    """
    if unset := unset_in_overrides(script, environment):
        names = ", ".join(f"${name}" for name in unset)
        raise ConfigError(
            f"overrides of the script have {names}, which it does not set; give each with --env NAME=VALUE"
        )
    if (why := no_bubblewrap()) is not None:
        raise ConfigError(
            f"a script runs in a sandbox, and {why}: give the command itself, after `--`, as your own shell reads it"
        )
    command, others = chosen(launched(script, environment, path, arguments))
    if command is None:
        command = VerlCommand(name="", arguments=pasted(script), program=VerlProgram())
    added = [word for word in arguments if "=" in word and word not in command.arguments]
    return replace(command, arguments=(*command.arguments, *added)), others


def external_modules(script: str) -> dict[str, str]:
    """EXTERNAL, as a script or a command sets it; empty where it does not."""
    found = _EXTERNAL.search(script)
    return {EXTERNAL: found[1]} if found else {}


def unset_in_overrides(script: str, environment: Mapping[str, str]) -> list[str]:
    """Variables in the values of dotted overrides that neither the script nor the environment sets, by name."""
    text = _UNREAD.sub(lambda found: found[0] if found[0].startswith('"') else " ", script)
    set_there = {name for found in _SETS.finditer(script) for name in found.groups() if name}
    for found in _READS.finditer(script):
        set_there |= {*re.findall(r"\w+", found[1])}
    used = {
        name
        for word in _OVERRIDE.findall(text)
        for found in _USES.finditer(word)
        for name in found.groups()
        if name
    }
    return sorted(used - set_there - environment.keys() - _OF_BASH)


def seen(environment: Mapping[str, str], passed: Sequence[str]) -> dict[str, str]:
    """BARE, and those of `passed`, each a NAME or NAME=VALUE. Raises UserError for a NAME that is not set."""
    variables = {name: environment[name] for name in BARE if name in environment}
    for word in passed:
        name, equals, value = word.partition("=")
        if not equals and name not in environment:
            raise UserError(f"--env {name}: it is not set; set it, or give --env {name}=VALUE")
        variables[name] = value if equals else environment[name]
    return variables


def pasted(script: str) -> tuple[str, ...]:
    """The words of a list of overrides alone. Raises ConfigError for another text."""
    try:
        words = tuple(shlex.split(re.sub(r"\\\r?\n", " ", script), comments=True))
    except ValueError as error:
        raise ConfigError(f"{NO_COMMAND} ({error})") from error
    if not words or not all("=" in word for word in words) or "$" in script:
        raise ConfigError(NO_COMMAND)
    return words


def launched(
    script: str, environment: Mapping[str, str], path: Path | None, arguments: Sequence[str]
) -> list[list[str]]:
    """The commands that `script` starts with Python, torchrun, Ray and the like, each a list of words.

    Raises:
        ConfigError: it ends with an error, or not in time, before it has started anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = path
        if file is None or not file.is_file() or not file.stat().st_mode & 0o004:
            # The sandbox of a service that runs as root is the user nobody.
            Path(folder).chmod(0o755)
            file = Path(folder, path.name if path is not None and path.name else "script.sh")
            file.write_text(script, encoding="utf-8")
        answer = _answer(file.absolute(), environment, arguments)
    if "refused" in answer:
        raise ConfigError(f"the sandbox does not run the script: {answer['refused']}")
    commands: list[list[str]] = answer["commands"]
    if not commands and answer["code"] != 0:
        late = f"did not end within {LIMITS.deadline_s:g} s"
        ended = late if answer["code"] is None else f"ended with exit code {answer['code']}"
        said = answer["said"].removeprefix(f"{file.absolute()}: ")
        raise ConfigError(
            f"the script {ended} and started no program{f': {said}' if said else ''}"
            f" (it sees {', '.join(BARE)}, others with --env NAME, and arguments after --)"
        )
    return commands


def _answer(file: Path, environment: Mapping[str, str], arguments: Sequence[str]) -> Json:
    launch = StrictSandbox(limits=LIMITS, readable=(file,)).launch(PROGRAM, shares=8)
    request = {
        "confinement": launch.confinement,
        "limits": LIMITS.model_dump(),
        "script": [str(file), *arguments],
        "directory": str(Path.cwd()),
        "variables": dict(environment),
    }
    try:
        done = subprocess.run(
            launch.argv,
            input=json.dumps(request).encode() + b"\n",
            capture_output=True,
            env=launch.env,
            cwd=launch.folder,
            timeout=LIMITS.deadline_s + GRACE_S,
        )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"refused": f"no answer within {LIMITS.deadline_s + GRACE_S:g} s"}
    except ValueError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return {"refused": lines[-1] if lines else f"exit code {done.returncode}"}
    finally:
        launch.discard()
