"""Authentication, roles and rate limits of callers: bearer tokens, stored as hashes, compared in constant time."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from meshrl.contract.config import Config
from meshrl.contract.errors import (
    CapacityError,
    ConfigError,
    ForbiddenError,
    UnauthenticatedError,
)
from meshrl.contract.files import check_private_file
from meshrl.rpc.credentials import MeshRole, Reloaded, read_verifiers, sha256

MAX_CALLERS = 10_000
"""Callers whose rate is remembered; the least recently seen is dropped first."""


class Role(StrEnum):
    """What a token allows; no role includes another."""

    READ = "read"
    """List, show, diff, compare, try out, score."""
    SUBMIT = "submit"
    """Submit a version."""
    OPERATE = "operate"
    """Roll back, retire, watch."""
    CLAIM = "claim"
    """Claim sessions at a gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller."""

    name: str
    roles: frozenset[Role]


class TokenEntry(Config):
    """One line of a tokens file."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\x21-\x7e]+$")
    """For the audit log; several tokens may share it."""
    roles: list[Role]
    """What it allows."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the token."""


class TokenFile(Config):
    """A tokens file."""

    tokens: list[TokenEntry]
    """Every valid token."""


class TokenStore:
    """The tokens of a file; reads it again when it changes, so that a token can be revoked at run time."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError, which names file and key."""
        self._entries = Reloaded(path, _read, every_s=0.0)

    def find(self, authorization: str) -> Principal:
        """The caller with this `Authorization` header. Raises UnauthenticatedError."""
        scheme, _, token = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise UnauthenticatedError("this service needs a token: Authorization: Bearer <token>")
        digest = sha256(token.strip())
        match: TokenEntry | None = None
        for entry in self._entries.get():  # always all of them, so that the time reveals nothing
            if hmac.compare_digest(entry.sha256, digest):
                match = entry
        if match is None:
            raise UnauthenticatedError("this token is unknown here")
        return Principal(name=match.name, roles=frozenset(match.roles))


def _read(path: Path) -> Sequence[TokenEntry]:
    check_private_file(path, "tokens file")
    try:
        return TokenFile.model_validate(yaml.safe_load(path.read_text())).tokens
    except OSError as error:
        raise ConfigError(f"tokens file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokens file {path}: not valid YAML") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"tokens file {path}: {where}: {first['msg']} (want tokens: [{{name, roles, sha256}}])"
        ) from error


class RateLimit:
    """A token bucket per caller: `per_minute` on average, and as many in a burst."""

    def __init__(self, what: str, per_minute: float) -> None:
        self._what = what
        self._per_minute = per_minute
        self._left: dict[str, tuple[float, float]] = {}
        """Caller to (tokens left, time in s)."""

    def count(self, caller: str) -> None:
        """Count one event of `caller`. Raises CapacityError with `retry_after_s`."""
        now = time.monotonic()
        full = max(1.0, self._per_minute)
        left, at = self._left.pop(caller, (full, now))
        left = min(full, left + (now - at) * self._per_minute / 60)
        allowed = left >= 1
        self._left[caller] = (left - allowed, now)
        if len(self._left) > MAX_CALLERS:
            del self._left[next(iter(self._left))]
        if not allowed:
            wait_s = (1 - left) * 60 / self._per_minute
            raise CapacityError(
                f"more than {self._per_minute:g} {self._what} a minute; try again in {wait_s:.1f} s",
                retry_after_s=round(wait_s, 1),
            )


_OF_RUN: Mapping[MeshRole, frozenset[Role]] = {
    MeshRole.OPERATOR: frozenset(Role),
    MeshRole.SUBMITTER: frozenset((Role.READ, Role.SUBMIT)),
    MeshRole.READER: frozenset((Role.READ,)),
    MeshRole.TRAINER: frozenset((Role.READ,)),
    MeshRole.ROLLOUT: frozenset((Role.READ,)),
}
"""What a credential of the run allows beside the tokens of a file."""


class Authorizer:
    """Admits callers by token, role and rate. Without a token store everybody is `anonymous` with every role.

    A credential of the run is known as well, if there are `verifiers`: its name is its role.
    """

    def __init__(
        self,
        tokens: TokenStore | None,
        *,
        requests_per_minute: float,
        submissions_per_minute: float,
        verifiers: Path | None = None,
    ) -> None:
        self._tokens = tokens
        self._verifiers = None if verifiers is None else Reloaded(verifiers, read_verifiers)
        self._requests = RateLimit("requests", requests_per_minute)
        self._submissions = RateLimit("submissions", submissions_per_minute)

    @property
    def closed(self) -> bool:
        """True if callers need tokens."""
        return self._tokens is not None

    def admit(self, authorization: str, peer: str, role: Role) -> Principal:
        """The caller, who has `role`; counts one request.

        Raises:
            UnauthenticatedError, ForbiddenError, CapacityError (too many requests).
        """
        of_run = self._of_run(authorization)
        if of_run is not None:
            who = of_run
            self._requests.count(who.name)
        elif self._tokens is None:
            who = Principal(name="anonymous", roles=frozenset(Role))
            self._requests.count(peer)
        else:
            who = self._find(authorization, peer)
            self._requests.count(who.name)
        if role not in who.roles:
            raise ForbiddenError(f"{who.name} may not do this: it needs the role {role}")
        if role is Role.SUBMIT:
            self._submissions.count(who.name if self._tokens else peer)
        return who

    def check(self, authorization: str, role: Role) -> None:
        """As `admit`, without counting. Raises UnauthenticatedError, ForbiddenError."""
        who = self._of_run(authorization)
        if who is None and self._tokens is not None:
            who = self._tokens.find(authorization)
        if who is not None and role not in who.roles:
            raise ForbiddenError(f"{who.name} may not do this: it needs the role {role}")

    def _of_run(self, authorization: str) -> Principal | None:
        if self._verifiers is None:
            return None
        _, _, token = authorization.strip().partition(" ")
        role = self._verifiers.get().get(sha256(token.strip()))
        return None if role is None else Principal(name=role, roles=_OF_RUN.get(role, frozenset()))

    def _find(self, authorization: str, peer: str) -> Principal:
        assert self._tokens is not None
        try:
            return self._tokens.find(authorization)
        except UnauthenticatedError:
            self._requests.count(peer)  # guesses are limited too, by address: there is no name yet
            raise
