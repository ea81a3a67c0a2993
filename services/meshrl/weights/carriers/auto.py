"""`weights.carrier: auto`: the carrier of each worker, by what is known when it joins.

    worker                                            carrier
    on the trainer's host                             shm
    elsewhere; both have a GPU and cupy               nccl
    elsewhere, else; the recipe has weights.directory disk
    elsewhere, else                                   gloo

One that cannot be opened is not offered any more by the process that could not, and the next line holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from typing_extensions import override

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import ConflictError, MeshError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.weights.carrier import RunPaths
from meshrl.weights.messages import Peer, Receiver, SourceError
from meshrl.weights.transport import (
    Delivery,
    LoadCarrier,
    Pairs,
    ReceivePlan,
    Transport,
    check_reached,
    load_carrier,
)

logger = logging.getLogger(__name__)


class Carrier(Transport):
    """Several carriers, the one to take first at the front; it belongs to one event loop."""

    def __init__(
        self, config: WeightsConfig, paths: RunPaths, load: LoadCarrier = load_carrier
    ) -> None:
        """`load` makes each of them."""
        self._config = config
        self._paths = paths
        self._load = load
        self._carriers: dict[str, Pairs] = {}
        """Loaded carriers, also those that are no longer offered."""
        self.names = config.offered

    @override
    async def load(self) -> None:
        """Load the carriers, and stop offering those that fail."""
        for name in self.names:
            try:
                await asyncio.to_thread(self._loaded, name)  # it may import torch
            except (MeshError, ImportError, OSError) as error:
                logger.warning("carrier %s is not offered: %s", name, error)
                self._give_up(name)

    @override
    async def start(self) -> None:
        await self.load()

    @override
    def reaches(self, peer: Peer) -> bool:
        return bool(self._reaching(peer))

    @override
    async def send(self, source: WeightSource, receivers: Sequence[Receiver]) -> Sequence[Delivery]:
        chosen: dict[Pairs, list[Receiver]] = {}
        for receiver in receivers:
            chosen.setdefault(await self._prepared(receiver.peer, source), []).append(receiver)
        found: dict[int, Delivery] = {}
        for carrier, those in chosen.items():
            deliveries = await carrier.send(source, those)
            found |= {
                receiver.link.generation: delivery
                for receiver, delivery in zip(those, deliveries, strict=True)
            }
        return [found[receiver.link.generation] for receiver in receivers]

    @override
    def leave(self, receiver: Receiver) -> None:
        for carrier in self._carriers.values():
            carrier.leave(receiver)

    @override
    async def receive(self, plan: ReceivePlan) -> None:
        if plan.carrier not in (*self._carriers, *self.names):
            offers = ", ".join(self.names)
            raise ConflictError(f"carrier {plan.carrier!r}: this process offers {offers}")
        await self._loaded(plan.carrier).receive(plan)

    @override
    def committed(self, version: Version) -> None:
        for carrier in self._carriers.values():
            carrier.committed(version)

    @override
    async def disconnect(self) -> None:
        for carrier in self._carriers.values():
            await carrier.disconnect()

    @override
    async def close(self) -> None:
        for carrier in self._carriers.values():
            await carrier.close()

    def _loaded(self, name: str) -> Pairs:
        """Raises ConfigError when it cannot be loaded."""
        if name not in self._carriers:
            port = self._config.port and self._config.port + self._config.choices.index(name)
            config = self._config.model_copy(update={"carrier": name, "port": port})
            carrier = self._carriers[name] = self._load(config, self._paths)
            carrier.refused = lambda error: self._give_up(
                name
            )  # the next joining offers the others
        return self._carriers[name]

    def _give_up(self, name: str) -> None:
        """Offer it no more; idempotent. Its channels stay."""
        self.names = tuple(each for each in self.names if each != name)

    def _reaching(self, peer: Peer) -> list[Pairs]:
        return [carrier for name in self.names if (carrier := self._carriers[name]).reaches(peer)]

    async def _prepared(self, peer: Peer, source: WeightSource) -> Pairs:
        """The carrier of a version to a replica, ready to send it. Raises MeshError when none can be."""
        while True:
            check_reached(self, peer)
            carrier, *others = self._reaching(peer)
            try:
                await carrier.prepare(source)
            except SourceError:
                raise  # no carrier's fault
            except MeshError as error:
                if not others:
                    raise
                name = carrier.config.carrier
                logger.warning("weights go by %s no more: %s", name, error)
                self._give_up(name)
            else:
                return carrier
