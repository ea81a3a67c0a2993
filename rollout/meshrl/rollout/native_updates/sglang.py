"""`update: native`: broadcasts versions to an SGLang server through its own process group. Imports torch.

The server can join through torch only: a TCPStore at the master (here), under the prefixes that torch's own helper
puts before a group's keys. This is rank 0 of it, built directly, so no default group of this process is touched.

    init_weights_update_group ─┐ together       update_weights_from_distributed ─┐ together, once a bucket
    ProcessGroup(rank 0)      ─┘                broadcast(uint8)                ─┘

A collective cannot be ended from outside with certainty: it runs in a daemon thread with a deadline, and after any
failure group and thread are given up, as the server is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed

from meshrl.common.sockets import listen_fd
from meshrl.contract.errors import ConfigError, InfraError, MeshError
from meshrl.contract.types import Version
from meshrl.rollout.server_engine.checkpoint import (
    TORCH_DTYPE,
    TensorRange,
    aligned,
    read_tensor_ranges,
)
from meshrl.rollout.server_engine.http import HttpClient

c10d: Any = torch.distributed
"""torch's stubs leave out the stores and the options of process groups."""
JOIN_S = 60.0
LEAVE_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The tensors of one broadcast, in its order.

    A flattened bucket is one run of bytes; the receiver cuts it where names, dtypes and shapes say, and refuses a
    tensor that begins where its dtype cannot (`Unaligned received tensor`). So the tensors are ordered by item size,
    the widest first: each then begins at a multiple of its own.
    """

    tensors: tuple[TensorRange, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the broadcast."""
        return sum(tensor.end - tensor.start for tensor in self.tensors)


def plan_buckets(tensors: Sequence[TensorRange], bucket_bytes: int) -> list[Bucket]:
    """Buckets of up to `bucket_bytes` (or one larger tensor), in the file's order, aligned inside."""
    buckets: list[Bucket] = []
    current: list[TensorRange] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.end - tensor.start
        if current and size + nbytes > bucket_bytes:
            buckets.append(Bucket(tensors=aligned(current)))
            current, size = [], 0
        current.append(tensor)
        size += nbytes
    return [*buckets, Bucket(tensors=aligned(current))] if current else buckets


def update_body(bucket: Bucket, *, group: str, label: str | None) -> dict[str, Any]:
    """Body of `/update_weights_from_distributed`. `label` with the last bucket only: each call would record it."""
    return {
        "names": [tensor.name for tensor in bucket.tensors],
        "dtypes": [TORCH_DTYPE[tensor.dtype] for tensor in bucket.tensors],
        "shapes": [list(tensor.shape) for tensor in bucket.tensors],
        "group_name": group,
        "load_format": "flattened_bucket",
        "weight_version": label,
        "flush_cache": False,
    }


class GroupSender:
    """Rank 0 of a group whose others are the server's tensor-parallel ranks. One version at a time."""

    def __init__(self, *, address: str, backend: str, bucket_bytes: int, deadline_s: float) -> None:
        """`address`: where the server's ranks find this process. `deadline_s`: of one bucket."""
        self._address = address
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._name = f"meshrl-{uuid.uuid4().hex}"
        self._store: Any = None
        self._group: Any = None
        self._client: HttpClient | None = None

    async def send(
        self, client: HttpClient, directory: Path, version: Version, *, ranks: int
    ) -> None:
        """Broadcast the version in `directory`; the server's weight-update session is open.

        Raises:
            MeshError: the server refuses a bucket, or a broadcast fails or takes longer than its deadline.
        """
        try:
            if self._group is None:
                await self._join(client, ranks)
            file = directory / "model.safetensors"
            buckets = plan_buckets(
                await asyncio.to_thread(read_tensor_ranges, file), self._bucket_bytes
            )
            for number, bucket in enumerate(buckets, 1):
                label = str(version) if number == len(buckets) else None
                body = update_body(bucket, group=self._name, label=label)
                flat = await asyncio.to_thread(_fill, file, bucket, self._device)
                await self._together(
                    client.call("POST", "/update_weights_from_distributed", json=body),
                    functools.partial(self._broadcast, flat),
                    self._deadline_s,
                )
        except BaseException:
            self._give_up()
            raise

    async def close(self) -> None:
        """Leave the group together with the server, if it still answers; idempotent."""
        client, self._client = self._client, None
        if client is not None and self._group is not None:
            with contextlib.suppress(MeshError):
                await client.call(
                    "POST",
                    "/destroy_weights_update_group",
                    json={"group_name": self._name},
                    wait_s=LEAVE_S,
                )
        self._give_up()

    async def _join(self, client: HttpClient, ranks: int) -> None:
        self._client = client
        try:
            descriptor, port = listen_fd(self._address)
        except OSError as error:
            raise ConfigError(
                f"rollout.engine.group_address: cannot listen on {self._address} ({error})"
            ) from error
        self._store = c10d.TCPStore(
            self._address,
            port,
            None,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
            master_listen_fd=descriptor,
        )
        size = 1 + ranks
        body = {
            "master_address": self._address,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": self._name,
            "backend": self._backend,
        }
        self._group = await self._together(
            client.call("POST", "/init_weights_update_group", json=body),
            functools.partial(self._open, size),
            JOIN_S,
        )

    def _open(self, size: int) -> Any:
        """A group whose keys lie where torch's helper, on the server's side, looks for them."""
        store = c10d.PrefixStore(self._name, self._store)
        store = c10d.PrefixStore(f"{self._name}/", store)
        store = c10d.PrefixStore(f"{self._device.type}/", store)
        timeout = timedelta(seconds=self._deadline_s)
        if self._backend == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return c10d.ProcessGroupNCCL(store, 0, size, options)
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._address)]
        return c10d.ProcessGroupGloo(store, 0, size, options)

    def _broadcast(self, flat: torch.Tensor) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([flat], options).wait()
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()

    async def _together(self, call: Any, collective: Callable[[], T], deadline_s: float) -> T:
        """A control call and the collective that it announces; the first failure of either ends the wait.

        Raises:
            MeshError: the server's error, if there is one.
        """
        called = asyncio.ensure_future(call)
        done = asyncio.ensure_future(_in_daemon(collective))
        try:
            async with asyncio.timeout(deadline_s):
                # The error of the server says more than that of a broken collective; but a collective
                # that failed alone leaves the server waiting.
                await asyncio.wait({called, done}, return_when=asyncio.FIRST_EXCEPTION)
                await (called if called.done() else done)
                await called
                return await done
        except TimeoutError as error:
            raise InfraError(
                f"a broadcast to {self._name} took longer than {deadline_s:g} s"
            ) from error
        except RuntimeError as error:
            raise InfraError(f"a broadcast to {self._name} failed: {_line(error)}") from error
        finally:
            called.cancel()
            done.cancel()
            await asyncio.gather(called, done, return_exceptions=True)

    def _give_up(self) -> None:
        """Forget the group; a collective that still runs is aborted, and its thread ends with the process."""
        group, self._group, self._store = self._group, None, None
        self._name = f"meshrl-{uuid.uuid4().hex}"
        if group is not None and hasattr(group, "abort"):
            threading.Thread(target=_abort, args=(group,), daemon=True).start()


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def _fill(file: Path, bucket: Bucket, device: torch.device) -> torch.Tensor:
    """uint8[bucket.nbytes] on `device`."""
    mapped = torch.from_numpy(
        np.memmap(file, dtype=np.uint8, mode="c")
    )  # "c": torch wants it writable
    flat = torch.empty(bucket.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    offset = 0
    for tensor in bucket.tensors:
        size = tensor.end - tensor.start
        flat[offset : offset + size] = mapped[tensor.start : tensor.end]
        offset += size
    return flat.to(device)


async def _in_daemon(work: Callable[[], T]) -> T:
    """Run `work` in a thread that the end of this process does not wait for."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = functools.partial(_settle, result.set_result, work())
        except Exception as error:
            settle = functools.partial(_settle, result.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="sglang-broadcast", daemon=True).start()
    return await result


def _settle(settle: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # cancelled: no task waits
        settle(value)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
