"""A channel of the `nccl` carrier on real GPUs: joining, bytes, deadlines, deaths, recovery time.

    python benchmarks/gpu/nccl_channels.py [--mib 256] [--buckets 8] [--rounds 5] [--deadline 10] [--library stub]

Two GPUs or more: a rank on each of the first two. One GPU: both ranks on it, which NCCL permits from 2.30 on with
NCCL_MULTI_RANK_GPU_ENABLE=1 (experimental). Without a GPU it says why it is skipped; `--library stub` rehearses the
whole script over sockets, and its seconds mean nothing. On one GPU no figure tells anything of NVLink, of a network
or of more ranks. The last line is one JSON object:

    open_s       both ends: processes in waiting, versions compared, id exchanged, NCCL joined, warm-up done
    gb_per_s     shared memory to shared memory, through both GPUs; `exact` compares every byte
    lent_gb_per_s  shared memory to memory of the device that this process lends, digests compared
    bare_gb_per_s  the same bytes from device memory to device memory, by ncclBroadcast alone, in two processes
    deadline_s   what was allowed, and when a broadcast that nobody answers was over
    killed       SIGKILL of rank 1 in a broadcast: when its own end knew, until rank 0 was given up and gone
    rebuilt_s    from there to the next generation, open and warm
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests/ of the checkout

from meshrl.common import shared_buffers
from meshrl.common.chunk_digest import digest
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import MeshError
from meshrl.contract.ports import LentBucket
from meshrl.contract.types import Uint8, Version
from meshrl.weights.carrier import Link, RunPaths
from meshrl.weights.carriers.nccl import Carrier, NcclChannel
from meshrl.weights.nccl.process import NcclProcess
from tests.doubles.nccl import settings
from tests.doubles.weights import StubSource

ONE_GPU_NCCL = (2, 30)
OPEN_S = 60.0
BYTES_PER_S = 1e9
ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}
Cells = tuple[NcclChannel, NcclChannel]


class Bench:
    """Both carriers of one machine, and channels of one generation after the other."""

    def __init__(
        self, library: str, devices: tuple[int, int], env: dict[str, str], deadline_s: float
    ) -> None:
        paths = RunPaths(directory=Path())
        self.deadline_s = deadline_s
        self.env = env
        self._carriers = [
            Carrier(WeightsConfig.model_validate(self._config(library, device, env)), paths)
            for device in devices
        ]
        self._endpoint = ""
        self._generation = 0

    def _config(self, library: str, device: int, env: dict[str, str]) -> dict[str, Any]:
        nccl = {"library": library, "device": device, "env": env}
        if library == "stub":
            stub = settings()
            nccl = {**stub, "device": device, "env": {**stub["env"], **env}}
        return {"nccl": nccl, "base_s": self.deadline_s, "min_bytes_per_s": BYTES_PER_S}

    async def start(self) -> None:
        self._endpoint = await self._carriers[0].listen()
        # The other end's process in waiting, too: what is measured is a generation, not an import.
        process = await self._carriers[1]._processes.take()
        await process.facts()
        self._carriers[1]._processes.put_back(process)

    async def open(self) -> tuple[Cells, float]:
        self._generation += 1
        first, second = (
            carrier.channel(
                Link(
                    run="bench",
                    epoch=1,
                    generation=self._generation,
                    endpoint=self._endpoint,
                    rank=rank,
                )
            )
            for rank, carrier in enumerate(self._carriers)
        )
        began = time.perf_counter()
        await asyncio.gather(first.open(OPEN_S), second.open(OPEN_S))
        return (first, second), time.perf_counter() - began

    async def spares(self) -> None:
        """Let the processes in waiting finish their imports."""
        for carrier in self._carriers:
            starting = carrier._processes._starting
            if starting is not None:
                await starting
            if (spare := carrier._processes._spare) is not None:
                await spare.facts()

    async def close(self) -> None:
        for carrier in self._carriers:
            await carrier.close()


async def carry(channels: Cells, source: StubSource, into: list[Uint8]) -> tuple[bool, float]:
    """One version: whether every byte arrived, and the seconds that it took."""
    for memory in into:
        memory[:] = 0
    indices = range(len(into))

    async def send() -> None:
        for index in indices:
            await channels[0].send(source.manifest, index, source.bucket(index))

    async def receive() -> None:
        for index in indices:
            await channels[1].receive(source.manifest, index, into[index])

    began = time.perf_counter()
    await asyncio.gather(send(), receive())
    seconds = time.perf_counter() - began
    return all(np.array_equal(into[i], source.bucket(i)) for i in indices), seconds


async def carry_lent(channels: Cells, source: StubSource, memory: int, handle: str) -> float:
    """Seconds of one version into `memory` of the device, bucket after bucket."""
    from cupy.cuda import runtime

    begun = time.perf_counter()
    for index, nbytes in enumerate(source.manifest.bucket_bytes):
        _, made = await asyncio.gather(
            channels[0].send(source.manifest, index, source.bucket(index)),
            channels[1].receive_lent(LentBucket(handle, nbytes)),
        )
    seconds = time.perf_counter() - begun
    arrived = np.empty(nbytes, dtype=np.uint8)
    runtime.memcpy(arrived.ctypes.data, memory, nbytes, runtime.memcpyDeviceToHost)
    assert np.array_equal(arrived, source.bucket(index)), "the last bucket arrived otherwise"
    assert made == digest(arrived), "the device's digest is another"
    return seconds


async def unanswered(
    channel: NcclChannel, source: StubSource, deadline_s: float
) -> dict[str, float | str]:
    """A broadcast that the other rank does not take part in."""
    began = time.perf_counter()
    try:
        await channel.send(source.manifest, 0, source.bucket(0))
    except MeshError as error:
        reason = str(error)
    else:
        reason = "it came back as if it had been received"
    allowed = deadline_s + source.manifest.bucket_bytes[0] / BYTES_PER_S
    return {"allowed": allowed, "took": time.perf_counter() - began, "said": reason}


async def killed(channels: Cells, source: StubSource) -> dict[str, float]:
    """SIGKILL of rank 1 while rank 0 broadcasts; its end tells the coordinator, which gives rank 0 up."""
    first, second = channels
    into = np.empty(source.manifest.bucket_bytes[0], dtype=np.uint8)
    sending = asyncio.create_task(first.send(source.manifest, 0, source.bucket(0)))
    began = time.perf_counter()
    assert second._process is not None and second._process.pid
    os.kill(second._process.pid, signal.SIGKILL)
    await asyncio.gather(second.receive(source.manifest, 0, into), return_exceptions=True)
    known = time.perf_counter() - began
    first.abort()
    await asyncio.gather(sending, return_exceptions=True)
    await asyncio.gather(first.close(), second.close())
    return {"known_s": known, "gone_s": time.perf_counter() - began}


def bare_rank(rank: int, args: argparse.Namespace, pipe: Any, results: Any) -> None:
    """One rank of two, in a process of its own: a version by ncclBroadcast alone, between memory of the devices."""
    from cupy.cuda import nccl, runtime

    runtime.setDevice(rank % runtime.getDeviceCount())
    if rank == 0:
        pipe.send(unique := nccl.get_unique_id())
    else:
        unique = pipe.recv()
    communicator = nccl.NcclCommunicator(2, unique, rank)
    nbytes = args.mib << 20
    memory, stream = runtime.malloc(nbytes), runtime.streamCreate()
    seconds = []
    for _ in range(args.rounds + 1):
        began = time.perf_counter()
        for _ in range(args.buckets):
            communicator.broadcast(memory, memory, nbytes, nccl.NCCL_UINT8, 0, stream)
            runtime.streamSynchronize(stream)
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        results.send(statistics.median(seconds[1:]))


def bare(args: argparse.Namespace, env: dict[str, str]) -> float:
    """Seconds of a version by ncclBroadcast alone."""
    context = multiprocessing.get_context("spawn")
    os.environ.update(env)
    mine, theirs = context.Pipe()
    answer, results = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=bare_rank, args=(rank, args, pipe, results), daemon=True)
        for rank, pipe in enumerate((mine, theirs))
    ]
    for rank in ranks:
        rank.start()
    try:
        if not answer.poll(OPEN_S):
            raise RuntimeError(f"ncclBroadcast alone was not through in {OPEN_S:.0f} s")
        seconds: float = answer.recv()
        return seconds
    finally:
        for rank in ranks:
            rank.kill()


def _say(done: str) -> None:
    print(f"{time.strftime('%X')} {done}", file=sys.stderr)


async def measure(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    nbytes = args.mib << 20
    source = StubSource("bench", Version(1, 0), buckets=args.buckets, bucket_bytes=nbytes)
    into = shared_buffers.allocate(source.manifest.bucket_bytes)
    await bench.start()
    channels, open_s = await bench.open()
    _say("open")
    await carry(channels, source, into)  # pins memory, sets up NCCL's channels
    rounds = [await carry(channels, source, into) for _ in range(args.rounds)]
    seconds = statistics.median(took for _, took in rounds)
    beside: dict[str, float] = {}
    if args.library == "cupy":
        total = args.buckets * nbytes
        beside["bare_gb_per_s"] = total / bare(args, bench.env) / 1e9
        from cupy.cuda import runtime

        memory = runtime.malloc(nbytes)
        handle = bytes(runtime.ipcGetMemHandle(memory)).hex()
        _say("alone")
        lent = [await carry_lent(channels, source, memory, handle) for _ in range(args.rounds + 1)]
        beside["lent_gb_per_s"] = total / statistics.median(lent[1:]) / 1e9
    _say("carried")
    await bench.spares()
    deadline = await unanswered(channels[0], source, bench.deadline_s)
    await asyncio.gather(*(channel.close() for channel in channels))
    _say("deadline")
    channels, _ = await bench.open()
    await carry(channels, source, into)
    await bench.spares()
    death = await killed(channels, source)
    _say("killed")
    channels, rebuilt_s = await bench.open()
    exact, _ = await carry(channels, source, into)
    await asyncio.gather(*(channel.close() for channel in channels))
    return {
        "open_s": open_s,
        "exact": exact and all(same for same, _ in rounds),
        "gb_per_s": args.buckets * nbytes / seconds / 1e9,
        **beside,
        "deadline_s": deadline,
        "killed": death,
        "rebuilt_s": rebuilt_s,
    }


def devices() -> list[str]:
    """Names of the GPUs that the driver lists."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return re.findall(r"^GPU \d+: (.*?) \(", listed.stdout, flags=re.MULTILINE)


async def reason_to_skip(library: str, gpus: list[str]) -> str:
    """Why there is nothing to measure here; empty when there is."""
    if library == "stub":
        return ""
    if not gpus:
        return "no NVIDIA GPU is listed by nvidia-smi"
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed: pip install 'meshrl[nccl]'"
    process = NcclProcess(WeightsConfig().nccl)
    try:
        await process.start()
        version = (await process.facts()).version
    except MeshError as error:
        return str(error)
    finally:
        await process.leave()
    if len(gpus) == 1 and tuple(map(int, version.split(".")[:2])) < ONE_GPU_NCCL:
        return f"one GPU, and NCCL {version} refuses two ranks on it: want 2.30 or later"
    return ""


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256, help="of a bucket")
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds of a bucket")
    parser.add_argument("--library", default="cupy", choices=["cupy", "stub"])
    args = parser.parse_args()
    gpus = devices()
    about = {"benchmark": "nccl_channels", "library": args.library, "gpus": gpus}
    if reason := await reason_to_skip(args.library, gpus):
        print(f"skipped: {reason}", file=sys.stderr)
        print(json.dumps({**about, "skipped": reason}))
        return
    apart = len(gpus) > 1
    where = ((0, 1), {}) if apart else ((0, 0), ON_ONE_GPU)
    bench = Bench(args.library, *where, args.deadline)
    try:
        result = await measure(args, bench)
    finally:
        await bench.close()
    print(json.dumps({**about, "mib": args.mib, "buckets": args.buckets, **result}))


if __name__ == "__main__":
    asyncio.run(main())
