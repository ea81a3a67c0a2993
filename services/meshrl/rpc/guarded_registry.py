"""Middleware between the servers (gRPC, HTTP) and the reward registry: role check, audit line, then the method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from meshrl.contract.errors import MeshError
from meshrl.rewardd.registry.registry import Accepted, Registry
from meshrl.rewardd.registry.types import Name, Submission, content_hash
from meshrl.rpc.audit_log import RewardAuditLog
from meshrl.rpc.auth import Authorizer, Role

P = ParamSpec("P")
T = TypeVar("T")
Changed = TypeVar("Changed", bound=Accepted | Name)
ROLES: Mapping[Callable[..., Any], Role] = {
    Registry.listing: Role.READ,
    Registry.name: Role.READ,
    Registry.version: Role.READ,
    Registry.diff: Role.READ,
    Registry.score: Role.READ,
    Registry.compare: Role.READ,
    Registry.submit: Role.SUBMIT,
    Registry.roll_back: Role.OPERATE,
    Registry.retire: Role.OPERATE,
}
"""The methods that callers may reach. Those that need more than READ change the registry and are audited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a server knows of a caller."""

    authorization: str
    """The `Authorization` header, or empty."""
    peer: str
    """Address."""
    transport: str
    """http or grpc."""
    names: tuple[str, ...] | None = None
    """Of its certificate, if the server asked for one."""


class GuardedRegistry:
    """Calls the methods of ROLES for callers that `authorizer` admits.

    Besides what the method raises: UnauthenticatedError, ForbiddenError, CapacityError (too many requests).
    """

    def __init__(self, registry: Registry, authorizer: Authorizer, audit: RewardAuditLog) -> None:
        self._registry = registry
        self._authorizer = authorizer
        self._audit = audit
        self.http_address = ""
        """Of the HTTP server; empty while there is none."""

    @property
    def scoring(self) -> str:
        """The version that scores the run now. Needs no role: the health route shows it."""
        return self._registry.judge.reward_hash

    def check(self, caller: Caller, method: Callable[..., Any], name: str = "") -> None:
        """Raise if `caller` may not call `method`, before a body is read; a refused change is audited."""
        role = ROLES[method]
        try:
            self._authorizer.check(caller.authorization, caller.peer, role, caller.names)
        except MeshError as error:
            if role is not Role.READ:
                why = {"result": error.code, "why": error.message}
                self._write(caller, method.__name__, name=name, **why)
            raise

    def read(
        self,
        caller: Caller,
        method: Callable[Concatenate[Registry, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method that changes nothing."""
        self._admit(caller, method)
        return method(self._registry, *args, **kwargs)

    async def change(
        self,
        caller: Caller,
        method: Callable[Concatenate[Registry, str, P], Awaitable[Changed]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Changed:
        """Call a method that takes `by`, the caller's name, first; writes one audit line, however it ends."""
        subject: Any = args[0]
        name = subject.name if isinstance(subject, Submission) else subject
        line = {"name": name, "who": "", "hash": ""}
        try:
            line["who"] = self._admit(caller, method)
            line["hash"] = self._requested(*args)
            changed = await method(self._registry, line["who"], *args, **kwargs)
        except MeshError as error:
            self._write(caller, method.__name__, **line, result=error.code, why=error.message)
            raise
        except BaseException:
            self._write(caller, method.__name__, **line, result="cut short")
            raise
        if isinstance(changed, Accepted):
            line["hash"] = changed.manifest.hash
        elif not line["hash"]:
            line["hash"] = changed.current
        self._write(caller, method.__name__, **line, result="done")
        return changed

    def _admit(self, caller: Caller, method: Callable[..., Any]) -> str:
        """The caller's name."""
        return self._authorizer.admit(
            caller.authorization, caller.peer, ROLES[method], caller.names
        ).name

    def _requested(self, *args: Any) -> str:
        """The hash of the version that a change is about; empty where the registry picks it."""
        if isinstance(args[0], Submission):
            return content_hash(args[0])
        name, version = args[:2]
        return self._registry.resolve(name, version) if version else ""

    def _write(
        self, caller: Caller, action: str, *, name: str = "", who: str = "", **more: str
    ) -> None:
        cut = {key: value[:500] for key, value in more.items() if value}
        self._audit.write(
            who=who,
            door=caller.transport,
            peer=caller.peer,
            action=action,
            name=name[:64],
            **cut,
        )
