"""What both doors of the registry stand before: admits the caller, writes the audit line, asks the registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshrl.contract.errors import MeshError
from meshrl.contract.types import Sample, Score
from meshrl.rewardd.registry.comparison import Differences
from meshrl.rewardd.registry.registry import Accepted, Registry
from meshrl.rewardd.registry.types import Case, Manifest, Name, Submission, content_hash
from meshrl.rpc.audit_log import RewardAuditLog
from meshrl.rpc.auth import Guard, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a door knows of who calls."""

    authorization: str
    """The header, or empty."""
    peer: str
    """Address."""
    door: str
    """http or grpc."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Everything that is known at a glance."""

    names: Sequence[Name]
    followed: str
    scoring: str
    base: str
    watch: Differences | None


class GuardedRegistry:
    """Every method admits `caller` first: UnauthenticatedError, ForbiddenError, CapacityError."""

    def __init__(self, registry: Registry, guard: Guard, audit: RewardAuditLog) -> None:
        self._registry = registry
        self._guard = guard
        self._audit = audit
        self.http_address = ""
        """Where the HTTP door is, once it is open."""

    def admit(self, caller: Caller, role: Role) -> str:
        """The caller's name."""
        return self._guard.admit(caller.authorization, caller.peer, role).name

    @property
    def scoring(self) -> str:
        """The version that scores the run now: no secret, so that health can tell."""
        return self._registry.judge.reward_hash

    def expect(self, caller: Caller) -> None:
        """Refuse who may not submit before a large body is read; counts nothing."""
        try:
            self._guard.check(caller.authorization, Role.SUBMIT)
        except MeshError as error:
            self._note(caller, "submit", "", who="", result=error.code, why=error.message)
            raise

    def require(self, caller: Caller, role: Role) -> None:
        """Refuse who has not the role; counts nothing, because scoring is the mesh's own work."""
        self._guard.check(caller.authorization, role)

    def list(self, caller: Caller) -> Listing:
        """Every name."""
        self.admit(caller, Role.READ)
        registry = self._registry
        return Listing(
            names=registry.names(),
            followed=registry.followed,
            scoring=registry.judge.reward_hash,
            base=registry.base,
            watch=registry.judge.differences,
        )

    def name(self, caller: Caller, name: str) -> Name:
        """One name."""
        self.admit(caller, Role.READ)
        return self._registry.name(name)

    def version(
        self, caller: Caller, name: str, version: str
    ) -> tuple[Manifest, bytes, Sequence[Case]]:
        """One version with what was submitted, and its tests."""
        self.admit(caller, Role.READ)
        registry = self._registry
        found = registry.resolve(name, version)
        return registry.manifest(found), registry.content(found), registry.cases(found)

    def diff(self, caller: Caller, name: str, old: str, new: str) -> str:
        """A unified diff."""
        self.admit(caller, Role.READ)
        return self._registry.diff(name, old, new)

    async def submit(self, caller: Caller, submission: Submission) -> Accepted:
        """See Registry.submit."""
        with self._audited(caller, Role.SUBMIT, "submit", submission.name) as line:
            line["hash"] = content_hash(submission)
            accepted = await self._registry.submit(submission, line["who"])
            line["hash"] = accepted.manifest.hash
        return accepted

    async def roll_back(self, caller: Caller, name: str, version: str) -> Name:
        """See Registry.roll_back."""
        with self._audited(caller, Role.OPERATE, "roll_back", name) as line:
            found = await self._registry.roll_back(name, version, line["who"])
            line["hash"] = found.current
        return found

    async def retire(self, caller: Caller, name: str, version: str) -> Name:
        """See Registry.retire."""
        with self._audited(caller, Role.OPERATE, "retire", name) as line:
            line["hash"] = self._registry.resolve(name, version)
            return await self._registry.retire(name, version, line["who"])

    async def watch(self, caller: Caller, name: str, version: str, share: float) -> Name:
        """See Registry.watch."""
        with self._audited(caller, Role.OPERATE, "watch", name) as line:
            line["hash"] = self._registry.resolve(name, version)
            return await self._registry.watch(name, version, share, line["who"])

    async def score(
        self, caller: Caller, name: str, version: str, samples: Sequence[Sample]
    ) -> Sequence[Score]:
        """See Registry.score."""
        self.admit(caller, Role.READ)
        return await self._registry.score(name, version, samples)

    async def compare(
        self, caller: Caller, name: str, a: str, b: str, samples: Sequence[Sample]
    ) -> Differences:
        """See Registry.compare."""
        self.admit(caller, Role.READ)
        return await self._registry.compare(name, a, b, samples)

    @contextmanager
    def _audited(
        self, caller: Caller, role: Role, action: str, name: str
    ) -> Iterator[dict[str, str]]:
        """One line however it ends; the body may fill in the hash."""
        line = {"who": ""}
        try:
            line["who"] = self.admit(caller, role)
            yield line
        except MeshError as error:
            self._note(caller, action, name, **line, result=error.code, why=error.message)
            raise
        except BaseException:
            self._note(caller, action, name, **line, result="cut short")
            raise
        self._note(caller, action, name, **line, result="done")

    def _note(self, caller: Caller, action: str, name: str, **fields: str) -> None:
        who = fields.pop("who")
        cut = {key: value[:500] for key, value in fields.items()}
        self._audit.write(
            who=who, door=caller.door, peer=caller.peer, action=action, name=name[:64], **cut
        )
