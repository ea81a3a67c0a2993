"""Tasks in Harbor's format: folders with `task.toml`, `instruction.md`, `environment/` and `tests/test.sh`.

Each becomes a row whose prompt is the instruction, for `rollout.program: container`. A folder of tasks is read in the
order of names. Format: https://www.harborframework.com/docs/tasks
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from meshrl.common.config import Environment
from meshrl.common.container_tasks import KEY, AbsolutePath, ContainerTask, PathBelowRoot
from meshrl.contract.errors import UserError

MIB = 1 << 20
FILE = "task.toml"


class _Section(BaseModel):
    """Other keys, on which nothing here depends, are allowed, as in Harbor."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class _Environment(_Section):
    docker_image: str = ""
    workdir: AbsolutePath = ""
    cpus: PositiveFloat | None = None
    memory_mb: PositiveFloat | None = None
    storage_mb: PositiveFloat | None = None
    env: Environment = Field(default_factory=dict)


class _Agent(_Section):
    timeout_sec: PositiveFloat | None = None


class _Verifier(_Section):
    timeout_sec: PositiveFloat = 600.0
    env: Environment = Field(default_factory=dict)
    environment_mode: str | None = None


class _Artifact(_Section):
    source: PathBelowRoot

    @model_validator(mode="before")
    @classmethod
    def _path(cls, given: object) -> object:
        return {"source": given} if isinstance(given, str) else given


class _Task(_Section):
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    artifacts: list[_Artifact] = Field(default_factory=list)


_REFUSED: Mapping[str, tuple[object, ...]] = {
    "steps": (None, []),
    "environment.os": (None, "linux"),
    "environment.gpus": (None, 0),
    "environment.tpu": (None,),
    "environment.network_mode": (None, "no-network", "public"),
    "environment.mcp_servers": (None, []),
    "environment.skills_dir": (None,),
    "environment.healthcheck": (None,),
    "agent.user": (None, "root", 0),
    "agent.network_mode": (None, "no-network", "public"),
    "verifier.user": (None, "root", 0),
    "verifier.network_mode": (None, "no-network", "public"),
    "verifier.environment": (None,),
    "verifier.environment_mode": (None, "shared", "separate"),
    "verifier.collect": (None, []),
}
"""Keys of which only these values are played: any other would make another task of it. A network that a task may use
is none that it needs: no container has one."""


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each task with its number, from 0: of a folder of tasks, of one task's folder, or of its `task.toml`.

    Raises:
        UserError: no task, or one that cannot be played; names the file and the key.
    """
    folder = path.parent if path.name == FILE else path
    if (folder / FILE).exists():
        tasks = [folder]
    else:
        tasks = sorted(entry for entry in folder.iterdir() if (entry / FILE).exists())
    if not tasks:
        raise UserError(f"{path} is a folder without tasks; want a file, or folders with {FILE}")
    return ((number, _row(each.resolve())) for number, each in enumerate(tasks))


def _row(folder: Path) -> dict[str, Any]:
    file = folder / FILE
    try:
        given = tomllib.loads(file.read_text())
        task = _Task.model_validate(given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        told = fault["msg"].removeprefix("Value error, ")
        raise UserError(f"{file}: {where}: {told}, got {fault['input']!r:.60}") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{file}: {error}") from error
    for key, played in _REFUSED.items():
        value: Any = given
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value not in played:
            wants = " or ".join(repr(each) for each in played if each is not None) or "none"
            raise UserError(f"{file}: {key}: {value!r:.60} is not supported; want {wants}")
    services = folder / "environment/docker-compose.yaml"
    if services.exists():
        raise UserError(f"{services}: not supported; want one container for each task")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: no such file, and a task needs one")
    try:
        instruction = (folder / "instruction.md").read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / 'instruction.md'}: {error}") from error
    if not instruction:
        raise UserError(f"{folder / 'instruction.md'}: no text, and a task needs one")
    return {
        "prompt": [{"role": "user", "content": instruction}],
        "data_source": "harbor",
        "extra_info": {KEY: _container(folder, task).model_dump(exclude_defaults=True)},
    }


def _container(folder: Path, task: _Task) -> ContainerTask:
    environment, verifier, file = task.environment, task.verifier, folder / FILE
    for key, variables in (("environment", environment.env), ("verifier", verifier.env)):
        for name, value in variables.items():
            if "${" in value:
                raise UserError(
                    f"{file}: {key}.env.{name}: {value!r:.60} is a variable of this machine, which containers do"
                    " not get; want the value itself"
                )
    build = folder / "environment"
    if not environment.docker_image and not (build / "Dockerfile").is_file():
        raise UserError(
            f"{file}: environment.docker_image: no image, and no {build / 'Dockerfile'}; want one of them"
        )
    separate = verifier.environment_mode == "separate"
    if separate and not task.artifacts:
        raise UserError(
            f"{file}: artifacts: none, and tests in a container of their own get nothing else"
        )
    own = separate and (folder / "tests/Dockerfile").exists()
    return ContainerTask(
        name=folder.name,
        image=environment.docker_image,
        build="" if environment.docker_image else str(build),
        workdir=environment.workdir,
        variables=environment.env,
        cpus=environment.cpus,
        memory_bytes=_bytes(environment.memory_mb),
        disk_bytes=_bytes(environment.storage_mb),
        agent_s=task.agent.timeout_sec,
        tests=str(folder / "tests"),
        tests_s=verifier.timeout_sec,
        test_variables=verifier.env,
        separate=separate,
        tests_build=str(folder / "tests") if own else "",
        artifacts=[each.source for each in task.artifacts],
    )


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else math.ceil(mib * MIB)
