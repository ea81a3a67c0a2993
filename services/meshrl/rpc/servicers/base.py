"""Shared by the servicers: limits on requests, and iterators that are closed when the caller leaves."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

from meshrl.contract.errors import CapacityError, UserError
from meshrl.rpc.transport import MAX_STREAM_BYTES, MAX_WAIT_S, SizedMessage

Item = TypeVar("Item")
Request = TypeVar("Request", bound=SizedMessage)


def full_name(file: FileDescriptor, service: str) -> str:
    """The full name of a service (`meshrl.v1.Queue`), as health and reflection use it."""
    services: Mapping[str, ServiceDescriptor] = file.services_by_name
    name: str = services[service].full_name
    return name


def bounded(wait_s: float) -> float:
    """Cut a wait to MAX_WAIT_S. Raises UserError if it is negative or NaN."""
    if math.isnan(wait_s) or wait_s < 0:
        raise UserError(f"wait_s is {wait_s}; want 0 or more seconds")
    return min(wait_s, MAX_WAIT_S)


async def collected(requests: AsyncIterator[Request]) -> list[Request]:
    """All messages of a streamed request. Raises CapacityError beyond MAX_STREAM_BYTES."""
    messages: list[Request] = []
    size = 0
    async for request in requests:
        size += request.ByteSize()
        if size > MAX_STREAM_BYTES:
            raise CapacityError(
                f"a request of more than {MAX_STREAM_BYTES} bytes: send it in parts",
                size=size,
                limit=MAX_STREAM_BYTES,
            )
        messages.append(request)
    return messages


@asynccontextmanager
async def closing(iterator: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Close a generator as soon as the caller leaves, not when the generator is garbage-collected."""
    try:
        yield iterator
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()
