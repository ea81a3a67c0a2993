"""A rollout worker as a process that logs every token before it passes it on.

Waits for a line on stdin, works until SIGTERM, then drains. The log has JSON lines: {"uid", "continued"} when a
response begins, {"uid", "tokens"} with its length so far after each delta.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from meshrl.contract.types import (
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    OnUpdate,
    Uint8,
    Version,
    WeightManifest,
)
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.engines.torch import TorchEngine, build
from meshrl.rollout.streams import closing
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.clients.queue import QueueClient

RUN = "chaos"
FIRST = Version(1, 0)


class LoggedEngine:
    """An engine that writes each delta to a file before it yields it."""

    def __init__(self, engine: TorchEngine, log: Path) -> None:
        self._engine = engine
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @property
    def version(self) -> Version:
        return self._engine.version

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def _write(self, **event: object) -> None:
        os.write(self._log, json.dumps(event).encode() + b"\n")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        tokens = request.continued
        self._write(uid=request.request_id, continued=tokens)
        async with closing(self._engine.generate(request)) as stream:
            async for delta in stream:
                tokens += len(delta.tokens)
                self._write(uid=request.request_id, tokens=tokens)
                yield delta

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None: ...

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None: ...

    async def discard_weights(self, version: Version) -> None: ...


class Numbers:
    """A tokenizer without words."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


async def work(options: argparse.Namespace) -> None:
    engine = build(
        {"device": "cpu", "eos_token_ids": [], "stream_interval": 1},
        model=options.model,
        slots=options.slots,
    )
    await engine.start()
    await engine.serve_checkpoint(FIRST)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    async with QueueClient(options.queue) as queue:
        worker = RolloutWorker(
            queue,
            LoggedEngine(engine, options.log),
            Numbers(),
            runs=[RUN],
            worker=options.log.stem,
            schedule=RowSchedule(
                slots=options.slots,
                checkpoint=CheckpointIntervals(tokens=options.interval, ms=0),
            ),
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
        await worker.run(grace_s=60)
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--queue", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    asyncio.run(work(parser.parse_args()))
