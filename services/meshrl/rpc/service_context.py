"""Where one service stands: its name, where it listens, whom it can reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.contract.errors import UserError
from meshrl.rpc.runtime import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """What `serve` hands to the assembly of a service."""

    name: str
    """Unique in the mesh, the same after a restart: leases and replicas are known by it."""
    settings: ServerSettings
    peers: Mapping[str, str] = field(default_factory=dict)
    """Kind (`queue`, `trainer`) to `host:port`."""

    def peer(self, kind: str) -> str:
        """Where to reach a service. Raises UserError when nobody said."""
        if kind not in self.peers:
            raise UserError(
                f"{self.name} must reach the {kind} service: give --{kind} HOST:PORT or --address-book FILE"
            )
        return self.peers[kind]
