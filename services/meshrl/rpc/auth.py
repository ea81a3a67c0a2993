"""Authentication, roles and rate limits of callers: bearer tokens, stored as hashes, compared in constant time."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from meshrl.common import bounded_yaml
from meshrl.common.config import Config
from meshrl.common.files import check_private_file
from meshrl.contract.errors import (
    CapacityError,
    ConfigError,
    ForbiddenError,
    UnauthenticatedError,
)
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

    tokens: list[TokenEntry] | None
    """Every valid token; nothing after `tokens:` is none yet."""


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
        return TokenFile.model_validate(bounded_yaml.load(path.read_text())).tokens or []
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


ANYBODY = Principal(name="anonymous", roles=frozenset(Role))
_OF_RUN: Mapping[MeshRole, frozenset[Role]] = {
    MeshRole.OPERATOR: frozenset(Role),
    MeshRole.SUBMITTER: frozenset((Role.READ, Role.SUBMIT)),
    MeshRole.AGENT: frozenset((Role.CLAIM,)),
    MeshRole.READER: frozenset((Role.READ,)),
    MeshRole.TRAINER: frozenset((Role.READ,)),
    MeshRole.ROLLOUT: frozenset((Role.READ,)),
}
"""What a credential of the run allows beside the tokens of a file."""


class Authorizer:
    """Admits callers by token, credential of the run or certificate, by role and by rate.

    Without a tokens file, verifiers and names of certificates everybody is `anonymous` with every role: in a library
    or a test. `up` and `serve` always have verifiers.
    """

    def __init__(
        self,
        tokens: TokenStore | None,
        *,
        requests_per_minute: float,
        submissions_per_minute: float,
        verifiers: Path | None = None,
        certificates: Mapping[str, MeshRole] | None = None,
    ) -> None:
        """Raises ConfigError.

        Args:
            tokens: Those of a file.
            requests_per_minute: Of one caller.
            submissions_per_minute: Of one caller.
            verifiers: Hashes of the run's credentials; the name of such a caller is its role.
            certificates: Role by the name of a client's certificate; a credential beside it can only narrow it.
        """
        self._tokens = tokens
        self._verifiers = None if verifiers is None else Reloaded(verifiers, read_verifiers)
        self._certificates = certificates or {}
        self._requests = RateLimit("requests", requests_per_minute)
        self._submissions = RateLimit("submissions", submissions_per_minute)

    @property
    def _asks(self) -> bool:
        return bool(self._tokens or self._verifiers or self._certificates)

    def admit(
        self, authorization: str, peer: str, role: Role, names: Sequence[str] | None = None
    ) -> Principal:
        """The caller, who has `role`; counts one request. `names` are those of its certificate.

        Raises:
            UnauthenticatedError, ForbiddenError, CapacityError (too many requests).
        """
        who = self._known(authorization, peer, names)
        caller = who.name if self._asks else peer
        self._requests.count(caller)
        _require(who, role)
        if role is Role.SUBMIT:
            self._submissions.count(caller)
        return who

    def check(
        self, authorization: str, peer: str, role: Role, names: Sequence[str] | None = None
    ) -> None:
        """As `admit`, before a body is read; counts guesses only. Raises what `admit` does."""
        _require(self._known(authorization, peer, names), role)

    def _known(self, authorization: str, peer: str, names: Sequence[str] | None) -> Principal:
        try:
            return self._find(authorization, names)
        except UnauthenticatedError:
            self._requests.count(peer)  # guesses are limited too, by address: there is no name yet
            raise

    def _find(self, authorization: str, names: Sequence[str] | None) -> Principal:
        if not self._asks:
            return ANYBODY
        certified = None if names is None or not self._certificates else self._certified(names)
        if certified is not None and not authorization:
            return certified
        who = self._of_run(authorization)
        if who is None and self._tokens is not None:
            who = self._tokens.find(authorization)
        if who is None:
            raise UnauthenticatedError(
                "this needs a credential of the run, or a token: Authorization: Bearer <what is in"
                " <run.dir>/credentials/<role>>"
            )
        return who if certified is None else replace(who, roles=who.roles & certified.roles)

    def _certified(self, names: Sequence[str]) -> Principal:
        for name in names:
            if (role := self._certificates.get(name)) is not None:
                return Principal(name=name, roles=_OF_RUN.get(role, frozenset()))
        raise ForbiddenError(
            f"the certificate of {', '.join(names) or 'nobody'} has no role here: name it in tls.roles"
        )

    def _of_run(self, authorization: str) -> Principal | None:
        scheme, _, token = authorization.strip().partition(" ")
        if self._verifiers is None or scheme.lower() != "bearer":
            return None
        role = self._verifiers.get().get(sha256(token.strip()))
        return None if role is None else Principal(name=role, roles=_OF_RUN.get(role, frozenset()))


def _require(who: Principal, role: Role) -> None:
    """Raises ForbiddenError."""
    if role not in who.roles:
        raise ForbiddenError(f"{who.name} may not do this: it needs the role {role}")
