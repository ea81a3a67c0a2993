"""Log-probs of rows with pictures by a real server beside the trainer's, and what pictures weigh on the wire.

    python benchmarks/pictures.py logprobs [--engine vllm] [--rows 200] [--model Qwen3VL]
    python benchmarks/pictures.py payload [--group 8] [--groups 16] [--bytes 100000]

`logprobs`: a tiny random model is exported by the trainer and served by vLLM or SGLang on this CPU, which samples
rows of one to four pictures, first from the export and then from a version of the weight plane that has other weights
everywhere, in the vision tower, too; the policy computes the same rows in packs. Wants `make venv-vllm venv-sglang`.
`payload`: the bytes that a queue over gRPC takes and gives for a group: put, one lease of its rows, one fetch of
them; beside the same without pictures. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ of the checkout

from meshrl.contract.rows import rollout_write
from meshrl.contract.types import (
    MEDIA,
    Media,
    OnUpdate,
    Outcome,
    RunSpec,
    Task,
    Trajectory,
    Version,
    VersionSpan,
)
from meshrl.images import ImageProcessor
from meshrl.rollout.engines import sglang, vllm
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import GrpcServer
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing import vision
from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.snapshot import take_snapshot
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from tests.doubles import vision_rows

ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"extra_args": ["--enforce-eager"], "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}},
    "sglang": {
        "extra_args": [
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--sampling-backend",
            "pytorch",
            "--max-total-tokens",
            "40000",
            "--disable-overlap-schedule",
            "--sleep-on-idle",
        ],
        "env": {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path("tests/sglang_cpu").absolute()),
        },
    },
}
VERSION = Version(1, 1)


async def logprobs(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        start, served = Path(folder) / "start", Path(folder) / "served"
        vision.random_checkpoint(arguments.model, start)
        world = World.start("cpu")
        config = ModelConfig(path=start, freeze_vision_tower=False)
        policy = build_policy(open_hf(start), world, config)
        vision_rows.move_weights(policy, 1)
        export_policy(policy, world, served, tokenizer=start)
        reader = VisionReader(served, policy.hf)
        options = {
            "python": f".venv-{arguments.engine}/bin/python",
            "dtype": "float32",
            "eos_token_ids": [],
            "log": str(Path(folder) / "server.log"),
            **ENGINES[arguments.engine],
        }
        build = {"vllm": vllm.build, "sglang": sglang.build}[arguments.engine]
        engine = build(options, model=served, slots=16)
        await engine.start()
        found = {}
        try:
            for name in ("export", "published"):
                if name == "published":
                    vision_rows.move_weights(policy, 2)
                    sent = take_snapshot(
                        policy,
                        world,
                        run="r",
                        version=VERSION,
                        dtype="float32",
                        bucket_bytes=1 << 22,
                    )
                    assert sent is not None
                    await engine.stage_weights(sent.manifest, sent.buckets)
                    await engine.commit_weights(VERSION, OnUpdate.DRAIN)
                else:
                    await engine.serve_checkpoint(Version(1, 0))
                rows = await vision_rows.sampled(
                    engine, ImageProcessor(served), name, arguments.rows
                )
                apart = vision_rows.apart(policy, reader, rows)
                found[name] = {
                    "tokens": len(apart),
                    "greatest": float(apart.max()),
                    "mean": float(apart.mean()),
                }
                print(name, found[name], flush=True)
        finally:
            await engine.close()
            world.close()
        return {
            "engine": arguments.engine,
            "model": arguments.model,
            "rows": arguments.rows,
            **found,
        }


async def payload(arguments: argparse.Namespace) -> dict[str, Any]:
    draws = np.random.default_rng(0)
    pictures = [Media.of(draws.bytes(arguments.bytes)) for _ in range(arguments.groups)]
    plain = await carried(arguments, [()] * arguments.groups)
    seen = await carried(arguments, [(picture,) for picture in pictures])
    return {
        "group": arguments.group,
        "picture_bytes": arguments.bytes,
        "pictures_a_group": {
            step: round((seen[step] - plain[step]) / arguments.groups / arguments.bytes, 3)
            for step in seen
        },
        "bytes_a_group": {step: seen[step] // arguments.groups for step in seen},
        "without_pictures": {step: plain[step] // arguments.groups for step in plain},
    }


async def carried(
    arguments: argparse.Namespace, media: Sequence[tuple[Media, ...]]
) -> dict[str, int]:
    """Bytes between a client and its queue."""
    queue = await TransferQueue.open(MemoryStore())
    counts: list[int] = [0]
    async with (
        GrpcServer(settings(), [QueueServicer(queue)]) as server,
        counted(server.address, counts) as address,
        QueueClient(address, retry_s=1) as client,
    ):
        groups, version = arguments.groups, Version(1, 0)
        rows = groups * arguments.group
        await client.open_run(
            RunSpec(run="r", group_size=arguments.group, batch_groups=groups, max_staleness=4)
        )
        await client.acquire("r", "trainer")
        await client.publish("r", version)
        found = {}

        def passed(step: str) -> None:
            found[step], counts[0] = counts[0], 0

        prompt = np.arange(64, dtype=np.int32)
        tasks = [
            Task(
                run="r", task_id=f"t{n}", prompt_ids=prompt, group_size=arguments.group, media=each
            )
            for n, each in enumerate(media)
        ]
        counts[0] = 0
        await client.admit("r", tasks, cursor="1", wait_s=30)
        passed("put")
        leased = []
        while len(leased) < rows:
            lease = await client.lease(
                ["r"], "rollout", worker="w", limit=rows, version=version, wait_s=30
            )
            leased += lease.rows
        for row in leased:
            assert row.task.media == media[int(row.uid.task[1:])]
        passed("lease")
        await client.write_rows(
            "r", "rollout", {row.uid: row.token for row in leased}, map(answer, leased)
        )
        counts[0] = 0
        await client.fetch_rows("r", sorted(row.uid for row in leased), ("tokens", MEDIA))
        passed("fetch")
    await queue.close()
    return found


def answer(row: Any) -> Any:
    tokens = np.arange(128, dtype=np.int32)
    version = Version(1, 0)
    made = Trajectory(
        uid=row.uid,
        tokens=tokens,
        loss_mask=(tokens >= 64).astype(np.uint8),
        rollout_logprobs=np.zeros(128, dtype=np.float32),
        spans=(VersionSpan(version=version, start=64, end=128),),
    )
    return rollout_write(made, Outcome.OK, "stop", version)


def settings() -> Any:
    from meshrl.rpc.runtime import ServerSettings

    return ServerSettings(metrics_port=None, drain_grace_s=1)


@asynccontextmanager
async def counted(address: str, counts: list[int]) -> AsyncIterator[str]:
    """The address of a relay to `address` that adds the bytes of both ways to `counts`."""
    host, _, port = address.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            counts[0] += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        both = (relay(reader, there_writer), relay(there_reader, writer))
        await asyncio.gather(*both, return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("logprobs")
    first.add_argument("--engine", default="vllm", choices=[*ENGINES])
    first.add_argument("--rows", type=int, default=200)
    first.add_argument("--model", default="Qwen3VL", choices=[*vision.KINDS])
    second = commands.add_parser("payload")
    second.add_argument("--group", type=int, default=8)
    second.add_argument("--groups", type=int, default=16)
    second.add_argument("--bytes", type=int, default=100_000)
    arguments = parser.parse_args()
    made = logprobs if arguments.command == "logprobs" else payload
    print(json.dumps(asyncio.run(made(arguments))))


if __name__ == "__main__":
    main()
