"""Grows and shrinks the fleet of a running `up`: what `meshrl fleet add` and `drain` ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrl.contract.errors import UserError
from meshrl.launcher.control import Answer, Operation
from meshrl.launcher.plan import LaunchPlan, ProbeOf
from meshrl.launcher.supervisor import Supervisor

MOST_AT_ONCE = 64
"""Workers that one `add` may ask for: more is a slip of the finger on one machine."""


class FleetOperations:
    """Operations of the control socket on rollout workers."""

    def __init__(
        self,
        plan: LaunchPlan,
        supervisor: Supervisor,
        probe_of: ProbeOf,
        log: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._probe_of = probe_of
        self._log = log

    @property
    def operations(self) -> Mapping[str, Operation]:
        """By name."""
        return {"add": self.add, "drain": self.drain, "members": self.members}

    async def add(self, request: Mapping[str, object]) -> Answer:
        """Start `count` more rollout workers; answers with their names as soon as they are started."""
        count = request.get("count", 1)
        if not isinstance(count, int) or not 1 <= count <= MOST_AT_ONCE:
            raise UserError(f"count is {count!r}, want 1 to {MOST_AT_ONCE}")
        self._supervisor.check_running()
        names = []
        for _ in range(count):
            service = self._plan.add_rollout(self._probe_of)
            self._supervisor.add(service)
            names.append(service.name)
        self._log(f"fleet: added {', '.join(names)}")
        return {"added": names}

    async def drain(self, request: Mapping[str, object]) -> Answer:
        """End the worker `name` for good; answers when it has gone."""
        name = str(request.get("name"))
        if name in self._supervisor.states:
            self._log(f"fleet: draining {name}")
        in_time = await self._supervisor.drain(name)
        self._plan.remove(name)
        left = len(self._plan.address_book.of_kind("rollout"))
        self._log(f"fleet: {name} has {'left' if in_time else 'been killed'}, {left} remain")
        return {"drained": name, "in_time": in_time, "left": left}

    async def members(self, request: Mapping[str, object]) -> Answer:
        """The state of every rollout worker that this `up` ever had."""
        return {
            name: {"phase": state.phase, "pid": state.pid, "restarts": state.restarts}
            for name, state in self._supervisor.states.items()
            if name.startswith("rollout-")
        }
