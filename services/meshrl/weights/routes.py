"""The trainer's end of all carriers: which of them takes a version to which replica, ready to be used.

A carrier listens when it is first taken, and writes a version (`stage`) once, when it is first taken for that one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.weights.carrier import (
    Carrier,
    Carriers,
    Channel,
    Link,
    LoadCarrier,
    RunPaths,
    carrier_facts,
    host_id,
)
from meshrl.weights.carriers.auto import reaching
from meshrl.weights.gathering import SourceError, whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a replica has said about itself."""

    name: str
    host: str
    """See `carrier.host_id`."""
    carriers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The carrier of one version to one replica."""

    carrier: str
    endpoint: str


class Routes:
    """Belongs to the coordinator's event loop."""

    def __init__(
        self, config: WeightsConfig, paths: RunPaths, load: LoadCarrier | None = None
    ) -> None:
        self._carriers = Carriers(config, paths, load)
        self._facts = {name: carrier_facts(name) for name in self._carriers.names}
        self._host = host_id()
        self._listening: dict[str, tuple[Carrier, str]] = {}
        """The carriers that have been taken, with their endpoints."""
        self._staged = {name: deque[Version](maxlen=config.keep) for name in self._facts}
        self._locks = {name: asyncio.Lock() for name in self._facts}

    async def start(self) -> None:
        """Load the carriers, and listen where there is only one. Raises ConfigError when it cannot."""
        await asyncio.to_thread(self._carriers.load)
        if len(self._carriers.names) == 1:
            await self._listen(self._carriers.names[0])

    async def close(self) -> None:
        """Free everything; idempotent."""
        await self._carriers.close()

    def check(self, peer: Peer) -> None:
        """Raises UserError, saying why, for a replica that no carrier reaches."""
        if not self._reaching(peer):
            raise UserError(
                f"no carrier of weights reaches {peer.name}: the trainer can {_listed(self._carriers.names)}, it can "
                f"{_listed(peer.carriers)}, and it is on {'this' if peer.host == self._host else 'another'} host; "
                "set weights.carrier to auto, or to the same one on both sides (gloo reaches other hosts)"
            )

    async def stage(self, source: WeightSource, peers: Iterable[Peer]) -> None:
        """Choose a route for each replica that takes part from the start, and stage the version. Raises MeshError."""
        if len(self._carriers.names) == 1:  # also without replicas, for those that join later
            await self._prepare(self._carriers.names[0], source)
        for peer in peers:
            await self.choose(peer, source)

    async def choose(self, peer: Peer, source: WeightSource) -> Route:
        """The route of a version to a replica, ready to be used. Raises MeshError when no carrier can be."""
        while True:
            self.check(peer)
            name, *others = self._reaching(peer)
            try:
                return Route(carrier=name, endpoint=await self._prepare(name, source))
            except SourceError:
                raise  # no carrier's fault
            except MeshError as error:
                if not others:
                    raise
                logger.warning("weights go by %s no more: %s", name, error)
                self._carriers.give_up(name)

    def grouped(self, peer: Peer, version: Version) -> str:
        """The carrier of a route that is chosen, if one channel of it can have more than two ends; else empty."""
        name = next(iter(self._reaching(peer)), "")
        return name if name and self._facts[name].groups and version in self._staged[name] else ""

    def group(self, carrier: str, link: Link) -> Channel:
        """This end of a channel to several."""
        return self._carriers[carrier].channel(replace(link, endpoint=self._listening[carrier][1]))

    def channel(self, route: Route, link: Link) -> Channel:
        """This end of a channel."""
        return self._carriers[route.carrier].channel(link)

    def writes(self, route: Route) -> bool:
        """Whether what was sent is there for the replica once it is sent, and it must not look before."""
        return self._facts[route.carrier].writes

    def _reaching(self, peer: Peer) -> list[str]:
        here = {name: self._facts[name] for name in self._carriers.names}
        return reaching(here, peer.carriers, same_host=peer.host == self._host != "")

    async def _prepare(self, name: str, source: WeightSource) -> str:
        """Have the carrier listen and stage the version; returns its endpoint."""
        carrier, endpoint = await self._listen(name)
        version = source.manifest.version
        if version in self._staged[name]:
            return endpoint  # also while a newer one is gathered, and staged meanwhile
        if not self._facts[name].streams:
            await whole(source)
        async with self._locks[name]:
            if version not in self._staged[name]:
                await carrier.stage(source)
                self._staged[name].append(version)
        return endpoint

    async def _listen(self, name: str) -> tuple[Carrier, str]:
        if name not in self._listening:
            async with self._locks[name]:
                if name not in self._listening:
                    carrier = self._carriers[name]
                    self._listening[name] = carrier, await carrier.listen()
        return self._listening[name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
