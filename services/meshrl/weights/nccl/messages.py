"""Messages between a process, its NCCL process and the other end: a length, then JSON. Never weights."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import struct
from typing import Any, TypeAlias

from meshrl.contract.errors import InfraError, UnavailableError

Frame: TypeAlias = dict[str, Any]
LONGEST = 1 << 16
HELLO_S = 10.0
_LENGTH = struct.Struct("<I")


def pack(frame: Frame) -> bytes:
    """Little-endian uint32 length, then the JSON object in UTF-8."""
    text = json.dumps(frame, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side has closed the connection. Raises InfraError for what is no frame."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return _parse(await reader.readexactly(_length(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def greeting(reader: asyncio.StreamReader, token: str) -> Frame:
    """The first frame of who connects, and shows the token. Raises UnavailableError for anybody else."""
    try:
        async with asyncio.timeout(HELLO_S):
            frame = await read(reader) or {}
    except (TimeoutError, InfraError) as error:
        raise UnavailableError(f"it says nothing that is understood: {error!r}") from error
    shown = str(frame.get("token", "")).encode("utf-8", "surrogatepass")
    if not hmac.compare_digest(shown, token.encode()):
        raise UnavailableError("the token is wrong")
    return frame


def receive(connection: socket.socket) -> Frame | None:
    """`read` for a thread that may block."""
    head = _exactly(connection, _LENGTH.size)
    text = _exactly(connection, _length(head)) if head else None
    return _parse(text) if text else None


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= LONGEST:
        raise InfraError(f"a frame of {length} bytes, want 1 to {LONGEST}")
    return int(length)


def _parse(text: bytes) -> Frame:
    try:
        frame = json.loads(text)
    except ValueError as error:
        raise InfraError(f"a frame that is not JSON: {text[:40]!r}") from error
    if not isinstance(frame, dict):
        raise InfraError(f"a frame that is not an object: {text[:40]!r}")
    return frame


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(count - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
