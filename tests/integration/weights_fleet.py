"""A weight plane behind a real gRPC server and its replica controllers with stub engines, in one process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import grpc

from meshrl.config.weights import WeightsConfig
from meshrl.contract.ports import Engine, WeightSink
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.weights.carrier import RunPaths
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.fleet import ReplicaReport, ReplicaState
from meshrl.weights.messages import digest
from meshrl.weights.replica_controller import ReplicaController, ServedEngine
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.transport import Transport, load_transport
from tests.doubles import nccl
from tests.doubles.weights import HashSink, StubSource

from ..waiting import until

RUN = "weights-test"


class PackedSource:
    """A version of given bytes."""

    def __init__(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        self.manifest = replace(
            manifest, run=RUN, bucket_hashes=tuple(digest(bucket) for bucket in buckets)
        )
        self._buckets = buckets

    def bucket(self, index: int) -> Uint8:
        return self._buckets[index]


class Fleet:
    """A plane behind a server, and replica controllers with stub engines."""

    def __init__(self, config: WeightsConfig, directory: Path, epoch: int, port: int) -> None:
        self.config = config
        self.paths = RunPaths(directory=directory)
        self.epoch = epoch
        self.port = port
        self.published: list[Version] = []
        self.controllers: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._coordinators = AsyncExitStack()
        await self.open_coordinator()
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self.controllers.values():
            task.cancel()
        await asyncio.gather(*self.controllers.values(), return_exceptions=True)
        await self.close_coordinator()

    async def open_coordinator(self) -> None:
        async def on_committed(version: Version) -> None:
            self.published.append(version)

        self.coordinator = WeightCoordinator(
            self.config,
            run=RUN,
            epoch=self.epoch,
            transport=load_transport(self.config, self.paths),
            on_committed=on_committed,
        )
        await self.coordinator.start()
        settings = ServerSettings(port=self.port, metrics_port=None, drain_grace_s=0)
        self.server = await self._coordinators.enter_async_context(
            GrpcServer(settings, [WeightsServicer(self.coordinator)])
        )
        self.port = self.server.port

    async def close_coordinator(self) -> None:
        await self.coordinator.close()
        await self._coordinators.aclose()

    def join(
        self,
        name: str,
        engine: HashSink | None = None,
        run: str = RUN,
        directory: Path | None = None,
        **options: Any,
    ) -> HashSink:
        """Attach an engine; `options` are those of `attach`."""
        engine = engine or HashSink()
        self.attach(name, engine, run, directory, **options)
        return engine

    def attach(
        self,
        name: str,
        engine: WeightSink,
        run: str = RUN,
        directory: Path | None = None,
        *,
        transport: Transport | None = None,
        report: Callable[[], ReplicaReport] | None = None,
        leave: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        """Join with any engine, and `options` of the ServedEngine."""
        paths = RunPaths(directory=directory) if directory else self.paths
        options = {"model_path": paths.model_path, **options}
        controller = ReplicaController(
            self.config,
            run=run,
            replica=name,
            engine=ServedEngine(engine, self.config, **options),
            transport=transport or load_transport(self.config, paths),
            connect=lambda: grpc.aio.insecure_channel(f"127.0.0.1:{self.port}"),
            report=report,
            leave=leave,
        )
        self.controllers[name] = asyncio.create_task(controller.run())

    async def until_serving(self, engine: Engine, version: Version) -> None:
        """Wait until an engine serves `version`. Raises what ended a controller meanwhile: it never would."""
        tasks = self.controllers.values()
        await until(lambda: engine.version == version or any(task.done() for task in tasks))
        for task in tasks:
            if task.done():
                task.result()

    async def joined(self, *names: str, **engines: HashSink) -> list[HashSink]:
        """Join them, those of `engines` with an engine of their own; the coordinator knows them all then."""
        sinks = [self.join(name) for name in names]
        sinks += [self.join(name, engine) for name, engine in engines.items()]
        await until(lambda: all(self.state_of(name) is not None for name in (*names, *engines)))
        return sinks

    async def joined_late(self, name: str) -> HashSink:
        """Join, and catch up with what the others have."""
        engine = self.join(name)
        await until(lambda: self.state_of(name) is ReplicaState.SERVING)
        return engine

    async def carry(self, source: StubSource) -> None:
        await self.coordinator.publish(source)
        await self.coordinator.drained()

    def source(self, step: int) -> StubSource:
        return StubSource(RUN, Version(self.epoch, step))

    def state_of(self, name: str) -> ReplicaState | None:
        return next(
            (view.state for view in self.coordinator.fleet().replicas if view.name == name), None
        )

    def moved_bytes(self) -> dict[str, int]:
        """Bytes moved for the last version, by replica."""
        return {view.name: view.moved_bytes for view in self.coordinator.fleet().replicas}

    def reason_of(self, name: str) -> str:
        return next(view.reason for view in self.coordinator.fleet().replicas if view.name == name)


@asynccontextmanager
async def opened(carrier: str, directory: Path, /, **options: object) -> AsyncIterator[Fleet]:
    """`carrier` is that of a recipe, or `disk:memory` for `disk` with a URL."""
    # No GPU is needed: the carrier's processes speak through sockets here.
    options = {
        "nccl": nccl.settings(),
        "ipc": {"library": "tests.doubles.device"},
        **({"directory": f"memory://{secrets.token_hex(4)}"} if carrier == "disk:memory" else {}),
        **options,
    }
    name = carrier.removesuffix(":memory")
    config = WeightsConfig.model_validate({"carrier": name, **options})
    async with Fleet(config, directory, epoch=1, port=0) as fleet:
        yield fleet


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte at `at`."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
