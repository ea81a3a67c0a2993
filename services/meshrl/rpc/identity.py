"""Identity and rights of callers: one table of methods and roles, which gRPC and HTTP servers ask.

    authorization ──▶ credential of the run, or a token of a file ─┐
    mutual TLS ─────▶ certificate ─────────────────────────────────┴─▶ Principal ──▶ METHODS[method] ──▶ the method
                             none: UNAUTHENTICATED, 401                 no role of it: PERMISSION_DENIED, 403

A method that is in no table is refused to everybody. Health is open. What the tables cannot say, because it is in
the request, servicers ask: `servicers.require_stage` (a role works on its own stages only).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import yaml
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from pydantic import Field, ValidationError

from meshrl.common import bounded_yaml
from meshrl.common.config import Config
from meshrl.common.files import check_private_file
from meshrl.contract.errors import (
    CapacityError,
    ConfigError,
    ForbiddenError,
    MeshError,
    UnauthenticatedError,
)
from meshrl.rpc.clients.operators import QueueAdminTable, RewardRegistryTable
from meshrl.rpc.clients.queue import QueueTable
from meshrl.rpc.clients.services import (
    RewardTable,
    RolloutTable,
    TrainerTable,
    TrainingTable,
    WeightPatchesTable,
    WeightsTable,
)
from meshrl.rpc.credentials import MeshRole, Reloaded, read_verifiers, role_of_stage, sha256
from meshrl.rpc.interceptors import Behavior, Context
from meshrl.rpc.methods import MethodTable

TABLES: Final[Sequence[type[MethodTable]]] = (
    QueueTable,
    QueueAdminTable,
    RolloutTable,
    RewardTable,
    RewardRegistryTable,
    TrainerTable,
    TrainingTable,
    WeightsTable,
    WeightPatchesTable,
)
METHODS: Final[Mapping[str, frozenset[MeshRole]]] = {
    **{method.path: method.row.roles for table in TABLES for method in table.methods.values()},
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": frozenset(MeshRole),
}
"""The operator may call all of them."""

OPEN: Final = frozenset(f"/{health.SERVICE_NAME}/{method}" for method in ("Check", "Watch", "List"))
"""Methods without a credential: orchestrators and load balancers probe health without a credential."""

METRICS: Final = "/metrics"
CLAIM: Final = "a claim of a session"
VIEW: Final = "the view"
TINKER: Final = "the Tinker API"
PAGES: Final[Mapping[str, frozenset[MeshRole]]] = {
    METRICS: frozenset((MeshRole.READER, MeshRole.OPERATOR)),
    CLAIM: frozenset((MeshRole.AGENT, MeshRole.OPERATOR)),
    VIEW: frozenset((MeshRole.READER, MeshRole.OPERATOR)),
    TINKER: frozenset((MeshRole.TUNER, MeshRole.OPERATOR)),
}
"""Roles by page that HTTP alone serves. Its routes of the reward registry are methods of METHODS."""

_REGISTRY: Final = "/meshrl.v1.RewardRegistry"
TokenRole: TypeAlias = Literal["read", "submit", "operate", "claim"]
TOKENS: Final[Mapping[TokenRole, tuple[MeshRole, frozenset[str]]]] = {
    "read": (
        MeshRole.READER,
        frozenset(name for name in METHODS if MeshRole.READER in METHODS[name]) | {METRICS},
    ),
    "submit": (MeshRole.SUBMITTER, frozenset((f"{_REGISTRY}/SubmitReward",))),
    "operate": (
        MeshRole.OPERATOR,
        frozenset((f"{_REGISTRY}/RollBackReward", f"{_REGISTRY}/RetireReward")),
    ),
    "claim": (MeshRole.AGENT, frozenset((CLAIM,))),
}
"""The words of a tokens file: each is a role, for these methods only."""

MAX_CALLERS: Final = 10_000
"""Callers whose rate is remembered; the least recently seen is dropped first."""


def roles_for(method: str) -> frozenset[MeshRole]:
    """The roles that may call a method; none for one that is in no table."""
    return METHODS.get(method) or PAGES.get(method, frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """A caller before it is known: what a request brings."""

    authorization: str = ""
    """The `Authorization` header, or the metadata of that name."""
    names: Sequence[str] | None = None
    """Common name and SANs of its certificate; None: it has none."""
    peer: str = ""
    """Address."""
    door: str = ""
    """http or grpc."""
    subject: str = ""
    """Name of what the request is about, for the log of refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller who is known."""

    name: str
    """Name of its token or certificate; else its role."""
    roles: frozenset[MeshRole]
    """Empty if no credentials are asked for."""
    token: frozenset[TokenRole] | None = None
    """Roles of its token; None: it showed none."""
    peer: str = ""
    door: str = ""

    def check(self, method: str) -> None:
        """Raises ForbiddenError unless this caller may call `method`."""
        wanted = roles_for(method)
        if self.token is None:
            require(method, wanted, self.roles)
            return
        words = [word for word, (role, only) in TOKENS.items() if role in wanted and method in only]
        if not any(word in self.token and TOKENS[word][0] in self.roles for word in words):
            needed = (
                " or ".join(words) or f"of a credential: {', '.join(sorted(wanted)) or 'nobody'}"
            )
            raise ForbiddenError(f"{self.name} may not do this: it needs the role {needed}")


ANYBODY: Final = Principal(name="anonymous", roles=frozenset())
_BY_CREDENTIAL: Final = {role: Principal(name=role, roles=frozenset((role,))) for role in MeshRole}

CALLER: ContextVar[Principal] = ContextVar("caller", default=ANYBODY)
"""The caller of the running call."""


class TokenEntry(Config):
    """One line of a tokens file."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\x21-\x7e]+$")
    """For the audit log; several tokens may share it."""
    roles: list[TokenRole]
    """Rights of the token."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the token."""


class TokenFile(Config):
    """A tokens file."""

    tokens: list[TokenEntry] | None
    """Every valid token; nothing after `tokens:` is none yet."""


class TokenStore:
    """The tokens of a file; reads it again when it changes, so that a token can be revoked at run time."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError, which names file and key."""
        self._entries = Reloaded(path, _read_tokens, every_s=0.0)

    def find(self, authorization: str) -> TokenEntry:
        """The token in this `Authorization` header. Raises UnauthenticatedError."""
        token = _bearer(authorization)
        if not token:
            raise UnauthenticatedError("this service needs a token: Authorization: Bearer <token>")
        digest = sha256(token)
        match: TokenEntry | None = None
        for entry in self._entries.get():  # always all of them, so that the time reveals nothing
            if hmac.compare_digest(entry.sha256, digest):
                match = entry
        if match is None:
            raise UnauthenticatedError("this token is unknown here")
        return match


def _read_tokens(path: Path) -> Sequence[TokenEntry]:
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


def registry_rates(requests: float, submissions: float) -> Mapping[str, Sequence[RateLimit]]:
    """The limits of the reward registry's methods, for one caller and minute."""
    every = RateLimit("requests", requests)
    methods = {name: [every] for name in METHODS if name.startswith(f"{_REGISTRY}/")}
    submit = f"{_REGISTRY}/SubmitReward"
    return methods | {submit: [every, RateLimit("submissions", submissions)]}


class Identity:
    """The callers that a process knows: by credential of the run, by token and by certificate."""

    def __init__(
        self,
        verifiers: Path | None,
        *,
        certificates: Mapping[str, MeshRole] | None = None,
        tokens: TokenStore | None = None,
        mutual: bool = False,
        rates: Mapping[str, Sequence[RateLimit]] | None = None,
        asks: bool = True,
    ) -> None:
        """Raises ConfigError.

        Args:
            verifiers: Hashes of the run's credentials; None: no credential is known.
            certificates: Role by the common name or SAN of a client's certificate. With any, every certificate must
                name a role, and a credential beside it can only narrow that.
            tokens: Those of a file, which count too.
            mutual: True if callers of gRPC have certificates.
            rates: What counts the calls of a method: by caller, and by address where it is not known.
            asks: False: everybody is `anonymous` and may do everything, as in a library or a test.
        """
        self._known: Callable[[], Mapping[str, MeshRole]] = (
            Reloaded(verifiers, read_verifiers).get if verifiers is not None else dict
        )
        self._certificates = certificates or {}
        self._tokens = tokens
        self._mutual = mutual
        self._rates = rates or {}
        self._asks = asks
        self.refused: Callable[[str, Presented, MeshError], object] = lambda *_: None
        """Called for each caller that `admit` refuses: method, caller, reason."""

    def admit(self, method: str, presented: Presented) -> Principal:
        """The caller, who may call `method`; counts the call.

        Raises:
            UnauthenticatedError, ForbiddenError, CapacityError (too many calls).
        """
        try:
            try:
                known = self.principal(presented)
            except UnauthenticatedError:
                # Guesses are limited too, by address: there is no name yet.
                self._count(method, presented.peer)
                raise
            self._count(method, known.name if self._asks else presented.peer)
            if self._asks:
                known.check(method)
        except MeshError as error:
            self.refused(method, presented, error)
            raise
        return known

    def principal(self, presented: Presented) -> Principal:
        """The caller, whatever it may do.

        Raises:
            UnauthenticatedError: it shows nothing, or what is unknown here.
            ForbiddenError: its certificate has no role.
        """
        if not self._asks:
            return self._of(ANYBODY, presented)
        authorization, names = presented.authorization, presented.names
        certified = None
        if names is not None and (self._certificates or not authorization):
            certified = self._certified(names)
            if not authorization:
                return self._of(certified, presented)
        known = self._shown(authorization)
        if certified is not None and MeshRole.OPERATOR not in certified.roles:
            everything = MeshRole.OPERATOR in known.roles
            known = replace(
                known, roles=certified.roles if everything else known.roles & certified.roles
            )
        return self._of(known, presented)

    def interceptor(self, method: str, behavior: Behavior) -> Behavior:
        """Admits the callers of every method but those of health."""
        limited = method in self._rates
        if method in OPEN or not (self._asks or limited):
            return behavior

        async def run(request: Any, context: Context) -> Any:
            presented = Presented(
                authorization=_authorization_of(context),
                names=_certificate_names(context) if self._mutual else None,
                # Without the port, which changes with every connection.
                peer=context.peer().rpartition(":")[0] if limited else "",
                door="grpc",
            )
            CALLER.set(self.admit(method, presented))
            return await behavior(request, context)

        return run

    def _count(self, method: str, caller: str) -> None:
        for rate in self._rates.get(method, ()):
            rate.count(caller)

    def _of(self, known: Principal, presented: Presented) -> Principal:
        """The caller with its address, where that is asked for."""
        if not presented.peer:
            return known
        return replace(known, peer=presented.peer, door=presented.door)

    def _certified(self, names: Sequence[str]) -> Principal:
        named = [name for name in names if name in self._certificates]
        if not named:
            raise ForbiddenError(
                f"the certificate of {', '.join(names) or 'no name'} has no role here: name it in tls.roles"
            )
        return Principal(name=named[0], roles=frozenset(self._certificates[name] for name in named))

    def _shown(self, authorization: str) -> Principal:
        token = _bearer(authorization)
        # A lookup by the hash of a secret tells nothing about the secret.
        role = self._known().get(sha256(token)) if token else None
        if role is not None:
            return _BY_CREDENTIAL[role]
        if self._tokens is not None:
            entry = self._tokens.find(authorization)
            roles = frozenset(TOKENS[word][0] for word in entry.roles)
            return Principal(name=entry.name, roles=roles, token=frozenset(entry.roles))
        if not authorization:
            raise UnauthenticatedError(
                "this call needs a credential of the run: MESHRL_CREDENTIAL_FILE=<run.dir>/credentials/<role>,"
                " or Authorization: Bearer <what is in it>"
            )
        raise UnauthenticatedError(
            "this credential is unknown here: it is another run's, or this machine has other verifiers"
            " (copy the run's credentials directory)"
        )


def caller_of_quota() -> str:
    """The role whose quota this call uses; "" for the operator, and without authentication."""
    roles = CALLER.get().roles
    return "" if MeshRole.OPERATOR in roles else "+".join(sorted(roles))


def served_stages() -> Callable[[str], bool]:
    """Says of a stage whether this call's maker may work on its rows: it has the stage's role, or nobody is asked."""
    roles = CALLER.get().roles
    return lambda stage: (
        not roles or not roles.isdisjoint((role_of_stage(stage), MeshRole.OPERATOR))
    )


def require(what: str, wanted: AbstractSet[MeshRole], roles: AbstractSet[MeshRole]) -> None:
    """Raises ForbiddenError unless one of `roles` is wanted."""
    if roles.isdisjoint(wanted):
        needs = ", ".join(sorted(wanted)) or "nobody"
        has = ", ".join(sorted(roles)) or "no"
        raise ForbiddenError(f"{what} is for {needs}; this caller has the role {has}")


def _bearer(authorization: str) -> str:
    """The token of an `Authorization` header; empty if it has none."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _authorization_of(context: Context) -> str:
    """The `authorization` of a call, or empty."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


def _certificate_names(context: Context) -> tuple[str, ...] | None:
    """The common name and the alternative names of a client's certificate; None: the call came without one."""
    facts = context.auth_context()
    if b"ssl" not in facts.get("transport_security_type", ()):
        return None
    names = (
        *facts.get("x509_common_name", ()),
        *facts.get("x509_subject_alternative_name", ()),
    )
    return tuple(dict.fromkeys(name.decode("utf-8", "replace") for name in names)) or None
