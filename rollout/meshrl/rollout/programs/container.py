"""The program `container`: the policy works in a container of its own with the tool `bash`; tests score the rest.

    box ─▶ the task's files ─▶ turns with bash (programs/tools.py) ─▶ all processes end ─▶ tests come in ─▶ reward
                                                                        │ separate: only artifacts go into
                                                                        └─▶ a new box ─▶ tests ─▶ reward

See docs/how-to/containers.md. What the policy does wrong is scored; what the task does wrong is a fault of its row.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import shlex
import tempfile
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from meshrl.common.config import read_options
from meshrl.common.container_tasks import KEY, ContainerTask
from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.rows import posted_column
from meshrl.contract.types import POSTED_REWARD, Json, PostedReward, Task, Uid
from meshrl.rollout.agents.agent import posted
from meshrl.rollout.agents.session import Gateway
from meshrl.rollout.containers.box import Box, Image
from meshrl.rollout.containers.dockerfile import Dockerfile
from meshrl.rollout.containers.pool import Pool
from meshrl.rollout.containers.proxy import HostProxy
from meshrl.rollout.containers.shell import BashTool, Shell
from meshrl.rollout.ports import Generator, Program, Rollout
from meshrl.rollout.programs.tools import ToolProgram, check
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.tools.ports import ToolConfig, ToolsConfig
from meshrl.rollout.tools.toolbox import ToolOffer

__all__ = ["BOXES", "CALLS_TOOLS", "POSTS_REWARD", "Config", "build", "check", "row_fault"]

log = logging.getLogger(__name__)

BOXES = True
"""The worker has a pool of containers."""
CALLS_TOOLS = True
"""Results of tools are messages, unless the format of its calls says otherwise."""
POSTS_REWARD = True
"""Each row comes with its reward."""
TESTS, LOGS = "/tests", "/logs/verifier"
PACKED = "/artifacts.tar"
SETUP_S = 60.0
HANGS_S = 30.0
"""Seconds beyond the limit of a command after which its box hangs."""
REWARD_BYTES = 64 << 10
ARTIFACT_BYTES = 256 << 20
"""The most bytes of artifacts that a new container gets."""
PRELOADED = "/etc/ld.so.preload"
CLEAN = {"PYTHONNOUSERSITE": "1"}
"""Environment of the tests: python reads no packages of the home folder, which are the policy's."""


class Config(ToolsConfig):
    """`rollout.program_options` for `rollout.program: container`: those of `tools`, and these."""

    tools: list[ToolConfig | str] = Field(default_factory=list)
    """Tools beside `bash`; they run outside the container."""
    root: str = ""
    """An image in place of each task's own, `host` for instance: what a task's Dockerfile sets, copies and runs is
    done in it for each row."""
    call_s: PositiveFloat = 60.0
    """Seconds that one command may take."""
    max_turns: PositiveInt | None = 64
    """Turns of the policy in one row; null: any number that fits `data.max_response_length`."""


def row_fault(extra_info: Mapping[str, Any]) -> str:
    """Why a row with this `extra_info` cannot be played; empty where it can."""
    try:
        _told(extra_info)
    except UserError as error:
        return error.message
    return ""


def build(options: Mapping[str, object], *, gateway: Gateway | None, boxes: Pool) -> Program:
    """The program. Raises ConfigError for wrong options."""
    return ContainerProgram(read_options(Config, options, where="rollout.program_options"), boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A row at work in its box."""

    task: Task
    uid: Uid
    told: ContainerTask
    box: Box
    folder: str
    """The agent and the tests begin there."""
    variables: Mapping[str, str]
    time_s: float
    """Seconds that the agent has, from now on."""


class BoxedProgram(Program):
    """One container a row: the agent's work in it, then its tests."""

    def __init__(self, root: str, boxes: Pool) -> None:
        """`root` is an image in place of each task's own."""
        self._root = root
        self._boxes = boxes

    @abstractmethod
    async def work(
        self, work: Work, engine: Generator, tokenizer: Tokenizer
    ) -> tuple[Rollout, Mapping[str, float]]:
        """Let the agent work to its end; further components of the reward."""

    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        """One row."""
        told = _told(task.extra_info)
        async with self._opened(told, task, uid) as work:
            async with self._online(work) as online:
                worked = await self.work(online, engine, tokenizer)
            await work.box.stop_processes()
            if not told.separate:
                return _scored(worked, await _reward(work))
            artifacts = await _packed(work.box, told)
        if artifacts is None:
            return _scored(worked, PostedReward(score=0.0))
        if told.tests_build:
            own = {"image": "", "build": told.tests_build, "workdir": "", "unpack": {}}
            told = told.model_copy(update=own)
        async with self._opened(told, task, uid) as work:
            if not await _unpacked(work.box, told, artifacts):
                return _scored(worked, PostedReward(score=0.0))
            return _scored(worked, await _reward(work))

    @asynccontextmanager
    async def _opened(self, told: ContainerTask, task: Task, uid: Uid) -> AsyncIterator[Work]:
        """A box with the task's files."""
        own = self._boxes.limits
        limits = own.model_copy(
            update={
                name: min(value, getattr(own, name))
                for name in ("cpus", "memory_bytes", "disk_bytes")
                if (value := getattr(told, name)) is not None
            }
        )
        async with self._boxes.box(self._image(told), row=str(uid), limits=limits) as box:
            folder, variables = told.workdir, dict(told.variables)
            if told.build and self._root:
                set_folder, set_variables = await Dockerfile(Path(told.build)).replay(box)
                folder, variables = folder or set_folder, set_variables | variables
            elif told.build and not folder:
                folder = Dockerfile(Path(told.build)).workdir
            folder = folder or "/"
            for target, source in told.unpack.items():
                await box.put(Path(source), PACKED)
                unpack = (
                    f"mkdir -p {shlex.quote(target)} && tar -xf {PACKED} -C {shlex.quote(target)}"
                )
                await _do(box, f"{unpack} && rm {PACKED}", f"{told.name}: {source}")
            await _do(box, f"mkdir -p {shlex.quote(folder)} /logs/agent", told.name)
            yield Work(
                task=task,
                uid=uid,
                told=told,
                box=box,
                folder=folder,
                variables=variables,
                time_s=min(told.agent_s or math.inf, own.time_s),
            )

    @asynccontextmanager
    async def _online(self, work: Work) -> AsyncIterator[Work]:
        """The work of an agent, which may reach the recipe's hosts; its tests may not."""
        if not (hosts := self._boxes.limits.hosts):
            yield work
            return
        async with HostProxy(hosts).serving(await work.box.listen()) as variables:
            yield replace(work, variables={**work.variables, **variables})

    def _image(self, told: ContainerTask) -> Image:
        if self._root or told.image:
            return Image(name=self._root or told.image)
        digest = hashlib.sha256(told.build.encode()).hexdigest()[:24]
        return Image(name=f"meshrl-task-{digest}", build=Path(told.build))


class ContainerProgram(BoxedProgram):
    """The agent is our own loop: the policy calls the tool `bash`."""

    def __init__(self, config: Config, boxes: Pool) -> None:
        """Raises ConfigError: an unknown format, or a function that is no tool."""
        super().__init__(config.root, boxes)
        self._config = config
        self._bash = BashTool()
        # Each row has one shell, so that calls of a row follow each other, and rows do not wait for each other.
        offer = ToolOffer(
            tool=self._bash, timeout_s=config.call_s + HANGS_S, slots=asyncio.Semaphore(1 << 16)
        )
        self._tools = ToolProgram(config, [offer])

    async def start(self) -> None:
        """Start other tools' servers. Raises ConfigError or InfraError if that fails."""
        await self._tools.start()

    async def aclose(self) -> None:
        """End them."""
        await self._tools.aclose()

    async def work(
        self, work: Work, engine: Generator, tokenizer: Tokenizer
    ) -> tuple[Rollout, Mapping[str, float]]:
        """Turns with the tool. Raises UserError: its container has no bash."""
        probe = ["bash", "-c", ":"]
        tried = await work.box.run(probe, timeout_s=SETUP_S, variables=work.variables)
        if tried.exit_code != 0:
            said = tried.output.decode(errors="replace").strip()
            raise UserError(f"{work.told.name}: its container has no bash for the policy: {said}")
        until = time.monotonic() + work.time_s
        shell = Shell(work.box, work.folder, work.variables, self._config.call_s, until)
        self._bash.shells[work.uid] = shell
        try:
            rollout = await self._tools(work.task, work.uid, engine, tokenizer)
        finally:
            del self._bash.shells[work.uid]
        return rollout, {"calls": float(shell.calls)}


def _told(extra_info: Mapping[str, Any]) -> ContainerTask:
    """The task of a row. Raises UserError."""
    given = extra_info.get(KEY)
    if not isinstance(given, Mapping):
        raise UserError(
            f"extra_info.{KEY} is {given!r:.40}; want a task: a folder in Harbor's format, or data.reader: swe"
        )
    return read_options(ContainerTask, given, where=f"extra_info.{KEY}")


def _scored(worked: tuple[Rollout, Mapping[str, float]], reward: PostedReward) -> Rollout:
    rollout, counted = worked
    column = posted_column(replace(reward, components={**reward.components, **counted}))
    return replace(rollout, columns={**rollout.columns, POSTED_REWARD: column})


async def _reward(work: Work) -> PostedReward:
    """Put the tests in, run them, and read the reward.

    Raises:
        UserError: the tests write no reward; names their task.
    """
    box, told = work.box, work.told
    try:
        await _put_tests(box, told)
    except UserError as error:
        log.info("%s: scored 0, the agent left no place for its tests: %s", told.name, error)
        return PostedReward(score=0.0, components={"tests_refused": 1.0})
    done = await box.run(
        ["/bin/sh", "-c", f"chmod +x {TESTS}/test.sh; exec {TESTS}/test.sh"],
        timeout_s=told.tests_s,
        folder=work.folder,
        variables={**work.variables, **CLEAN, **told.test_variables},
    )
    await box.stop_processes()
    if done.timed_out:
        return PostedReward(score=0.0, components={"tests_timed_out": 1.0})
    for name, read in (("reward.json", _numbers), ("reward.txt", float)):
        file = f"{LOGS}/{name}"
        try:
            reward = posted(read(await box.get(file, REWARD_BYTES)))
        except NotFoundError:
            continue
        except (UserError, ValueError, RecursionError) as error:
            raise UserError(f"the tests of {told.name}: {file}: {error}") from error
        assert reward is not None
        return reward
    return PostedReward(score=float(done.exit_code == 0))


async def _put_tests(box: Box, told: ContainerTask) -> None:
    """Raises UserError where the box does not take them."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        tests = await asyncio.to_thread(_make_tests, made, told)
        # The folder is replaced, whatever the policy made of it, and without a program of the box's.
        for source, target in ((made / "empty", LOGS), (tests, TESTS), (made / "none", PRELOADED)):
            await box.put(source, target)


def _make_tests(made: Path, told: ContainerTask) -> Path:
    """The folder of the tests; beside it `empty`, a folder, and `none`, a file."""
    (made / "empty").mkdir()
    (made / "none").touch()
    if told.tests:
        return Path(told.tests)
    tests = made / "tests"
    tests.mkdir()
    for name, text in told.test_files.items():
        (tests / name).write_text(text)
    return tests


def _numbers(text: bytes) -> dict[str, Json]:
    """`reward.json`. Raises ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict) or "reward" not in found:
        raise ValueError(f"{found!r:.60}, want an object with reward")
    reward = found.pop("reward")
    return {**found, "score": reward}


async def _packed(box: Box, told: ContainerTask) -> bytes | None:
    """The artifacts as a tar file, made by the policy's own tar: nothing but data; None: there are none."""
    without = " ".join(f"--exclude={shlex.quote(path.lstrip('/'))}" for path in told.kept)
    tar = f"tar -cf {PACKED} -C / --ignore-failed-read {without} -- {_relative(told.artifacts)}"
    await box.run(["/bin/sh", "-c", f"rm -rf {PACKED}; {tar}"], timeout_s=SETUP_S)
    try:
        return await box.get(PACKED, ARTIFACT_BYTES)
    except (NotFoundError, UserError) as error:
        log.info("%s: scored 0, its artifacts cannot be had: %s", told.name, error)
        return None


async def _unpacked(box: Box, told: ContainerTask, artifacts: bytes) -> bool:
    """Put the artifacts in place of what the new box has there, and nothing else that the tar file may hold.

    False: that is impossible, as the policy left them.
    """
    with tempfile.NamedTemporaryFile() as file:
        await asyncio.to_thread(file.write, artifacts)
        file.flush()
        await box.put(Path(file.name), PACKED)
    names, kept = _relative(told.artifacts), _relative(told.kept)
    script = f"rm -rf -- {names}; tar -xf {PACKED} --no-same-owner -- {names}; rm {PACKED}"
    if kept:
        save = f"tar -cf /kept.tar --ignore-failed-read -- {kept} 2>/dev/null"
        script = f"{save}; {script}; rm -rf -- {kept} && tar -xf /kept.tar && rm /kept.tar"
    try:
        await _do(box, f"cd /; {script}", told.name)
    except UserError as error:
        log.info("scored 0: %s", error)
        return False
    return True


def _relative(paths: Sequence[str]) -> str:
    return " ".join(shlex.quote(path.strip("/")) for path in paths)


async def _do(box: Box, script: str, what: str) -> None:
    """Raises UserError where it ends with another exit code than 0."""
    done = await box.run(["/bin/sh", "-c", script], timeout_s=SETUP_S)
    if done.exit_code != 0:
        said = done.output.decode(errors="replace").strip()[-400:]
        raise UserError(f"{what} cannot be set up in its container: {said or done.exit_code}")
