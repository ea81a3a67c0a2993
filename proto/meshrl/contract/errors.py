"""The one tree of errors. Each names the boundary that a failure crossed, and carries the values.

    MeshError
    ├── UserError              a user's mistake: exit code 2, INVALID_ARGUMENT
    │   └── ConfigError        … in a recipe, naming file, key and the nearest right name
    ├── NotFoundError          no such run, row, version, dead letter
    ├── ConflictError          it exists already and differs
    ├── FencedError            the caller's lease, token or epoch is no longer the newest
    ├── WaitTimeoutError       the deadline of a wait passed; says what was waited for
    ├── EndOfDataError         nothing is left and nothing will come
    ├── CapacityError          does not fit: message, disk, memory, rate
    ├── UnauthenticatedError   no token, or an unknown one
    ├── ForbiddenError         a known caller who may not do this
    ├── UnavailableError       the other side cannot be reached or is draining; try again
    │   └── BusyError          … or has as much to do as it takes: RESOURCE_EXHAUSTED
    ├── CorruptError           stored or sent bytes are not what they were
    └── InfraError             anything else that broke on our side
        └── PartFailedError    … while a trainer computed a part of a batch that trainers had died with

A `code` is the class's name over the network; `details` travel with it, so that a client raises the same class with
the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final


class MeshError(Exception):
    """The root of everything that meshrl raises on purpose."""

    code: ClassVar[str] = "mesh"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, str] = {key: str(value) for key, value in details.items()}

    def __str__(self) -> str:
        return self.message


class UserError(MeshError):
    """Bad input: says what is wrong, where, and what would be right."""

    code = "user"


class ConfigError(UserError):
    """A recipe or an option is wrong."""

    code = "config"


class NotFoundError(MeshError):
    """The thing named does not exist."""

    code = "not_found"


class ConflictError(MeshError):
    """The thing exists already and differs."""

    code = "conflict"


class FencedError(MeshError):
    """The caller holds a lease, a token or an epoch that is no longer the newest."""

    code = "fenced"


class WaitTimeoutError(MeshError):
    """A wait reached its deadline."""

    code = "wait_timeout"
    retryable = True


class EndOfDataError(MeshError):
    """Nothing is left to take or lease, and nothing will come."""

    code = "end_of_data"


class CapacityError(MeshError):
    """A message is too large, or the disk or the memory is full."""

    code = "capacity"
    retryable = True


class UnauthenticatedError(MeshError):
    """The caller did not say who they are in a way that counts here."""

    code = "unauthenticated"


class ForbiddenError(MeshError):
    """The caller is known and may not do this."""

    code = "forbidden"


class UnavailableError(MeshError):
    """The other side cannot be reached, starts, or drains."""

    code = "unavailable"
    retryable = True


class BusyError(UnavailableError):
    """The service holds as many calls as it takes, from everybody or from this caller. Nothing was done."""

    code = "busy"


class EngineGoneError(UnavailableError):
    """The engine of this process has stopped, or was not started. Over a wire it is an UnavailableError."""


class BrokenDiskError(UnavailableError):
    """A disk that has room fails to write; nothing more can be stored. Over a wire it is an UnavailableError."""


class CorruptError(MeshError):
    """Stored or sent bytes are not what they were."""

    code = "corrupt"


class InfraError(MeshError):
    """Something broke on our side."""

    code = "infra"


class PartFailedError(InfraError):
    """A step of a part of a batch failed that trainers had died with; the next one gets another part."""


def _tree(root: type[MeshError]) -> dict[str, type[MeshError]]:
    found: dict[str, type[MeshError]] = {}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found | {root.code: root}


AWAY: Final = (UnavailableError, CapacityError)
"""Errors of a call whose service stayed unavailable for as long as calls wait: unreachable, or its disk full."""
BY_CODE: Mapping[str, type[MeshError]] = _tree(MeshError)
"""Error classes by code."""


def from_detail(code: str, message: str, details: Mapping[str, str]) -> MeshError:
    """The exception that the other side raised; an unknown code becomes InfraError."""
    return BY_CODE.get(code, InfraError)(message, **dict(details))
