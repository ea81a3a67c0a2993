"""A weight plane in this process and replicas in processes of their own, with everything that they report."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from source import RUN, Drifting, Source

from meshrl.config.weights import WeightsConfig
from meshrl.contract.types import Version
from meshrl.weights.carrier import RunPaths
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.transport import load_transport

SCRIPT = Path(__file__).with_name("replica.py")
PATIENCE_S = 120.0


@dataclass
class Member:
    """One replica."""

    name: str
    child: asyncio.subprocess.Process
    staged: dict[str, float] = field(default_factory=dict)
    """When, by version."""
    copied: dict[str, int] = field(default_factory=dict)
    """Bytes that its process copied until then."""
    served: dict[str, float] = field(default_factory=dict)
    pause_s: dict[str, float] = field(default_factory=dict)
    hashes: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One version's way through the fleet."""

    version: str
    began: float
    """The start of its gather, by the clock of all processes."""
    prepare_s: float
    """From publishing until every engine that served it held it."""
    sync_s: float
    """… until every engine served it."""
    pause_s: float
    """The longest that an engine stood still."""


class Fleet:
    """A coordinator, and its replicas."""

    def __init__(self, config: dict[str, Any], directory: Path, *flags: str) -> None:
        self.config = WeightsConfig.model_validate(config)
        self._directory = directory
        self._flags = flags
        self.members: dict[str, Member] = {}
        self.committed: dict[str, float] = {}
        self.sources: dict[str, Source] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._step = 0

    async def start(self) -> None:
        async def on_committed(version: Version) -> None:
            async with self._changed:
                self.committed[str(version)] = time.monotonic()
                self._changed.notify_all()

        paths = RunPaths(directory=self._directory)
        self.coordinator = WeightCoordinator(
            self.config,
            run=RUN,
            epoch=1,
            transport=load_transport(self.config, paths),
            on_committed=on_committed,
        )
        await self.coordinator.start()
        self._server = grpc.aio.server()
        WeightsServicer(self.coordinator).attach(self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def close(self) -> None:
        await self.coordinator.close()
        await self._server.stop(0)
        for member in self.members.values():
            if member.child.returncode is None:
                member.child.kill()
        await asyncio.gather(*self._readers)

    async def join(self, *names: str) -> None:
        """Start replicas; returns once all are in the fleet, at its committed version if there is one."""
        for name in names:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                str(SCRIPT),
                f"--config={self.config.model_dump_json()}",
                f"--directory={self._directory}",
                f"--port={self.port}",
                f"--name={name}",
                *self._flags,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 20,
            )
            self.members[name] = Member(name, child)
            self._readers.append(asyncio.create_task(self._read(self.members[name])))
        await self.until(lambda: all(self._at_newest(name) for name in names))

    async def update(
        self,
        weights: Drifting,
        served_by: list[str] | None = None,
        on_bucket: Callable[[int], None] | None = None,
        gather_s: tuple[float, float] = (0.0, 0.0),
    ) -> Update:
        """Publish the next version; returns once it is committed and these (all, if not given) serve it.

        `gather_s`: what its gather takes before it is published, and while it already is.
        """
        self._step += 1
        source = weights.version(Version(1, self._step), on_bucket)
        version = str(source.manifest.version)
        self.sources = {version: source}  # the coordinator keeps what it needs
        members = [self.members[name] for name in (served_by or self.members)]
        before_s, meanwhile_s = gather_s
        began = time.monotonic()
        await asyncio.sleep(before_s)
        if meanwhile_s:
            gather = asyncio.create_task(source.gather(meanwhile_s))
            await asyncio.sleep(0)
        await self.coordinator.publish(source)
        if meanwhile_s:
            await gather
        await self.until(
            lambda: version in self.committed and all(version in m.served for m in members)
        )
        return Update(
            version,
            began,
            max(member.staged[version] for member in members) - began,
            max(member.served[version] for member in members) - began,
            max(member.pause_s[version] for member in members),
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                async with self._changed:
                    try:
                        async with asyncio.timeout(
                            0.02
                        ):  # the coordinator's own state has no event here
                            await self._changed.wait()
                    except TimeoutError:
                        continue

    def exact(self, version: str) -> bool:
        """Whether the live memory of every engine has the trainer's hashes."""
        wanted = list(self.sources[version].manifest.bucket_hashes)
        return all(member.hashes[version] == wanted for member in self.members.values())

    def strike(self, name: str, number: signal.Signals) -> None:
        self.members[name].child.send_signal(number)

    def state(self, name: str) -> str:
        views = {view.name: view for view in self.coordinator.fleet().replicas}
        return str(views[name].state) if name in views else "unknown"

    def _at_newest(self, name: str) -> bool:
        views = {view.name: view for view in self.coordinator.fleet().replicas}
        fleet = self.coordinator.fleet()
        return name in views and (fleet.committed is None or views[name].version == fleet.committed)

    async def _read(self, member: Member) -> None:
        assert member.child.stdout is not None
        async for line in member.child.stdout:
            event = json.loads(line)
            if "staged" in event:
                member.staged[event["staged"]] = event["at"]
                member.copied[event["staged"]] = event["copied"]
            else:
                member.pause_s[event["commit"]] = event["pause_s"]
                member.hashes[event["commit"]] = event["hashes"]
                member.served[event["commit"]] = event["at"]
            async with self._changed:
                self._changed.notify_all()
        await member.child.wait()


@asynccontextmanager
async def opened(
    config: dict[str, Any], directory: Path, names: list[str], *flags: str
) -> AsyncIterator[Fleet]:
    directory.mkdir(parents=True)  # noqa: ASYNC240 - before anything runs
    fleet = Fleet(config, directory, *flags)
    await fleet.start()
    try:
        await fleet.join(*names)
        yield fleet
    finally:
        await fleet.close()
