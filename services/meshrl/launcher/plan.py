"""From a recipe to the services that `up` starts: their order, their ports, the rules of their start and drain.

start:  queue ▶ reward, reference, stages of the recipe, trainer ▶ rollout workers, feeder
drain:  trainer (ends its step, saves) ▶ feeder, rollout workers, reward, reference, stages ▶ queue
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from meshrl.config.recipe import Recipe
from meshrl.config.stages import MeshService, mesh_services, service_kind
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import AddressBook, Entry
from meshrl.launcher.ports import free_port
from meshrl.launcher.service import Probe, Service

ProbeOf: TypeAlias = Callable[[Callable[[], Entry]], Probe]


class LaunchPlan:
    """The services of one `up`, and the address book in which they find each other."""

    def __init__(
        self, recipe: Recipe, recipe_path: Path, book_path: Path, fixed: Mapping[str, int]
    ) -> None:
        """Choose ports and write the address book.

        Args:
            recipe: what to run.
            recipe_path: the resolved recipe that the services read.
            book_path: where the address book goes.
            fixed: ports that must be taken as they are, by service name.

        Raises:
            UserError: `fixed` names no service of this mesh.
        """
        self._recipe = recipe
        self._services = {service.name: service for service in mesh_services(recipe)}
        unknown = sorted(set(fixed) - set(self._services))
        if unknown:
            raise UserError(
                f"--port: no service named {unknown[0]!r} in this mesh; it has {', '.join(self._services)}"
            )
        self._fixed = fixed
        self._path = book_path
        self._taken: set[int] = set(fixed.values())
        self._apart: dict[str, Entry] = {}
        """Shards that nobody works with yet, by name."""
        self.book = AddressBook(run=recipe.run.name, recipe=recipe_path, services={})
        for name in self._services:
            self._choose(name)
        self.book.save(book_path)

    def services(self, probe_of: ProbeOf) -> list[Service]:
        """What the supervisor runs. `probe_of` makes a probe of whatever address the book then has."""
        return [self._service(service, probe_of) for service in self._services.values()]

    def add_rollout(self, probe_of: ProbeOf) -> Service:
        """One more rollout worker, in the address book from here on. Names are not used twice."""
        numbers = [int(name.removeprefix("rollout-")) for name in self._of_kind("rollout")]
        service = self._another("rollout", 1 + max(numbers, default=-1))
        self._services[service.name] = service
        self._choose(service.name)
        self.book.save(self._path)
        return replace(self._service(service, probe_of), expendable=True)

    def new_shard(self, probe_of: ProbeOf) -> Service:
        """One more queue process, in the address book once `enlist` is called. Raises UserError on a single queue."""
        shards = len(self._of_kind("queue"))
        if shards == 1:
            raise UserError(
                "the queue of this run is one process, which nobody routes to: stop the run and start it with"
                " queue.shards=2; it goes on, and its groups stay where they are"
            )
        shard = self._another("queue", shards)
        name = shard.name
        service = self._service(shard, probe_of)

        def choose() -> None:
            if name not in self.book.services:
                self._apart[name] = self._entry(name, shard.kind)

        def argv() -> tuple[str, ...]:
            entry = self.of_shard(name)
            return (
                *(sys.executable, "-m", "meshrl.cli", "serve", "queue"),
                *(str(self.book.recipe), f"queue.shards={shards + 1}", "--name", name),
                *("--host", entry.host, "--port", str(entry.port)),
                *("--metrics-port", str(entry.metrics_port)),
            )

        choose()
        probe = probe_of(lambda: self.of_shard(name))
        return replace(service, argv=argv, probe=probe, on_port_taken=choose)

    def of_shard(self, name: str) -> Entry:
        """Where a queue process listens, whether it is in the address book or not."""
        return self._apart.get(name) or self.book.services[name]

    def enlist(self, name: str) -> None:
        """Put the shard `name` in the address book: whoever starts from here on finds it."""
        self._services[name] = self._another("queue", int(name.rpartition("-")[2]))
        self.book = self.book.with_entry(name, self._apart.pop(name))
        self.book.save(self._path)

    def remove(self, name: str) -> None:
        """Nobody listens there any more."""
        self.book = self.book.without(name)
        self.book.save(self._path)

    def _of_kind(self, kind: str) -> list[str]:
        return [name for name, each in self._services.items() if each.kind == kind]

    def _another(self, kind: str, number: int) -> MeshService:
        rules = service_kind(self._recipe, kind)
        return MeshService(name=f"{kind}-{number}", kind=kind, rules=rules)

    def _service(self, service: MeshService, probe_of: ProbeOf) -> Service:
        name, rules = service.name, service.rules
        argv = (
            *(sys.executable, "-m", "meshrl.cli", "serve", service.kind, str(self.book.recipe)),
            *("--address-book", str(self._path), "--name", name),
        )
        return Service(
            name=name,
            argv=lambda: argv,
            probe=probe_of(lambda: self.book.services[name]),
            start_order=rules.start_order,
            drain_order=rules.drain_order,
            drain_s=rules.drain_s,
            finite=rules.finite,
            leads=rules.leads,
            removable=rules.removable,
            fleet=service.kind if rules.removable else "",
            cannot_restart=rules.cannot_restart(self._recipe),
            on_port_taken=None if name in self._fixed else lambda: self._replace(name),
        )

    def _choose(self, name: str) -> None:
        self.book = self.book.with_entry(name, self._entry(name, self._services[name].kind))

    def _entry(self, name: str, kind: str) -> Entry:
        host = "127.0.0.1"
        port = self._fixed.get(name) or self._free(host)
        return Entry(kind=kind, host=host, port=port, metrics_port=self._free(host))

    def _free(self, host: str) -> int:
        port = free_port(host, self._taken)
        self._taken.add(port)
        return port

    def _replace(self, name: str) -> None:
        """Another program took the port between our choice and the start: nobody has heard of it yet."""
        self._choose(name)
        self.book.save(self._path)
