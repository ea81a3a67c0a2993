"""A weight plane behind a real gRPC server and its agents with stub engines, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import grpc

from meshrl.config.weights import WeightsConfig
from meshrl.contract.types import OnUpdate, Version
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.testing.weights import HashSink, StubSource
from meshrl.weights.carrier import Place
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.fleet import ReplicaState
from meshrl.weights.replica_controller import ReplicaController
from meshrl.weights.servicer import WeightsServicer

from ..waiting import until

RUN = "weights-test"


class Fleet:
    """A plane behind a server, and agents with stub engines."""

    def __init__(self, config: WeightsConfig, directory: Path, epoch: int, port: int) -> None:
        self.config = config
        self.place = Place(directory=directory)
        self.epoch = epoch
        self.port = port
        self.published: list[Version] = []
        self.agents: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._planes = AsyncExitStack()
        await self.open_plane()
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self.agents.values():
            task.cancel()
        await asyncio.gather(*self.agents.values(), return_exceptions=True)
        await self.close_plane()

    async def open_plane(self) -> None:
        async def on_committed(version: Version) -> None:
            self.published.append(version)

        self.plane = WeightCoordinator(
            self.config, run=RUN, epoch=self.epoch, place=self.place, on_committed=on_committed
        )
        await self.plane.start()
        settings = ServerSettings(port=self.port, metrics_port=None, drain_grace_s=0)
        self.server = await self._planes.enter_async_context(
            GrpcServer(settings, [WeightsServicer(self.plane)])
        )
        self.port = self.server.port

    async def close_plane(self) -> None:
        await self.plane.close()
        await self._planes.aclose()

    def join(
        self,
        name: str,
        engine: HashSink | None = None,
        run: str = RUN,
        directory: Path | None = None,
    ) -> HashSink:
        engine = engine or HashSink()
        agent = ReplicaController(
            self.config,
            run=run,
            replica=name,
            engine=engine,
            on_update=OnUpdate.IN_FLIGHT,
            place=Place(directory=directory) if directory else self.place,
            connect=lambda: grpc.aio.insecure_channel(f"127.0.0.1:{self.port}"),
        )
        self.agents[name] = asyncio.create_task(agent.run())
        return engine

    async def joined(self, *names: str, **engines: HashSink) -> list[HashSink]:
        """Join them, those of `engines` with an engine of their own; the plane knows them all then."""
        made = [self.join(name) for name in names]
        made += [self.join(name, engine) for name, engine in engines.items()]
        await until(lambda: all(self.state_of(name) is not None for name in (*names, *engines)))
        return made

    async def joined_late(self, name: str) -> HashSink:
        """Join, and catch up with what the others have."""
        engine = self.join(name)
        await until(lambda: self.state_of(name) is ReplicaState.SERVING)
        return engine

    async def carry(self, source: StubSource) -> None:
        await self.plane.publish(source)
        await self.plane.drained()

    def source(self, step: int) -> StubSource:
        return StubSource(RUN, Version(self.epoch, step))

    def state_of(self, name: str) -> ReplicaState | None:
        return next((view.state for view in self.plane.fleet().replicas if view.name == name), None)

    def reason_of(self, name: str) -> str:
        return next(view.reason for view in self.plane.fleet().replicas if view.name == name)


@asynccontextmanager
async def opened(carrier: str, directory: Path, /, **options: object) -> AsyncIterator[Fleet]:
    # No GPU is needed: the carrier's processes speak through sockets here.
    options = {
        "nccl": {"library": "stub"},
        "ipc": {"library": "stub"},
        **({"directory": str(directory / "objects")} if carrier == "object" else {}),
        **options,
    }
    config = WeightsConfig.model_validate({"carrier": carrier, **options})
    async with Fleet(config, directory, epoch=1, port=0) as fleet:
        yield fleet


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte at `at`."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
