"""Who may call what: the one table of methods and roles, and the interceptor that asks every caller.

    call ──▶ credential (metadata) ─┐
             certificate (mTLS) ────┴─▶ roles ──▶ METHODS[method] ──▶ the servicer
                none: UNAUTHENTICATED        not among them: PERMISSION_DENIED

A method that is not in the table is refused to everybody. Health is open. What the table cannot say, because it is in
the request, servicers ask: `require_stage` (a role works on its own stages only).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from meshrl.contract.errors import ForbiddenError, UnauthenticatedError
from meshrl.rpc.auth import Role, TokenStore
from meshrl.rpc.credentials import MeshRole, Reloaded, read_verifiers, role_of_stage, sha256
from meshrl.rpc.interceptors import Behavior, Context

_EVERYBODY: Final = frozenset(MeshRole)
_FEEDER, _TRAINER, _ROLLOUT = MeshRole.FEEDER, MeshRole.TRAINER, MeshRole.ROLLOUT
_STAGES: Final = (MeshRole.ROLLOUT, MeshRole.REWARD, MeshRole.REFERENCE, MeshRole.STAGE)
_SERVICES: Final = (*_STAGES, _FEEDER, _TRAINER)
_READER, _SUBMITTER = MeshRole.READER, MeshRole.SUBMITTER


def _methods(service: str, **roles: Iterable[MeshRole]) -> dict[str, frozenset[MeshRole]]:
    return {
        f"/meshrl.v1.{service}/{method}": frozenset((*those, MeshRole.OPERATOR))
        for method, those in roles.items()
    }


METHODS: Final[Mapping[str, frozenset[MeshRole]]] = {
    **_methods(
        "Queue",
        OpenRun=(_FEEDER, _TRAINER),
        GetRunState=(*_SERVICES, _READER),
        Acquire=(_TRAINER,),
        Admit=(_FEEDER, _TRAINER),  # the trainer admits the prompts of an evaluation
        CloseFeed=(_FEEDER, _TRAINER),
        Lease=_STAGES,
        Renew=_STAGES,
        Attend=_STAGES,
        Write=_STAGES,
        Append=_STAGES,
        Redo=(_TRAINER,),
        Fail=_STAGES,
        Release=_STAGES,
        Take=(_TRAINER,),
        Fetch=(*_STAGES, _TRAINER),
        Filter=(_TRAINER,),
        Settle=(_TRAINER,),
        Publish=(_TRAINER,),
        Commit=(_TRAINER,),
        Rewind=(_TRAINER,),
        GetLedger=(*_SERVICES, _READER),
        ListDeadLetters=(_TRAINER, _READER),
        Replay=(),
        WhyWaiting=(*_SERVICES, _READER),
    ),
    **_methods("QueueAdmin", Backup=(), Verify=(), ListRuns=(_READER,), RemoveRun=()),
    **_methods("Rollout", GetStats=(_TRAINER, _READER)),
    **_methods(
        "Reward",
        Score=(_TRAINER, _ROLLOUT, _READER),
        GetInfo=(_TRAINER, _ROLLOUT, _READER),
    ),
    **_methods(
        "RewardRegistry",
        SubmitReward=(_SUBMITTER,),
        ListRewards=(_SUBMITTER, _READER),
        GetReward=(_SUBMITTER, _READER),
        DiffRewards=(_SUBMITTER, _READER),
        RollBackReward=(),
        RetireReward=(),
        TryReward=(_SUBMITTER, _READER),
        CompareRewards=(_SUBMITTER, _READER),
    ),
    **_methods("Trainer", GetStatus=(_READER,), Watch=(_READER,)),
    **_methods("Weights", Join=(_ROLLOUT,), Fleet=(_READER,), Drain=()),
    **_methods("WeightPatches", Fetch=(_ROLLOUT,)),
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": _EVERYBODY,
}
"""The operator may call all of them."""

OPEN: Final = frozenset(f"/{health.SERVICE_NAME}/{method}" for method in ("Check", "Watch", "List"))
"""Methods that ask nobody: orchestrators and load balancers probe health without a credential."""

ROLES_OF_CALL: ContextVar[frozenset[MeshRole]] = ContextVar("roles", default=frozenset())
"""Of the call that runs; empty where nobody is asked."""

METRICS_ROLES: Final = frozenset({MeshRole.READER, MeshRole.OPERATOR})
"""Who may read `/metrics`."""

_OF_TOKENS: Final[Mapping[Role, MeshRole]] = {
    Role.READ: MeshRole.READER,
    Role.SUBMIT: MeshRole.SUBMITTER,
    Role.OPERATE: MeshRole.OPERATOR,
}
"""The roles of a tokens file, at the service that reads the file."""


class Identity:
    """The callers that a server knows, by credential and by certificate."""

    def __init__(
        self,
        verifiers: Path | None,
        *,
        certificates: Mapping[str, MeshRole] | None = None,
        tokens: TokenStore | None = None,
        mutual: bool = False,
    ) -> None:
        """Raises ConfigError.

        Args:
            verifiers: The file of hashes; None: no credential is known.
            certificates: Role by the common name or SAN of a client's certificate. With any, every caller's
                certificate must name a role, and a credential beside it can only narrow that.
            tokens: A tokens file whose roles count at this server too.
            mutual: True if callers have certificates.
        """
        known: Mapping[str, MeshRole] = {}
        self._known: Callable[[], Mapping[str, MeshRole]] = (
            Reloaded(verifiers, read_verifiers).get if verifiers is not None else lambda: known
        )
        self._certificates = certificates or {}
        self._tokens = tokens
        self._mutual = mutual

    def roles(self, authorization: str, names: Iterable[str] | None) -> frozenset[MeshRole]:
        """The roles of a caller with this `authorization` and a certificate of these names; None: it has none.

        Raises:
            UnauthenticatedError: neither, or an unknown credential.
            ForbiddenError: a certificate without a role.
        """
        if not authorization and names is None:
            raise UnauthenticatedError(
                "this call needs a credential of the run: MESHRL_CREDENTIAL_FILE=<run.dir>/credentials/<role>"
            )
        certified: frozenset[MeshRole] | None = None
        if names is not None and (self._certificates or not authorization):
            names = tuple(names)
            certified = frozenset(
                self._certificates[name] for name in names if name in self._certificates
            )
            if not certified:
                raise ForbiddenError(
                    f"the certificate of {', '.join(names) or 'nobody'} has no role here: name it in tls.roles"
                )
        if not authorization:
            assert certified is not None
            return certified
        roles = self._of_credential(authorization)
        if certified is None or MeshRole.OPERATOR in certified:
            return roles
        return certified if MeshRole.OPERATOR in roles else roles & certified

    def check(
        self,
        what: str,
        wanted: frozenset[MeshRole],
        authorization: str,
        names: Iterable[str] | None,
    ) -> frozenset[MeshRole]:
        """The caller's roles. Raises UnauthenticatedError, ForbiddenError."""
        roles = self.roles(authorization, names)
        _require(what, wanted, roles)
        return roles

    def interceptor(self, method: str, behavior: Behavior) -> Behavior:
        """Asks the callers of every method but those of health."""
        if method in OPEN:
            return behavior
        wanted = METHODS.get(method, frozenset())

        async def run(request: Any, context: Context) -> Any:
            names = certificate_names(context) if self._mutual else None
            ROLES_OF_CALL.set(self.check(method, wanted, authorization_of(context), names))
            return await behavior(request, context)

        return run

    def _of_credential(self, authorization: str) -> frozenset[MeshRole]:
        scheme, _, token = authorization.strip().partition(" ")
        digest = sha256(token.strip())
        # A lookup by the hash of a secret tells nothing about the secret.
        known = self._known()
        role = known.get(digest)
        if role is not None and scheme.lower() == "bearer":
            return frozenset((role,))
        if self._tokens is None:
            raise UnauthenticatedError(
                "this credential is unknown here: it is another run's, or this machine has other verifiers"
                " (copy the run's credentials directory)"
            )
        found = self._tokens.find(authorization).roles
        return frozenset(_OF_TOKENS[role] for role in found if role in _OF_TOKENS)


def caller_of_quota() -> str:
    """Whose quota this call uses: the caller's role; "" for the operator, and where nobody is asked."""
    roles = ROLES_OF_CALL.get()
    return "" if MeshRole.OPERATOR in roles else "+".join(sorted(roles))


def served_stages() -> Callable[[str], bool]:
    """Says of a stage whether this call's maker may work on its rows: it has the stage's role, or nobody is asked."""
    roles = ROLES_OF_CALL.get()
    return lambda stage: (
        not roles or not roles.isdisjoint((role_of_stage(stage), MeshRole.OPERATOR))
    )


def require_stage(stage: str) -> None:
    """Raises ForbiddenError unless the caller serves the stage, or is the operator, or nobody is asked."""
    if roles := ROLES_OF_CALL.get():
        _require(f"stage {stage[:80]!r}", {role_of_stage(stage), MeshRole.OPERATOR}, roles)


def _require(what: str, wanted: AbstractSet[MeshRole], roles: AbstractSet[MeshRole]) -> None:
    if roles.isdisjoint(wanted):
        needs = ", ".join(sorted(wanted)) or "nobody"
        has = ", ".join(sorted(roles)) or "no"
        raise ForbiddenError(f"{what} is for {needs}; this caller has the role {has}")


def authorization_of(context: Context) -> str:
    """The `authorization` of a call, or empty."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


def certificate_names(context: Context) -> tuple[str, ...] | None:
    """The common name and the alternative names of a client's certificate; None: the call came without one."""
    facts = context.auth_context()
    if b"ssl" not in facts.get("transport_security_type", ()):
        return None
    names = (
        *facts.get("x509_common_name", ()),
        *facts.get("x509_subject_alternative_name", ()),
    )
    return tuple(dict.fromkeys(name.decode("utf-8", "replace") for name in names)) or None
