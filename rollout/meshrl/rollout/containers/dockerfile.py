"""The steps of a small Dockerfile, done in a box that starts from another root.

So bubblewrap, which builds nothing, plays tasks whose Dockerfile only sets a folder and variables, copies files and
runs commands. They are done for each row anew: what takes long belongs into the root.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from meshrl.contract.errors import UserError
from meshrl.rollout.containers.box import VARIABLES, Box

IGNORED = ("FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "SHELL")
STEP_S = 600.0
COPIED = "/.copied"
"""A folder that is copied lies there before it is merged with its target."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
QUOTED_DOLLAR = re.compile(r"\\\$|'[^']*\$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction."""

    where: str
    """`file:line`."""
    name: str
    rest: str

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """The words after its name, with the values of variables. Raises UserError."""
        try:
            words = shlex.split(self.rest)
        except ValueError as error:
            raise UserError(f"{self.where}: {self.name} {self.rest}: {error}") from error
        if QUOTED_DOLLAR.search(self.rest) or any("$" in VARIABLE.sub("", word) for word in words):
            raise UserError(
                f"{self.where}: {self.name} {self.rest}: want variables as $NAME or ${{NAME}}"
            )
        known = {**VARIABLES, **variables}
        return [VARIABLE.sub(lambda m: known.get(m[1] or m[2], ""), word) for word in words]


class Dockerfile:
    """The Dockerfile of a task."""

    def __init__(self, folder: Path) -> None:
        """Read it. Raises UserError: there is none."""
        self._folder = folder
        self._file = folder / "Dockerfile"
        try:
            lines = self._file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self._file} cannot be read: {error}") from error
        self.steps: list[Step] = []
        said = ""
        for number, line in enumerate(lines, start=1):
            if line.lstrip().startswith("#") or not (said or line.strip()):
                continue
            said += line.strip()
            if said.endswith("\\"):
                said = said[:-1] + " "
                continue
            name, _, rest = said.partition(" ")
            where = f"{self._file}:{number}"
            self.steps.append(Step(where=where, name=name.upper(), rest=rest.strip()))
            said = ""

    @property
    def workdir(self) -> str:
        """The last WORKDIR; `/` where there is none. Raises UserError: only a build knows it."""
        found = PurePosixPath("/")
        for step in self.steps:
            if step.name == "WORKDIR":
                if "$" in step.rest:
                    raise UserError(f"{step.where}: WORKDIR {step.rest}: want it as workdir, too")
                found /= step.rest
        return str(found)

    async def replay(self, box: Box) -> tuple[str, dict[str, str]]:
        """Do the steps in `box`; the folder and the variables that they set.

        Raises:
            UserError: an instruction that is not done here, or a command that fails; names file and line.
        """
        folder = PurePosixPath("/")
        variables: dict[str, str] = {}
        for step in self.steps:
            match step.name:
                case "WORKDIR":
                    folder /= " ".join(step.words(variables))
                    await _run(box, step, f"mkdir -p {shlex.quote(str(folder))}", "/", {})
                case "ENV":
                    variables |= _set_by(step.words(variables))
                case "COPY":
                    await self._copy(box, step.words(variables), step, folder)
                case "RUN":
                    await _run(box, step, step.rest, str(folder), variables)
                case name if name not in IGNORED:
                    raise UserError(
                        f"{step.where}: {name} is done by a build only; want WORKDIR, ENV, COPY and RUN, or the"
                        " backend podman"
                    )
        return str(folder), variables

    async def _copy(self, box: Box, words: list[str], step: Step, folder: PurePosixPath) -> None:
        if len(words) < 2 or any(word.startswith("--") or "*" in word for word in words):
            raise UserError(f"{step.where}: COPY {step.rest}: want names of files, and one target")
        *sources, target = words
        for name in sources:
            source = (self._folder / name.lstrip("/")).resolve()
            if not source.is_relative_to(self._folder.resolve()) or not source.exists():
                raise UserError(f"{step.where}: COPY {name}: no such file in {self._folder}")
            inside = folder / target
            if not source.is_dir() and (target.endswith(("/", ".")) or len(sources) > 1):
                await box.put(source, str(inside / source.name))
            elif source.is_dir():
                await box.put(source, COPIED)
                into = shlex.quote(str(inside))
                merge = f"mkdir -p {into} && cp -a {COPIED}/. {into} && rm -rf {COPIED}"
                await _run(box, step, merge, "/", {})
            else:
                await box.put(source, str(inside))


async def _run(box: Box, step: Step, script: str, folder: str, variables: dict[str, str]) -> None:
    done = await box.run(
        ["/bin/sh", "-c", script], timeout_s=STEP_S, folder=folder, variables=variables
    )
    if done.exit_code != 0:
        said = done.output.decode(errors="replace").strip()[-400:]
        raise UserError(f"{step.where}: {step.name} ended with exit code {done.exit_code}: {said}")


def _set_by(words: list[str]) -> dict[str, str]:
    """The variables of an ENV."""
    if words and "=" not in words[0]:  # its old form: ENV NAME value
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, _, value in (word.partition("=") for word in words)}
