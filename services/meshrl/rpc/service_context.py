"""The context of one service process: its name, its listening address, the services that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.contract.errors import UserError
from meshrl.rpc.runtime import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """What `meshrl serve` passes to a service."""

    name: str
    """Unique in the mesh and the same after a restart; it identifies leases and replicas."""
    settings: ServerSettings
    kind: str = ""
    """The kind of service: a built-in one, or the name of a stage of the recipe."""
    node_rank: int = 0
    """Which machine of the service this is, of one that has several."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Address (`host:port`) by kind of service (`queue`, `trainer`)."""
    accept_changes: bool = False
    """The run may go on with other data, another model or another reward than it began with."""

    def address_of(self, kind: str) -> str:
        """The address of a service. Raises UserError if it is unknown."""
        if kind not in self.addresses:
            raise UserError(
                f"{self.name} must reach the {kind} service: give --{kind} HOST:PORT or --address-book FILE"
            )
        return self.addresses[kind]
