"""A rollout process with an engine that copies: staged weights go into the live ones at the commit, while it pauses.

Reports as JSON lines when (CLOCK_MONOTONIC, the same in every process) a version was staged and served, how long the
engine stood still, and the hashes of its live memory, computed after it went on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
from copies import Copies
from source import RUN

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests/ of the checkout

from meshrl.config.weights import WeightsConfig
from meshrl.contract.ports import DeviceReceiver, LentBucket
from meshrl.contract.types import OnUpdate, Uint8, Version, WeightManifest
from meshrl.weights import replica_controller
from meshrl.weights.carrier import RunPaths, host_id
from meshrl.weights.messages import digest
from meshrl.weights.transport import load_transport
from tests.doubles.device import opened
from tests.doubles.weights import LendingHashSink

COPIES = Copies()


class CopyingEngine:
    """A WeightSink whose live weights keep their place in memory, as those of servers with captured graphs do."""

    def __init__(self, hashes: bool) -> None:
        self._hashes = hashes
        self._staged: dict[Version, list[Uint8]] = {}
        self._live: list[Uint8] = []
        self.pause_s = 0.0

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        self._staged[manifest.version] = list(buckets)
        if not self._live:  # as after loading a checkpoint
            self._live = [np.zeros_like(bucket) for bucket in buckets]
        report(staged=str(manifest.version), copied=COPIES.take())

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        staged = self._staged.pop(version)
        began = time.monotonic()
        await asyncio.to_thread(self._copy, staged)
        self.pause_s = time.monotonic() - began
        COPIES.take()  # the commit's own
        hashes = [digest(bucket) for bucket in self._live] if self._hashes else []
        report(commit=str(version), pause_s=self.pause_s, hashes=hashes)

    async def discard_weights(self, version: Version) -> None:
        self._staged.pop(version, None)

    def _copy(self, staged: list[Uint8]) -> None:
        for live, fresh in zip(self._live, staged, strict=True):
            np.copyto(live, fresh)


class LendingEngine(CopyingEngine):
    """One on a stub of a device, whose memory versions arrive in; the commit reads from there."""

    def __init__(self, hashes: bool) -> None:
        super().__init__(hashes)
        self._device = LendingHashSink()

    async def lend(
        self, manifest: WeightManifest, receiver: DeviceReceiver
    ) -> Sequence[LentBucket]:
        return await self._device.lend(manifest, receiver)

    async def stage_lent(self, manifest: WeightManifest, digests: Sequence[str]) -> None:
        memory = (opened(bytes.fromhex(b.handle), b.nbytes) for b in self._device.lent)
        await self.stage_weights(manifest, [np.frombuffer(each, np.uint8) for each in memory])


def report(**event: object) -> None:
    print(json.dumps(event | {"at": time.monotonic()}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--lends", action="store_true", help="memory of a stub of a device")
    options = parser.parse_args()
    COPIES.install()
    assert host_id()
    engine = (LendingEngine if options.lends else CopyingEngine)(options.hashes)
    config = WeightsConfig.model_validate_json(options.config)
    replica = replica_controller.ReplicaController(
        config,
        run=RUN,
        replica=options.name,
        engine=replica_controller.ServedEngine(engine, config, pause_s=lambda: engine.pause_s),
        transport=load_transport(config, RunPaths(directory=options.directory)),
        connect=lambda: grpc.aio.insecure_channel(f"127.0.0.1:{options.port}"),
    )
    await replica.run()


if __name__ == "__main__":
    asyncio.run(main())
