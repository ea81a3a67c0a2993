"""One table from exception to status, and the way of an exception over the wire: bytes in the trailing metadata.

    servicer raises ──▶ `as_status` (server) ──ErrorDetail──▶ `from_rpc` (client) ──▶ the same class and details

What a proxy, a dead peer or gRPC itself says has no ErrorDetail; `from_rpc` names it by its status.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from meshrl.contract.codec.checks import printable
from meshrl.contract.errors import (
    CapacityError,
    ConflictError,
    CorruptError,
    EndOfDataError,
    FencedError,
    ForbiddenError,
    InfraError,
    MeshError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
    from_detail,
)
from meshrl.rpc.interceptors import Behavior, Context
from meshrl.v1 import errors_pb2 as pb

log = logging.getLogger(__name__)

Status = TypeVar("Status")

DETAIL_KEY: Final = "meshrl-error-bin"
MAX_TEXT: Final = 2_000
"""Characters of a message or of one detail: metadata is bounded, and a longer one belongs in a log."""
MAX_DETAILS: Final = 8

STATUS: Mapping[type[MeshError], grpc.StatusCode] = {
    UserError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    ConflictError: grpc.StatusCode.ALREADY_EXISTS,
    FencedError: grpc.StatusCode.ABORTED,
    WaitTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    EndOfDataError: grpc.StatusCode.OUT_OF_RANGE,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    CorruptError: grpc.StatusCode.DATA_LOSS,
    InfraError: grpc.StatusCode.INTERNAL,
    MeshError: grpc.StatusCode.UNKNOWN,
}
"""By class; a subclass has its parent's status."""


def by_class(table: Mapping[type[MeshError], Status], error: MeshError) -> Status:
    """What a table that ends with MeshError has for the nearest class of `error`."""
    return next(table[kind] for kind in type(error).__mro__ if kind in table)


def status_of(error: MeshError) -> grpc.StatusCode:
    """The status of the nearest class in the table."""
    return by_class(STATUS, error)


def to_detail(error: MeshError) -> bytes:
    """An ErrorDetail, bounded in size."""
    details = {
        printable(name): printable(value[:MAX_TEXT])
        for name, value in list(error.details.items())[:MAX_DETAILS]
    }
    message = printable(error.message[:MAX_TEXT])
    return pb.ErrorDetail(code=error.code, message=message, details=details).SerializeToString()


def as_status(method: str, behavior: Behavior) -> Behavior:
    """Runs a handler; what it raises leaves as a status. The one place that catches everything."""

    async def run(request: Any, context: Context) -> Any:
        try:
            return await behavior(request, context)
        except grpc.aio.BaseError:
            raise  # gRPC's own: aborted already, or the caller has left while it was written to
        except MeshError as error:
            await _abort(context, error)
        except Exception as error:
            log.exception("%s failed", method)
            await _abort(context, InfraError(f"{method}: {type(error).__name__}: {error}"))

    return run


async def _abort(context: Context, error: MeshError) -> None:
    line = printable(error.message[:MAX_TEXT])
    await context.abort(status_of(error), line, ((DETAIL_KEY, to_detail(error)),))


def from_rpc(error: grpc.RpcError, peer: str) -> MeshError:
    """What the other side raised, or what kept us from hearing it. `peer` says who and where it is."""
    detail = _detail(error)
    if detail is not None:
        return from_detail(detail.code, detail.message, detail.details)
    code, said = error.code(), error.details() or "no reason given"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return UnavailableError(f"{peer} cannot be reached: {said}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return WaitTimeoutError(f"{peer} did not answer in time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _too_large(peer, said)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InfraError(f"{peer} does not know this method; is it that service? ({said})")
    return InfraError(f"{peer} failed with {code.name}: {said}")


def _detail(error: grpc.RpcError) -> pb.ErrorDetail | None:
    # grpc.aio hands out a Metadata, the synchronous API a tuple of pairs.
    trailing = cast("Iterable[tuple[str, str | bytes]] | None", error.trailing_metadata())
    value = dict(trailing or ()).get(DETAIL_KEY)
    if not isinstance(value, bytes):
        return None
    try:
        return pb.ErrorDetail.FromString(value)
    except DecodeError:
        log.warning("an error detail could not be read: %r", value[:80])
        return None


def _too_large(peer: str, said: str) -> CapacityError:
    sizes = re.search(r"\((\d+) vs\. (\d+)\)", said)
    if not sizes:
        return CapacityError(f"{peer} has no room: {said}")
    size, limit = sizes.groups()
    return CapacityError(
        f"a message of {size} bytes between here and {peer} is larger than {limit}",
        size=size,
        limit=limit,
    )
