"""Changes of the reward registry and their log: who did what to which version, one JSON object per line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from meshrl.common.line_file import LineFile
from meshrl.contract.errors import CapacityError, MeshError
from meshrl.rewardd.registry.registry import Accepted, Registry
from meshrl.rewardd.registry.types import Name, Submission, content_hash
from meshrl.rpc.identity import CALLER, Presented, Principal

MAX_BYTES: Final = 16 << 20
"""A longer file is moved aside, to `audit.jsonl.1`; all of them stay."""
ACTIONS: Final = {
    "/meshrl.v1.RewardRegistry/SubmitReward": "submit",
    "/meshrl.v1.RewardRegistry/RollBackReward": "roll_back",
    "/meshrl.v1.RewardRegistry/RetireReward": "retire",
}
"""Changes, by the method that asks for one."""


class RewardAuditLog:
    """Appends to `path`; no line is dropped. If a kill cut the last line short, a new line is begun after it."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._file = LineFile(path, max_bytes=max_bytes, durable=True, mode=0o600)
        self._file.open()

    def write(
        self, action: str, caller: Principal | Presented, *, name: str = "", **more: str
    ) -> None:
        """Write one line, with `at` in seconds since 1970; durable on return."""
        line = {
            "at": round(time.time(), 3),
            "who": caller.name if isinstance(caller, Principal) else "",
            "door": caller.door,
            "peer": caller.peer,
            "action": action,
            "name": name[:64],
        }
        self._file.write(
            json.dumps(line | {key: value[:500] for key, value in more.items() if value})
        )

    def refused(self, method: str, caller: Presented, error: MeshError) -> None:
        """Write a line on a refused change; none once the caller asks too often, so that a flood fills no disk."""
        action = ACTIONS.get(method)
        if action is not None and not isinstance(error, CapacityError):
            self.write(action, caller, name=caller.subject, result=error.code, why=error.message)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


class AuditedChanges:
    """Changes of a registry by the caller of this call; each writes one line, however it ends."""

    def __init__(self, registry: Registry, audit: RewardAuditLog) -> None:
        self._registry = registry
        self._audit = audit

    async def submit(self, submission: Submission) -> Accepted:
        """Submit to the registry, and log it."""
        with self._audited("submit", submission.name) as line:
            line["hash"] = content_hash(submission)
            accepted = await self._registry.submit(CALLER.get().name, submission)
            line["hash"] = accepted.manifest.hash
        return accepted

    async def roll_back(self, name: str, version: str) -> Name:
        """Roll back in the registry, and log it."""
        with self._audited("roll_back", name) as line:
            line["hash"] = self._registry.resolve(name, version) if version else ""
            changed = await self._registry.roll_back(CALLER.get().name, name, version)
            line["hash"] = line["hash"] or changed.current
        return changed

    async def retire(self, name: str, version: str) -> Name:
        """Retire in the registry, and log it."""
        with self._audited("retire", name) as line:
            line["hash"] = self._registry.resolve(name, version) if version else ""
            changed = await self._registry.retire(CALLER.get().name, name, version)
            line["hash"] = line["hash"] or changed.current
        return changed

    @contextmanager
    def _audited(self, action: str, name: str) -> Iterator[dict[str, str]]:
        caller = CALLER.get()
        line: dict[str, str] = {}
        try:
            yield line
        except MeshError as error:
            self._audit.write(
                action, caller, name=name, **line, result=error.code, why=error.message
            )
            raise
        except BaseException:
            self._audit.write(action, caller, name=name, **line, result="cut short")
            raise
        self._audit.write(action, caller, name=name, **line, result="done")
