"""A fake vLLM server: the routes of vLLM 0.33.0 for native weight transfer, without a model and without a GPU.

    python -m tests.doubles.vllm_server --host 127.0.0.1 --port 8000          other options of vLLM are accepted

It is for the `vllm` engine with `update: native`: each worker rank is a process that really receives the broadcasts,
over the NCCL of `tests.doubles.nccl`. Every response is one token. GET /fake returns the calls so far, the
pids of the ranks, and for each loaded tensor its type, shape and hash.

The environment variable FAKE_VLLM holds JSON: `world` (worker ranks, default 1), `fault`, and `once` (a file: the
process that creates it has the fault, so that a restarted server has it no more). Faults:
    no_backend    the server was started without a weight-transfer config
    refuse        /update_weights answers 500 at once, and no worker enters the broadcast
    deaf          /update_weights neither answers nor lets any worker enter the broadcast
    die           the process is killed after the first bucket
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
import xxhash
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from meshrl.common import shared_buffers
from meshrl.config.weights import NcclConfig
from meshrl.contract.types import Uint8
from meshrl.weights.nccl.process import NcclProcess

from . import nccl

SETTINGS = json.loads(os.environ.get("FAKE_VLLM", "{}"))
WAIT_S = 600.0
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Workers:
    """The state of vLLM's workers."""

    def __init__(self) -> None:
        self.ranks: list[NcclProcess] = []
        self.packed_bytes = 0
        self.info: dict[str, list[Any]] = {}
        self.model: dict[str, list[Any]] = {}
        """Tensor name to type, shape and hash of the bytes."""
        self.loading: dict[str, list[Any]] = {}
        self.broken = False
        self.paused = False
        self.label = "default"
        self.calls: list[str] = []

    async def init(self, info: dict[str, Any]) -> None:
        """Start the ranks and let them join the communicator."""
        unique_id = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        if len(unique_id) != 128 or not info["packed"]:
            raise ValueError("want a unique id of 128 bytes and packed tensors")
        self.packed_bytes = info["packed_buffer_size_bytes"]
        for rank in self.ranks:
            rank.kill()
        world = SETTINGS.get("world", 1)
        self.ranks = [NcclProcess(NcclConfig(**nccl.settings(), spare=False)) for _ in range(world)]
        await asyncio.gather(*(rank.start() for rank in self.ranks))
        await asyncio.gather(
            *(
                process.join(info["world_size"], unique_id, info["rank_offset"] + number, WAIT_S)
                for number, process in enumerate(self.ranks)
            )
        )

    async def receive(self, info: dict[str, list[Any]]) -> None:
        """As `packed_nccl_broadcast_consumer`: fill a bucket until it exceeds the agreed size, then receive it."""
        self.info = info if info["names"] else self.info
        rows = zip(self.info["names"], self.info["dtype_names"], self.info["shapes"], strict=True)
        bucket: list[tuple[str, str, list[int]]] = []
        total = 0
        for row in rows:
            bucket.append(row)
            total += nbytes(row)
            if total > self.packed_bytes:
                await self._load(bucket, total)
                bucket, total = [], 0
        if bucket:
            await self._load(bucket, total)

    async def _load(self, bucket: list[tuple[str, str, list[int]]], total: int) -> None:
        received = await asyncio.gather(*(self._broadcast(rank, total) for rank in self.ranks))
        if not all(np.array_equal(each, received[0]) for each in received):
            raise RuntimeError("the ranks received different bytes")
        offset = 0
        for row in bucket:
            name, dtype, shape = row
            if offset % ITEM_BYTES[dtype]:
                raise ValueError(f"storage_offset() must be divisible by {ITEM_BYTES[dtype]}")
            data = received[0][offset : offset + nbytes(row)]
            self.loading[name] = [dtype, shape, xxhash.xxh3_128_hexdigest(data.data)]
            offset += nbytes(row)
        if has_fault("die"):
            os.kill(os.getpid(), signal.SIGKILL)

    async def _broadcast(self, rank: NcclProcess, nbytes: int) -> Uint8:
        (memory,) = shared_buffers.allocate([nbytes])
        await rank.broadcast(memory, WAIT_S)
        return memory


def has_fault(kind: str) -> bool:
    """Whether this process has the fault `kind` now."""
    if SETTINGS.get("fault") != kind:
        return False
    try:
        Path(SETTINGS["once"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def nbytes(row: tuple[str, str, list[int]]) -> int:
    """Bytes of a tensor given by name, type and shape."""
    _, dtype, shape = row
    return math.prod(shape) * ITEM_BYTES[dtype]


workers = Workers()


async def get(request: Request) -> Response:
    """Every GET route."""
    match _record(request):
        case "fake":
            pids = [rank.pid for rank in workers.ranks]
            return JSONResponse({"calls": workers.calls, "hashes": workers.model, "pids": pids})
        case "weight_info":
            return JSONResponse({"weight_version": workers.label})
        case "get_world_size":
            return JSONResponse({"world_size": SETTINGS.get("world", 1)})
        case "models":
            return JSONResponse({"data": [{"max_model_len": None}]})
    return Response()


async def post(request: Request) -> Response:
    """Every POST route except generation."""
    call = _record(request)
    body = json.loads(await request.body() or "{}")
    try:
        async with asyncio.timeout(WAIT_S):
            await _do(call, body)
    except Exception as error:  # as vLLM does: any failure is a 500 with its message
        return JSONResponse({"error": str(error)}, status_code=500)
    return Response()


def _record(request: Request) -> str:
    call = request.url.path.rpartition("/")[2]
    if call not in ("health", "fake"):
        workers.calls.append(call)
    return call


async def _do(call: str, body: dict[str, Any]) -> None:
    match call:
        case "init_weight_transfer_engine":
            if has_fault("no_backend"):
                raise RuntimeError(
                    "Weight transfer not configured. Please set weight_transfer_config"
                )
            await workers.init(body["init_info"])
        case "pause":
            workers.paused = True
        case "resume":
            workers.paused = False
        case "start_weight_update":
            if not workers.paused:
                os.kill(
                    os.getpid(), signal.SIGKILL
                )  # as vLLM: the layers are empty at its next step
            workers.loading = {}
        case "update_weights":
            if workers.broken:
                raise RuntimeError("layers are half loaded")
            workers.broken = True
            if has_fault("refuse"):
                raise RuntimeError("no such parameter")
            if has_fault("deaf"):
                await asyncio.sleep(WAIT_S)
            await workers.receive(body["update_info"])
            workers.broken = False
        case "finish_weight_update":
            workers.model, workers.loading = workers.loading, {}
            workers.label = body["weight_version"]


async def generate(request: Request) -> Response:
    """A response of one token."""
    choice = {
        "token_ids": [7],
        "logprobs": {"content": [{"token": "7", "logprob": 0.0}]},
        "finish_reason": "length",
        "weight_versions": [{"version": workers.label, "start": 0, "end": 1}],
    }
    event = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    return StreamingResponse(iter([event]), media_type="text/event-stream")


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    routes = [
        Route("/inference/v1/generate", generate, methods=["POST"]),
        Route("/{path:path}", get, methods=["GET"]),
        Route("/{path:path}", post, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
