"""Maps exceptions to gRPC statuses, and carries exceptions to the caller in the trailing metadata.

    servicer raises ──▶ interceptors.as_status ──ErrorDetail──▶ `from_rpc` (client) ──▶ the same class and details

An error of a proxy, a lost connection or gRPC itself has no ErrorDetail; `from_rpc` chooses a class by its status.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from meshrl.contract.codec import printable
from meshrl.contract.errors import (
    BusyError,
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
from meshrl.v1 import errors_pb2 as pb

log = logging.getLogger(__name__)

Status = TypeVar("Status")

DRAINING: Final = "the service is draining"
"""Answer of a service that ends."""
DETAIL_KEY: Final = "meshrl-error-bin"
MAX_TEXT: Final = 2_000
"""Characters of a message or of one detail, because metadata is bounded. Longer texts belong in a log."""
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
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    CorruptError: grpc.StatusCode.DATA_LOSS,
    InfraError: grpc.StatusCode.INTERNAL,
    MeshError: grpc.StatusCode.UNKNOWN,
}
"""Status by class. A subclass has its parent's status."""


class PortInUseError(UserError):
    """Another program took the port after it was chosen: `up` starts the service again on another one."""


def by_class(table: Mapping[type[MeshError], Status], error: MeshError) -> Status:
    """The entry for the nearest base class of `error`, in a table that contains MeshError."""
    return next(table[kind] for kind in type(error).__mro__ if kind in table)


def status_of(error: MeshError) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return by_class(STATUS, error)


def to_detail(error: MeshError) -> bytes:
    """An ErrorDetail, bounded in size."""
    details = {
        printable(name): printable(value[:MAX_TEXT])
        for name, value in list(error.details.items())[:MAX_DETAILS]
    }
    message = printable(error.message[:MAX_TEXT])
    return pb.ErrorDetail(code=error.code, message=message, details=details).SerializeToString()


def from_rpc(error: grpc.RpcError, service: str) -> MeshError:
    """The error that the service raised, or why it could not be reached. `service` is its name and address."""
    detail = _detail(error)
    if detail is not None:
        return from_detail(detail.code, detail.message, detail.details)
    code, reason = error.code(), error.details() or "no reason given"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return UnavailableError(f"{service} cannot be reached: {reason}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return WaitTimeoutError(f"{service} did not answer in time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _too_large(service, reason)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InfraError(f"{service} does not know this method; is it that service? ({reason})")
    return InfraError(f"{service} failed with {code.name}: {reason}")


def _detail(error: grpc.RpcError) -> pb.ErrorDetail | None:
    # grpc.aio returns a Metadata, the synchronous API a tuple of pairs.
    trailing = cast("Iterable[tuple[str, str | bytes]] | None", error.trailing_metadata())
    value = dict(trailing or ()).get(DETAIL_KEY)
    if not isinstance(value, bytes):
        return None
    try:
        return pb.ErrorDetail.FromString(value)
    except DecodeError:
        log.warning("an error detail could not be read: %r", value[:80])
        return None


def _too_large(service: str, reason: str) -> CapacityError:
    sizes = re.search(r"\((\d+) vs\. (\d+)\)", reason)
    if not sizes:
        return CapacityError(f"{service} has no room: {reason}")
    size, limit = sizes.groups()
    return CapacityError(
        f"a message of {size} bytes to or from {service} is larger than {limit}",
        size=size,
        limit=limit,
    )
