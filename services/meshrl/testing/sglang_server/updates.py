"""The fake's weight updates: sessions, loaders, and broadcasts of a process group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from meshrl.testing.sglang_server.scheduler import Scheduler
from meshrl.testing.sglang_server.weights import GARBAGE, load_staged, read_mark

OUTSIDE = "{route} must run between begin_weight_update() and end_weight_update()"
PARTIAL = (
    "Failed to update parameter online: {error}. The full weights of the ModelRunner are partially updated. "
    "Please discard the whole weights."
)
Answer = tuple[bool, str]


class Died(Exception):
    """An exception that ends the scheduler, and with it the server."""


class ServerGroup(Protocol):
    """A process group that receives weights."""

    def receive(self, body: dict[str, Any]) -> int:
        """Receive one broadcast; the mark in it, or the last one. Raises what the real server raises."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Updates:
    """One weight-update session at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        loaders: Collection[str],
        join: Callable[[dict[str, Any]], ServerGroup],
    ) -> None:
        self.partial = False
        """The next load stops halfway."""
        self._scheduler = scheduler
        self._loaders = loaders
        self._join = join
        self._groups: dict[str, ServerGroup] = {}
        self._open = False

    async def begin(self) -> Answer:
        """Open the session; if not paused, wait until no request runs."""
        await self._quiet()
        if self._open:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self._open = True
        return True, "Success"

    async def end(self) -> Answer:
        """Close the session."""
        if not self._open:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._open = False
        return True, "Success"

    async def from_loader(self, load_format: str | None, directory: Path) -> Answer:
        """A registered loader reads `directory`. Its exceptions are not caught."""
        if not self._open:
            return False, OUTSIDE.format(route="update_weights_from_tensor")
        if load_format not in self._loaders:
            raise Died(f"NotImplementedError: Unknown load_format={load_format}")
        try:
            self._take(load_staged(directory))
        except Exception as error:
            raise Died(f"{type(error).__name__}: {error}") from error
        return True, "Success"

    async def from_disk(self, directory: Path) -> Answer:
        """Load `directory`; needs no session, and catches exceptions."""
        await self._quiet()
        try:
            self._take(read_mark(directory))
        except Exception as error:
            return False, f"Failed to get weights iterator: {error}."
        return True, "Succeeded to update model weights."

    async def from_group(self, body: dict[str, Any]) -> Answer:
        """Receive one broadcast."""
        if not self._open:
            return False, OUTSIDE.format(route="update_weights_from_distributed")
        group = self._groups.get(body["group_name"])
        if group is None:
            known = list(self._groups)
            return False, (
                f"Failed to receive weights: Group {body['group_name']} not in {known}. "
                "Please call `init_weights_update_group` first."
            )
        try:
            mark = await asyncio.to_thread(group.receive, body)
        except Exception as error:
            return False, f"Failed to receive weights: {error}"
        try:
            self._take(mark)
        except RuntimeError as error:
            return False, PARTIAL.format(error=error)
        return True, "Succeeded to update parameter online."

    async def join(self, body: dict[str, Any]) -> Answer:
        """Join a group as the ranks of this server."""
        try:
            self._groups[body["group_name"]] = await asyncio.to_thread(self._join, body)
        except Exception as error:
            return False, f"Failed to initialize custom process group: {error}."
        return True, "Succeeded to initialize custom process group."

    async def leave(self, name: str) -> Answer:
        """Leave a group."""
        group = self._groups.pop(name, None)
        if group is None:
            return False, "The group to be destroyed does not exist."
        await asyncio.to_thread(group.close)
        return True, "Succeeded to destroy custom process group."

    def _take(self, mark: int) -> None:
        if self.partial:
            self._scheduler.mark = GARBAGE
            raise RuntimeError("the tensor ends too soon")
        self._scheduler.mark = mark

    async def _quiet(self) -> None:
        """Paused, or no request runs: the real server takes a lock that running requests hold."""
        scheduler = self._scheduler
        await scheduler.until(lambda: scheduler.paused or not scheduler.requests)
