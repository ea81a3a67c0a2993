"""A trainer or a replica of the weight plane as a process of its own, with random weights, for the chaos tests.

Speaks JSON lines: the trainer takes commands on stdin ({"publish": step} and what to kill at which bucket, or {"arm":
point, "step": …, "signal": …}), both report events on stdout. An armed process sends the signal to itself when it
reaches that point of the protocol: "before ready" and "after ready" for a message that it sends, "received commit"
for one that arrives; "opening" the carrier, "staging", "published".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from meshrl.config.weights import WeightsConfig
from meshrl.contract.types import OnUpdate, Uint8, Version, WeightManifest
from meshrl.weights.carrier import RunPaths
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.messages import MessageStream
from meshrl.weights.replica_controller import ReplicaController, ServedEngine
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.transport import Pairs, load_transport

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.doubles.weights import GatheredStub, HashSink, LendingHashSink

RUN = "chaos"
GATHER_S = 0.02
"""For a bucket."""


def report(**event: object) -> None:
    print(json.dumps(event), flush=True)


class SignallingSource(GatheredStub):
    """Sends a signal to a process when one bucket is asked for the given time. Its buckets come one by one."""

    def __init__(self, version: Version, command: dict[str, Any]) -> None:
        super().__init__(RUN, version, density=command.get("density", 1.0))
        self._command = command
        self._calls = command.get("call", 1)

    async def gather(self) -> None:
        """Wait for all buckets."""
        for index in range(len(self.manifest.bucket_bytes)):
            await asyncio.sleep(GATHER_S)
            self.come(index)

    def bucket(self, index: int) -> Uint8:
        if index == self._command.get("at"):
            self._calls -= 1
            if self._calls == 0:
                os.kill(self._command["pid"], self._command["signal"])
        return super().bucket(index)


class SignalPoint:
    """Sends a signal to this very process when it reaches a point at a step, once."""

    def __init__(self) -> None:
        self.at = ""
        self.step = -1
        self.number = 0
        self.joining = 1
        """Which HELLO of this process opens the joining that is meant."""
        self._hellos = 0

    def arm(self, at: str, step: int, number: int, joining: int = 1) -> None:
        self.at, self.step, self.number, self.joining = at, step, number, joining

    def reach(self, point: str, step: int) -> None:
        self._hellos += point == "before hello"
        here = point == self.at and self._hellos in (0, self.joining)
        if here and (step == self.step or self.step < 0):
            self.at = ""
            report(signalled=point)
            os.kill(os.getpid(), self.number)

    def install(self) -> None:
        """Wrap every sent and received message, and the opening of a carrier."""
        send, receive, opened = MessageStream.send, MessageStream.receive, Pairs._open

        async def send_(stream: Any, message: Any) -> None:
            self.reach(f"before {_label(message)}", message.stamp.step)
            await send(stream, message)
            self.reach(f"after {_label(message)}", message.stamp.step)

        async def receive_(stream: Any) -> Any:
            message = await receive(stream)
            self.reach(f"received {_label(message)}", message.stamp.step)
            return message

        async def opened_(pairs: Any, plan: Any) -> Any:
            self.reach("opening", plan.arrival.version.step)
            return await opened(pairs, plan)

        MessageStream.send = send_  # type: ignore[method-assign]
        MessageStream.receive = receive_  # type: ignore[method-assign]
        Pairs._open = opened_  # type: ignore[method-assign]


def _label(message: Any) -> str:
    body = message.WhichOneof("body")
    return f"received {message.received.bucket}" if body == "received" else str(body)


signal_point = SignalPoint()


class ReportingSink(HashSink):
    """Reports what it serves."""

    poison = -1
    """The step whose commit breaks this engine."""

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        signal_point.reach("staging", manifest.version.step)
        await super().stage_weights(manifest, buckets)

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        if version.step == self.poison:
            raise RuntimeError("half a model")
        await super().commit_weights(version, on_update)
        report(commit=str(version), hashes=self.hashes)


class ReportingLender(ReportingSink, LendingHashSink):
    """One whose versions arrive in memory of a device that is its own."""


async def watch(coordinator: WeightCoordinator) -> None:
    seen = None
    while True:
        fleet = {
            view.name: [view.state, str(view.version or "")]
            for view in coordinator.fleet().replicas
        }
        if fleet != seen:
            report(fleet=fleet)
            seen = fleet
        await asyncio.sleep(0.02)


async def trainer(config: WeightsConfig, args: argparse.Namespace) -> None:
    async def on_committed(version: Version) -> None:
        report(published=str(version))
        signal_point.reach("published", version.step)

    coordinator = WeightCoordinator(
        config,
        run=RUN,
        epoch=args.epoch,
        transport=load_transport(config, RunPaths(directory=args.directory)),
        on_committed=on_committed,
    )
    async with coordinator:
        server = grpc.aio.server()
        WeightsServicer(coordinator).attach(server)
        report(port=server.add_insecure_port(f"127.0.0.1:{args.port}"))
        await server.start()
        watching = asyncio.create_task(watch(coordinator))
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            if "arm" in command:
                signal_point.arm(command["arm"], command["step"], command["signal"])
                continue
            source = SignallingSource(Version(args.epoch, command["publish"]), command)
            gather = asyncio.create_task(source.gather())
            await coordinator.publish(source)
            await gather
            report(carrying=str(source.manifest.version), hashes=source.manifest.bucket_hashes)
        watching.cancel()
        await server.stop(0)


async def replica(config: WeightsConfig, args: argparse.Namespace) -> None:
    controller = ReplicaController(
        config,
        run=RUN,
        replica=args.name,
        engine=ServedEngine(ReportingLender() if args.lends else ReportingSink(), config),
        transport=load_transport(config, RunPaths(directory=args.directory)),
        connect=lambda: grpc.aio.insecure_channel(f"127.0.0.1:{args.port}"),
    )
    await controller.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["trainer", "replica"])
    parser.add_argument("--config", required=True, help="WeightsConfig as JSON")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--name", default="")
    parser.add_argument("--poison", type=int, default=-1, help="break in the commit of this step")
    parser.add_argument("--lends", action="store_true", help="memory of a stub of a device")
    parser.add_argument("--arm", default="", help="point,step,signal,joining")
    arguments = parser.parse_args()
    ReportingSink.poison = arguments.poison
    signal_point.install()
    if arguments.arm:
        point, *numbers = arguments.arm.split(",")
        signal_point.arm(point, *map(int, numbers))
    settings = WeightsConfig.model_validate_json(arguments.config)
    role = trainer if arguments.role == "trainer" else replica
    asyncio.run(role(settings, arguments))
