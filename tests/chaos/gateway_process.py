"""A rollout worker with a gateway, whose agent is a command, as a process of its own. It works until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from meshrl.common.sockets import Certificates
from meshrl.contract.types import OnUpdate, Version, WeightManifest
from meshrl.http.gateway.answers import refusal
from meshrl.http.gateway.app import build_app
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rollout.config import RowSchedule
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.tokenizer import load_tokenizer
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.http_server import serving_http
from meshrl.testing.engines.echo import build

RUN = "chaos"
FIRST = Version(1, 0)


async def work(options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(options.model)
    engine = build({"tokens_per_s": 10_000}, model=options.model, slots=4)
    await engine.start()
    await engine.stage_weights(
        WeightManifest(run=RUN, version=FIRST, tensors=(), bucket_bytes=(), bucket_hashes=()), []
    )
    await engine.commit_weights(FIRST, OnUpdate.DRAIN)
    sessions = SessionTable(prompt_tokens=None)
    app = build_app(sessions, tokenizer, max_body_bytes=1 << 20, identity=None)
    command = {"command": [sys.executable, "-c", options.agent.read_text(), str(options.pids)]}
    async with (
        serving_http(app, "127.0.0.1", 0, Certificates(), name="gateway", refuse=refusal) as url,
        ProgramCache("openai", command, gateway=sessions) as programs,
        QueueClient(options.queue) as queue,
    ):
        sessions.url = url
        worker = RolloutWorker(
            queue,
            engine,
            tokenizer,
            runs=[RUN],
            worker=options.name,
            schedule=RowSchedule(slots=4),
            programs=programs,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
        await worker.run(grace_s=0)
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--queue", required=True)
    parser.add_argument("--name", required=True)
    for name in ("model", "agent", "pids"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    asyncio.run(work(parser.parse_args()))
