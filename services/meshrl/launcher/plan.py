"""From a recipe to the services that `up` starts: their order, their ports, the rules they live by.

start:  queue ▶ reward, reference, trainer ▶ rollout workers, feeder
drain:  trainer (ends its step, saves) ▶ feeder, rollout workers, reward, reference ▶ queue
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from meshrl.config.recipe import Recipe, needs_reference
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import AddressBook, Entry
from meshrl.launcher.ports import free_port
from meshrl.launcher.service import Probe, Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a kind of service is started and ended."""

    wave: int
    drain_wave: int
    drain_s: float
    finite: bool = False
    leads: bool = False
    removable: bool = False


RULES: Mapping[str, Rule] = {
    "queue": Rule(wave=0, drain_wave=2, drain_s=30),
    "reward": Rule(wave=1, drain_wave=1, drain_s=30),
    "reference": Rule(wave=1, drain_wave=1, drain_s=30),
    "trainer": Rule(wave=1, drain_wave=0, drain_s=300, finite=True, leads=True),
    "rollout": Rule(wave=2, drain_wave=1, drain_s=30, removable=True),
    "feeder": Rule(wave=2, drain_wave=1, drain_s=30, finite=True),
}


ProbeOf: TypeAlias = Callable[[Callable[[], Entry]], Probe]
FORGETFUL = "queue.store is memory, so its rows went with it; queue.store=disk survives"


def service_kinds(recipe: Recipe) -> dict[str, str]:
    """Name to kind of every service of the mesh."""
    shards = recipe.queue.shards
    queues = ["queue"] if shards == 1 else [f"queue-{index}" for index in range(shards)]
    kinds = dict.fromkeys(queues, "queue") | {"reward": "reward"}
    if needs_reference(recipe):
        kinds["reference"] = "reference"
    kinds["trainer"] = "trainer"
    kinds |= {f"rollout-{index}": "rollout" for index in range(recipe.rollout.workers)}
    return {**kinds, "feeder": "feeder"}


class Plan:
    """The services of one `up`, and the address book that tells them of each other."""

    def __init__(
        self, recipe: Recipe, recipe_path: Path, book_path: Path, fixed: Mapping[str, int]
    ) -> None:
        """Choose ports and write the book.

        Args:
            recipe: what to run.
            recipe_path: the resolved recipe that the services read.
            book_path: where the address book goes.
            fixed: ports that must be taken as they are, by service name.

        Raises:
            UserError: `fixed` names no service of this mesh.
        """
        self._kinds = service_kinds(recipe)
        self._forgetful = recipe.queue.store == "memory"
        unknown = sorted(set(fixed) - set(self._kinds))
        if unknown:
            raise UserError(
                f"--port: no service named {unknown[0]!r} in this mesh; it has {', '.join(self._kinds)}"
            )
        self._fixed = fixed
        self._path = book_path
        self._taken: set[int] = set(fixed.values())
        self._apart: dict[str, Entry] = {}
        """Shards that nobody works with yet, by name."""
        self.book = AddressBook(run=recipe.run.name, recipe=recipe_path, services={})
        for name in self._kinds:
            self._choose(name)
        self.book.save(book_path)

    def services(self, probe_of: ProbeOf) -> list[Service]:
        """What the supervisor runs. `probe_of` makes a probe of whatever address the book then has."""
        return [self._service(name, kind, probe_of) for name, kind in self._kinds.items()]

    def add_rollout(self, probe_of: ProbeOf) -> Service:
        """One more rollout worker, in the book from here on. Names are not used twice."""
        numbers = [int(name.removeprefix("rollout-")) for name in self._of_kind("rollout")]
        name = f"rollout-{1 + max(numbers, default=-1)}"
        self._kinds[name] = "rollout"
        self._choose(name)
        self.book.save(self._path)
        return replace(self._service(name, "rollout", probe_of), expendable=True)

    def new_shard(self, probe_of: ProbeOf) -> Service:
        """One more queue process, in the book once `enlist` says so. Raises UserError on a single queue."""
        shards = len(self._of_kind("queue"))
        if shards == 1:
            raise UserError(
                "the queue of this run is one process, which nobody routes to: stop the run and start it with"
                " queue.shards=2; it goes on, and its groups stay where they are"
            )
        name = f"queue-{shards}"
        service = self._service(name, "queue", probe_of)

        def choose() -> None:
            if name not in self.book.services:
                self._apart[name] = self._entry(name, "queue")

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
        """Where a queue process listens, whether it is in the book or not."""
        return self._apart.get(name) or self.book.services[name]

    def enlist(self, name: str) -> None:
        """Everybody who starts from here on is told of the shard `name`."""
        self._kinds[name] = "queue"
        self.book = self.book.with_entry(name, self._apart.pop(name))
        self.book.save(self._path)

    def remove(self, name: str) -> None:
        """Nobody listens there any more."""
        self.book = self.book.without(name)
        self.book.save(self._path)

    def _of_kind(self, kind: str) -> list[str]:
        return [name for name, each in self._kinds.items() if each == kind]

    def _service(self, name: str, kind: str, probe_of: ProbeOf) -> Service:
        rule = RULES[kind]
        argv = (
            *(sys.executable, "-m", "meshrl.cli", "serve", kind, str(self.book.recipe)),
            *("--address-book", str(self._path), "--name", name),
        )
        return Service(
            name=name,
            argv=lambda: argv,
            probe=probe_of(lambda: self.book.services[name]),
            wave=rule.wave,
            drain_wave=rule.drain_wave,
            drain_s=rule.drain_s,
            finite=rule.finite,
            leads=rule.leads,
            removable=rule.removable,
            fleet=kind if rule.removable else "",
            cannot_restart=FORGETFUL if kind == "queue" and self._forgetful else "",
            on_port_taken=None if name in self._fixed else lambda: self._replace(name),
        )

    def _choose(self, name: str) -> None:
        self.book = self.book.with_entry(name, self._entry(name, self._kinds[name]))

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
