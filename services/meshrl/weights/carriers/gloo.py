"""Weights over TCP by torch's gloo backend: one two-rank group per replica, of processes started apart.

The trainer's process holds a TCPStore; the two ends of a channel find each other there under the prefix
run/epoch/generation and build a ProcessGroupGloo directly, so neither joins nor disturbs a default process group.
A group has two ranks: in a larger one the death of a rank frees the root at once, but every other receiver waits for
its whole timeout. Blocking calls run in a daemon thread per channel, each with a deadline of its own.
"""

from __future__ import annotations

import ctypes
import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from typing_extensions import override

from meshrl.common.sockets import is_loopback, listen_fd
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import ConfigError, UnavailableError
from meshrl.contract.types import Uint8, WeightManifest
from meshrl.weights.carrier import Channel, Link, RunPaths
from meshrl.weights.transport import Pairs
from meshrl.weights.waiting import WorkerThread

log = logging.getLogger(__name__)

c10d: Any = torch.distributed
"""torch's stubs leave out the stores, `send`, `recv` and the options of gloo."""


class Carrier(Pairs):
    """On the trainer's side, the rendezvous store."""

    def __init__(self, config: WeightsConfig, paths: RunPaths) -> None:
        super().__init__(config)
        self._store: Any = None

    @override
    async def listen(self) -> str:
        """Open the store; returns `host:port`."""
        host, port = self.config.host, self.config.port
        try:
            descriptor, port = listen_fd(host, port)
            self._store = c10d.TCPStore(
                host,
                port,
                None,
                is_master=True,
                wait_for_workers=False,
                timeout=_delta(60.0),
                master_listen_fd=descriptor,
            )
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"weights.host/port: cannot listen on {host}:{port} ({_one_line(error)})"
            ) from error
        if not is_loopback(host):
            log.warning(
                "INSECURE: weights.host %s can be reached from other machines, and gloo neither encrypts nor asks who"
                " receives: any client can take the weights. Without a network that you trust use"
                " weights.carrier=delta with tls",
                host,
            )
        return f"{host}:{self._store.port}"

    @override
    def channel(self, link: Link) -> GlooChannel:
        return GlooChannel(self.config, link, self._store if link.rank == 0 else None)

    @override
    async def close(self) -> None:
        """Drop the store; its port is free when the last channel is closed."""
        self._store = None


class GlooChannel(Channel):
    """One rank of a group of two."""

    def __init__(self, config: WeightsConfig, link: Link, store: Any) -> None:
        self.config = config
        self._link = link
        self._store = store
        self._group: Any = None
        self._thread = WorkerThread(f"gloo-{link.generation}")

    @override
    async def open(self, deadline_s: float) -> None:
        await self._run(self._open, deadline_s)

    @override
    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        await self._run(self._move, "send", index, bucket)

    @override
    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        await self._run(self._move, "recv", index, into)

    @override
    def abort(self) -> None:
        """Give up; a stuck call ends at its own deadline, in its own thread."""
        self._group = None
        self._store = None
        self._thread.close()

    def _open(self, deadline_s: float) -> None:
        host, _, port = self._link.endpoint.rpartition(":")
        timeout = _delta(deadline_s)
        store = self._store or c10d.TCPStore(
            host, int(port), None, is_master=False, wait_for_workers=False, timeout=timeout
        )
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [
            c10d.ProcessGroupGloo.create_device(hostname=_interface(host, int(port)))
        ]
        prefix = c10d.PrefixStore(self._link.prefix, store)
        self._group = c10d.ProcessGroupGloo(prefix, self._link.rank, self._link.size, options)

    def _move(self, operation: str, index: int, bucket: Uint8) -> None:
        group = self._group
        if group is None:
            raise UnavailableError(f"weight channel {self._link.prefix} is not open")
        # Not through from_numpy, which complains of a source's read-only memory: gloo only reads what it sends.
        memory = (ctypes.c_uint8 * bucket.nbytes).from_address(bucket.ctypes.data)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        move: Callable[..., Any] = group.send if operation == "send" else group.recv
        other = 1 - self._link.rank
        move([tensor], other, index).wait(_delta(self.config.deadline_s(bucket.nbytes)))

    async def _run(self, call: Callable[..., None], *args: object) -> None:
        try:
            await self._thread.run(call, *args)
        except (
            RuntimeError,
            OSError,
        ) as error:  # from gloo, the store or the name service
            raise UnavailableError(
                f"weight channel {self._link.prefix}, rank {self._link.rank}: {_one_line(error)}"
            ) from error


def _interface(host: str, port: int) -> str:
    """This machine's address on the network path to `host`: gloo must listen there, so that `host` can connect."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
