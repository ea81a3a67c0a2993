"""The tool `bash`: commands of the policy in its row's box, as in one shell.

A call is a bash of its own. It begins with what the one before it left: folder, variables, functions, options.
Nothing runs between two calls but what a command put into the background, so a shell cannot hang.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from meshrl.contract.errors import InfraError
from meshrl.contract.types import Json, Uid
from meshrl.rollout.containers.box import Box
from meshrl.rollout.tools.ports import Tool, ToolCaller, ToolError

STATE = "/tmp/.shell"
RESUME = """
__keep() {
    { set +o; shopt -p; printf 'umask %s\\n' "$(umask)"; declare -f; alias -p
      compgen -v | while read -r __name; do
          case $__name in
              BASH*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|RANDOM|SECONDS) ;;
              SHELLOPTS|SHLVL|SRANDOM|UID|_|__name) ;;
              *) declare -p "$__name" ;;
          esac
      done
      printf 'cd -- %q\\n' "$PWD"; } > "$2" 2>/dev/null
}
trap '__code=$?; set +eux; __keep 0 "'"$1"'"; exit $__code' EXIT
[ -e "$1" ] && . "$1" 2>/dev/null
eval "$2"
"""
"""Run with the file of the state and the command."""
DESCRIPTION = (
    "Run a command in bash. Folder, variables and functions stay between calls. The result is what it prints, and its"
    " exit code where that is not 0."
)


@dataclass(slots=True)
class Shell:
    """The shell of one row."""

    box: Box
    folder: str
    """The folder in which it begins."""
    variables: Mapping[str, str]
    call_s: float
    """Seconds that one command may take."""
    until: float
    """`time.monotonic` after which no command is run."""
    calls: int = 0

    async def run(self, command: str) -> str:
        """The policy's observation of a command. Raises ToolError, UnavailableError."""
        self.calls += 1
        left = min(self.call_s, self.until - time.monotonic())
        if left <= 0:
            raise ToolError("the time of this task is over: no command is run any more")
        done = await self.box.run(
            ["bash", "-c", RESUME, "bash", STATE, command],
            timeout_s=left,
            folder=self.folder,
            variables=self.variables,
        )
        said = done.output.decode(errors="replace").rstrip("\n")
        if done.timed_out:
            return f"{said}\n[ended after {left:.0f} s, its time limit]".lstrip("\n")
        if done.exit_code != 0 or not said:
            return f"{said}\n[exit code {done.exit_code}]".lstrip("\n")
        return said


class BashTool(Tool):
    """The tool: each row has a shell of its own while it is open."""

    stateful = True
    name = "bash"
    description = DESCRIPTION

    parameters: Mapping[str, Json] = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command."}},
        "required": ["command"],
    }

    def __init__(self) -> None:
        self.shells: dict[Uid, Shell] = {}

    @override
    async def call(self, arguments: Mapping[str, Json], caller: ToolCaller) -> str:
        given = {**arguments, **caller.given}
        if set(given) != {"command"} or not isinstance(given["command"], str):
            raise ToolError("bash: want one argument, command, a text")
        if "\0" in given["command"]:
            raise ToolError("bash: a command cannot have a zero byte")
        return await self.shells[caller.uid].run(given["command"])

    async def check(self, caller: ToolCaller) -> None:
        """Raise InfraError, always: the box limits a command itself, so this one hangs."""
        raise InfraError(f"the box {self.shells[caller.uid].box.name} did not answer")
