"""From a recipe to the services that `up` starts: their order, their ports, the rules of their start and drain.

start:  queue ▶ reward, reference, stages of the recipe, trainer ▶ rollout workers, feeder
drain:  trainer (ends its step, saves) ▶ feeder, rollout workers, reward, reference, stages ▶ queue
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from meshrl.common.sockets import trusts_network
from meshrl.config.placement import Placement
from meshrl.config.recipe import Recipe
from meshrl.config.stages import MeshService, mesh_services, service_kind
from meshrl.contract.errors import UserError
from meshrl.deploy.machines import PROGRAM, Machines
from meshrl.launcher.address_book import AddressBook, ServiceAddress, free_port
from meshrl.launcher.service import Probe, Service
from meshrl.rpc import credentials

ProbeOf: TypeAlias = Callable[[Callable[[], ServiceAddress]], Probe]
LOOPBACK = "127.0.0.1"


class LaunchPlan:
    """The services of one `up`, and the address book in which they find each other."""

    def __init__(
        self,
        recipe: Recipe,
        recipe_path: Path,
        address_book_path: Path,
        fixed: Mapping[str, int],
        *,
        kept_recipe: Path | None = None,
        placement: Placement | None = None,
        machines: Machines | None = None,
    ) -> None:
        """Choose ports and write the address book.

        Args:
            recipe: what to run.
            recipe_path: the resolved recipe that the services read.
            address_book_path: where the address book goes.
            fixed: ports that must be taken as they are, by service name.
            kept_recipe: the recipe that the address book names, for after the run; None: `recipe_path`.
            placement: which GPUs each service gets; None: all see all.
            machines: where services run and what starts them; None: here, as children of this process.

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
        self._shares = {
            name: share
            for name in self._services
            if placement is not None and (share := placement.share(name)) is not None
        }
        self._placement = placement
        self._machines = machines
        self._fixed = fixed
        self._path = address_book_path
        self._recipe_path = recipe_path
        self._taken: set[int] = set(fixed.values())
        self.address_book = AddressBook(
            run=recipe.run.name,
            recipe=kept_recipe or recipe_path,
            services={},
            trusted_network=trusts_network(),
        )
        self._rendezvous = self._free() if recipe.trainer.nnodes > 1 else 0
        for name in self._services:
            self._choose(name)
        self.address_book.save(address_book_path)

    def services(self, probe_of: ProbeOf) -> list[Service]:
        """The services to supervise. `probe_of` makes a probe of the address that the book has when it is asked."""
        return [self._service(service, probe_of) for service in self._services.values()]

    def add_rollout(self, probe_of: ProbeOf) -> Service:
        """One more rollout worker, in the address book from here on. Names are not used twice."""
        rules = service_kind(self._recipe, "rollout")
        numbers = [
            int(name.removeprefix("rollout-"))
            for name, each in self._services.items()
            if each.kind == "rollout"
        ]
        name = f"rollout-{1 + max(numbers, default=-1)}"
        service = MeshService(name=name, kind="rollout", rules=rules)
        if self._placement is not None:
            running = (self._shares.get(name) for name in self.address_book.services)
            taken = {device for share in running if share is not None for device in share.devices}
            if (share := self._placement.another(service.name, taken)) is not None:
                self._shares[service.name] = share
        self._services[service.name] = service
        self._choose(service.name)
        self.address_book.save(self._path)
        return replace(self._service(service, probe_of), expendable=True)

    def remove(self, name: str) -> None:
        """Take a service out of the address book."""
        self.address_book = self.address_book.without(name)
        self.address_book.save(self._path)

    def _service(self, service: MeshService, probe_of: ProbeOf) -> Service:
        name, rules = service.name, service.rules
        words = (
            "serve",
            service.kind,
            str(self._recipe_path),
            "--address-book",
            str(self._path),
            "--name",
            name,
        )
        first = name == service.kind
        rank = "0" if first else name.rpartition("-")[2]
        of_several = ("--node-rank", rank) if rules.machines(self._recipe) > 1 else ()
        return Service(
            name=name,
            argv=self._command(name, service.kind, (*words, *of_several)),
            env=self._environment(name, service.kind),
            elsewhere=self._machines is not None,
            ready_s=rules.ready_s(self._recipe),
            probe=probe_of(lambda: self.address_book.services[name]),
            preload="torch" if rules.needs_torch(self._recipe) else "light",
            start_order=rules.start_order,
            drain_order=rules.drain_order,
            drain_s=rules.drain_s,
            finite=rules.finite,
            leads=rules.leads and first,
            removable=rules.removable,
            fleet=service.kind if rules.removable else "",
            cannot_restart=rules.cannot_restart(self._recipe),
            crash_at_start=rules.crash_at_start(self._recipe),
            on_port_taken=None if name in self._fixed else lambda: self._replace(name),
        )

    def _command(self, name: str, kind: str, words: tuple[str, ...]) -> tuple[str, ...]:
        if self._machines is None:
            return (*PROGRAM, *words)
        environment = self._environment(name, kind)
        return self._machines.command(self._machine_of(name, kind), words, environment)

    def _environment(self, name: str, kind: str) -> dict[str, str]:
        share = self._shares.get(name)
        return {
            **credentials.service_environment(self._recipe.run.path, kind),
            **(share.environment if share is not None else {}),
            **(
                {"MASTER_PORT": f"{self._rendezvous}"}
                if kind == "trainer" and self._rendezvous
                else {}
            ),
        }

    def _machine_of(self, name: str, kind: str) -> str:
        assert self._machines is not None
        return self._machines.machine_of(name, kind, self._placement)

    def _choose(self, name: str) -> None:
        self.address_book = self.address_book.with_entry(
            name, self._entry(name, self._services[name].kind)
        )

    def _entry(self, name: str, kind: str) -> ServiceAddress:
        port = self._fixed.get(name) or self._free()
        alone = self._machines is None or len(self._machines.names) == 1
        host = LOOPBACK if alone else self._machine_of(name, kind)
        return ServiceAddress(kind=kind, host=host, port=port, metrics_port=self._free())

    def _free(self) -> int:
        """Free here; another machine's service that finds it taken says so, and gets another one."""
        port = free_port(LOOPBACK, self._taken)
        self._taken.add(port)
        return port

    def _replace(self, name: str) -> None:
        """Choose another port: a program took this one between our choice and the start, before anybody used it."""
        self._choose(name)
        self.address_book.save(self._path)
