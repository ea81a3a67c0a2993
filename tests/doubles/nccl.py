"""A stand-in for NCCL that uses sockets, for machines without a GPU: the same behaviour, and faults on request.

The ranks of a communicator are a chain, as in NCCL's ring: a broadcast leaves rank 0 once, and each rank passes on
what it gets, so a rank that is dead or stopped holds up all behind it. The unique id names, like NCCL's, an
address of the process that made it, and joining blocks until every rank has joined. Device memory is host memory, the
stream is a thread, collectives on it are asynchronous. Two ways of being stricter than NCCL: ranks whose collectives
differ fail with both named instead of hanging, and so does a communicator that was not warmed up.

The environment variable MESHRL_NCCL_STUB holds JSON: `version` (a NCCL of that version), `deaf` (the loss of a rank
is not noticed, which is what NCCL over a network does), `crossings` (a file, to which each copy between host and
device adds a line: the process, `load` or `store`, bytes), and `faults`, a list of faults of a process:

    {"at": "middle", "nth": 2, "do": "stop", "once": "/tmp/struck"}

    at    join | warm_up | bucket (before its first byte) | middle (half of it) | between (all of it)
    nth   time that the process gets there, 1 by default
    do    hang | error | kill (SIGKILL) | stop (SIGSTOP)
    rank  only this rank
    once  a file: the process that creates it has the fault, all others have not; it holds the pid of that process
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import secrets
import signal
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from meshrl.weights.nccl.library import UNIQUE_ID_BYTES
from meshrl.weights.nccl.library import Buffer as AnyBuffer
from meshrl.weights.nccl.library import Host as AnyHost
from meshrl.weights.shared_memory import SharedMemory

from .device import GPU, PATTERN, opened

VARIABLE = "MESHRL_NCCL_STUB"
_CHECKOUT = Path(__file__).resolve().parents[2]
_HELLO = struct.Struct("<16sIII")  # nonce, rank, its port, length of the version that follows
_ANSWER = struct.Struct("<16sI")  # version of rank 0, port of the rank behind this one; 0: none
_PIECE = 1 << 18
"""Bytes that a rank takes before it passes them on."""
_WORK = struct.Struct("<4sQ")  # which collective, and its bytes
_FLOAT_BYTES = 4
_EAGER_BYTES = 4 << 20
"""Up to this many rank 0 is through with a broadcast before the others are: NCCL's buffers (NCCL_BUFFSIZE)."""


def settings(**stub: Any) -> dict[str, Any]:
    """`weights.nccl` for processes whose NCCL is this one, set up like this."""
    environment = {"PYTHONPATH": str(_CHECKOUT), VARIABLE: json.dumps(stub)}
    return {"library": "tests.doubles.nccl", "env": environment}


class StubError(RuntimeError):
    """An error that NCCL would have raised."""


class Library:
    """Host memory in place of a device."""

    memory = "stub"

    def __init__(self, device: int) -> None:
        settings = json.loads(os.environ.get(VARIABLE, "{}"))
        self.version: str = settings.get("version", "2.30.7")
        self._deaf: bool = settings.get("deaf", False)
        self._faults = Faults(settings.get("faults", []))
        self._stream = Stream(settings.get("crossings"))
        self._listener: socket.socket | None = None

    def unique_id(self) -> bytes:
        """`port nonce`, padded; only ranks on this host can follow it."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        return f"{port} {secrets.token_hex(8)}".encode().ljust(UNIQUE_ID_BYTES, b"\0")

    def join(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Rank 0 waits for all others, the others for rank 0. Raises StubError when versions differ."""
        self._faults.strike("join", rank)
        port, nonce = unique_id.rstrip(b"\0").split(b" ")
        before = behind = None
        if rank == 0:
            if self._listener is None:
                raise StubError("rank 0 has to make the unique id")
            next_port = _gather(self._listener, size, nonce, self.version)
            behind = _link(next_port, nonce)
        else:
            before, behind = _call(int(port), nonce, rank, self.version)
        return Communicator(rank, before, behind, self._stream, self._faults, deaf=self._deaf)

    def host(self, memory: mmap.mmap) -> Host:
        """Nothing to pin."""
        return Host(memory)

    def buffer(self, nbytes: int) -> Buffer:
        """A buffer in this process's own memory."""
        return Buffer(nbytes, self._stream)

    def gpu(self) -> str:
        """The only one. Deletes what dead processes had lent."""
        SharedMemory().sweep(PATTERN)
        return GPU

    def lent(self, handle: bytes, nbytes: int) -> Buffer:
        """A file of another process. Raises RuntimeError."""
        return Buffer(nbytes, self._stream, opened(handle, nbytes))

    def digest(self, buffer: AnyBuffer, nbytes: int) -> str:
        """Digest of the first `nbytes` bytes."""
        import numpy as np  # as the next: a second of a process's start on a busy machine

        from meshrl.common.chunk_digest import digest

        return digest(np.frombuffer(cast(Buffer, buffer).bytes[:nbytes], np.uint8))

    def mark(self) -> Callable[[], bool]:
        """An event in the stream's thread."""
        passed = threading.Event()
        self._stream.put(passed.set)
        return passed.is_set


class Stream:
    """Runs what is enqueued, in order, in a thread of its own; after a failure it stops, as a device would."""

    def __init__(self, crossings: str | None = None) -> None:
        self.failure: Exception | None = None
        self._crossings = crossings
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        """Enqueue."""
        self._work.put(work)

    def crosses(self, how: str, nbytes: int) -> None:
        """Count a copy between host and device."""
        if self._crossings is not None:
            with Path(self._crossings).open("a") as file:
                file.write(f"{os.getpid()} {how} {nbytes}\n")

    def _run(self) -> None:
        while self.failure is None:
            try:
                self._work.get()()
            except (OSError, StubError) as error:
                self.failure = error


class Host:
    """Memory that two processes have."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._view = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
        self.address = ctypes.addressof(self._view)

    def close(self) -> None:
        """Release it."""
        del self._view


class Buffer:
    """A device's memory, played by the host's."""

    def __init__(self, nbytes: int, stream: Stream, file: mmap.mmap | None = None) -> None:
        self._stream = stream
        kind = ctypes.c_uint8 * nbytes
        self._device = kind() if file is None else kind.from_buffer(file)
        self.bytes = memoryview(self._device).cast("B")

    def load(self, host: AnyHost, at: int, nbytes: int) -> None:
        """Host to device."""
        source = cast(Host, host).address + at
        self._stream.crosses("load", nbytes)
        self._stream.put(lambda: ctypes.memmove(self._device, source, nbytes))

    def store(self, host: AnyHost, at: int, nbytes: int) -> None:
        """Device to host."""
        to = cast(Host, host).address + at
        self._stream.crosses("store", nbytes)
        self._stream.put(lambda: ctypes.memmove(to, self._device, nbytes))

    def close(self) -> None:
        """Do nothing."""


class Communicator:
    """One rank, with a connection to the one before it and to the one behind it."""

    def __init__(
        self,
        rank: int,
        before: socket.socket | None,
        behind: socket.socket | None,
        stream: Stream,
        faults: Faults,
        *,
        deaf: bool,
    ) -> None:
        self._rank = rank
        self._before = before
        self._behind = behind
        self._stream = stream
        self._faults = faults
        self._deaf = deaf
        self._warm = False

    def warm_up(self) -> None:
        """Send every rank's float to rank 0 and back."""
        self._stream.put(self._warm_up)

    def broadcast(self, buffer: AnyBuffer, nbytes: int, root: int) -> None:
        """From rank 0 only."""
        if root != 0:
            raise StubError(f"the stub broadcasts from rank 0, not {root}")
        view = cast(Buffer, buffer).bytes[:nbytes]
        self._stream.put(lambda: self._broadcast(view))

    def check(self) -> None:
        """Raises StubError."""
        if self._stream.failure is not None:
            raise StubError(f"{self._stream.failure}") from self._stream.failure

    def abort(self) -> None:
        """Close the connections; the other ranks notice."""
        for peer in filter(None, (self._before, self._behind)):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _warm_up(self) -> None:
        self._faults.strike("warm_up", self._rank)
        one = bytearray(_FLOAT_BYTES)
        self._agree(b"REDU", _FLOAT_BYTES)
        self._to_root(one)
        self._from_root(memoryview(one))
        self._warm = True

    def _broadcast(self, view: memoryview) -> None:
        if not self._warm:
            raise StubError("a broadcast before the all-reduce of one float32: NCCL would hang")
        self._faults.strike("bucket", self._rank)
        self._agree(b"CAST", len(view))
        half = len(view) // 2
        self._from_root(view[:half])
        self._faults.strike("middle", self._rank)
        self._from_root(view[half:])
        if len(view) > _EAGER_BYTES:
            self._to_root(bytearray(1))  # sockets may buffer more than a device does
        self._faults.strike("between", self._rank)

    def _from_root(self, part: memoryview) -> None:
        """Down the chain, piece by piece."""
        for start in range(0, len(part), _PIECE):
            piece = part[start : start + _PIECE]
            if self._before is not None:
                self._receive(self._before, piece)
            if self._behind is not None:
                self._send(self._behind, piece)

    def _to_root(self, part: bytearray) -> None:
        """Up the chain."""
        if self._behind is not None:
            self._receive(self._behind, memoryview(part))
        if self._before is not None:
            self._send(self._before, part)

    def _agree(self, work: bytes, nbytes: int) -> None:
        """Rank 0 sends its operation; a rank with another one fails."""
        mine = _WORK.pack(work, nbytes)
        theirs = bytearray(mine)
        self._from_root(memoryview(theirs))
        if theirs != mine:
            raise StubError(
                f"rank 0 does {_WORK.unpack(theirs)}, rank {self._rank} {_WORK.unpack(mine)}: NCCL would hang"
            )

    def _send(self, peer: socket.socket, data: Any) -> None:
        try:
            peer.sendall(data)
        except OSError:
            self._lost()

    def _receive(self, peer: socket.socket, into: memoryview) -> None:
        try:
            _fill(peer, into)
        except OSError:
            self._lost()

    def _lost(self) -> None:
        if self._deaf:
            threading.Event().wait()
        raise StubError(
            "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
        )


class Faults:
    """The faults in MESHRL_NCCL_STUB."""

    def __init__(self, wanted: list[dict[str, Any]]) -> None:
        self._requested = wanted
        self._visits: Counter[str] = Counter()

    def strike(self, point: str, rank: int) -> None:
        """Called at each point where a fault can happen."""
        self._visits[point] += 1
        here = (point, self._visits[point], rank)
        for fault in self._requested:
            there = (fault["at"], fault.get("nth", 1), fault.get("rank", rank))
            if here == there and _first(fault.get("once")):
                _ACTIONS[fault["do"]]()


def _first(once: str | None) -> bool:
    if once is None:
        return True
    try:
        with Path(once).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def _fail() -> None:
    raise StubError("NCCL_ERROR_SYSTEM_ERROR: on request")


_ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "error": _fail,
    "hang": lambda: threading.Event().wait(),
}


def _gather(listener: socket.socket, size: int, nonce: bytes, version: str) -> int:
    """Wait for all other ranks, and tell each which is behind it; returns the port of rank 1."""
    peers: dict[int, tuple[socket.socket, int]] = {}
    while len(peers) < size - 1:
        connection, _ = listener.accept()
        head = bytearray(_HELLO.size)
        try:
            _fill(connection, memoryview(head))
            theirs, rank, port, length = _HELLO.unpack(head)
            words = bytearray(length)
            _fill(connection, memoryview(words))
        except OSError:
            connection.close()
            continue
        if theirs != nonce:
            connection.close()
            continue
        if version != words.decode():
            connection.sendall(_ANSWER.pack(version.encode(), 0))
        _check_version(version, words.decode())
        peers[rank] = connection, port
    listener.close()
    for rank, (connection, _) in peers.items():
        behind = peers[rank + 1][1] if rank + 1 in peers else 0
        connection.sendall(_ANSWER.pack(version.encode(), behind))
        connection.close()
    return peers[1][1]


def _call(
    port: int, nonce: bytes, rank: int, version: str
) -> tuple[socket.socket, socket.socket | None]:
    """The connections to the rank before and to the one behind."""
    listener = socket.create_server(("127.0.0.1", 0))
    mine = listener.getsockname()[1]
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(_HELLO.pack(nonce, rank, mine, len(version)) + version.encode())
            answer = bytearray(_ANSWER.size)
            _fill(connection, memoryview(answer))
        root, next_port = _ANSWER.unpack(answer)
        _check_version(root.rstrip(b"\0").decode(), version)
        behind = _link(next_port, nonce) if next_port else None
        while True:
            before, _ = listener.accept()
            theirs = bytearray(len(nonce))
            with contextlib.suppress(OSError):
                _fill(before, memoryview(theirs))
            if theirs == nonce:
                return before, behind
            before.close()
    except OSError as error:
        raise StubError(f"NCCL_ERROR_SYSTEM_ERROR: rank 0 has ended ({error})") from error
    finally:
        listener.close()


def _link(port: int, nonce: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(nonce)
    return connection


def _check_version(root: str, other: str) -> None:
    if root != other:
        raise StubError(
            f"NCCL_ERROR_INVALID_USAGE: Mismatched NCCL version detected: {root}, {other}"
        )


def _fill(connection: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if not count:
            raise ConnectionResetError("hung up")
        done += count
