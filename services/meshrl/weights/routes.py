"""The trainer's end of all carriers: which of them takes a version to which replica, ready to be used.

With one configured carrier there is nothing to choose; with `auto`, `carriers/auto.py` chooses. A carrier listens
when it is first chosen, and writes a version (`stage`) once, when it is first chosen for that version.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.weights.carrier import (
    Carrier,
    CarrierFacts,
    Carriers,
    Channel,
    Link,
    LoadCarrier,
    RunPaths,
    carrier_facts,
    host_id,
)
from meshrl.weights.carriers.auto import CostModel
from meshrl.weights.gathering import SourceError, whole

logger = logging.getLogger(__name__)
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_ITEM = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


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
    measured_as: str
    """The carrier's name in the cost model: one that sends what changed has two, with a base and without."""
    endpoint: str
    receivers: str
    """The class that the replica belongs to."""
    work: float
    """Bytes that the carrier is expected to handle; see `carriers/auto.py`."""


class Routes:
    """Belongs to the coordinator's event loop."""

    def __init__(
        self, config: WeightsConfig, paths: RunPaths, load: LoadCarrier | None = None
    ) -> None:
        self._carriers = Carriers(config, paths, load)
        self._facts: dict[str, CarrierFacts] = {
            name: carrier_facts(name) for name in self._carriers.names
        }
        self._host = host_id()
        self._cost_model = CostModel()
        self._listening: dict[str, tuple[Carrier, str]] = {}
        """The carriers that have been chosen, with their endpoints."""
        self._staged = {name: deque[Version](maxlen=config.keep) for name in self._facts}
        self._staging_s: dict[tuple[str, Version], float] = {}
        self._changed: float | None = None
        """Share of the elements that the version that was committed last changed; None: it is not known."""
        self._locks = {name: asyncio.Lock() for name in self._facts}
        self._starting = {name: asyncio.Lock() for name in self._facts}
        self._chosen: dict[str, tuple[Version, Route]] = {}
        """By class: replicas of one class get a version by the same route."""
        self._committed: WeightSource | None = None

    async def start(self) -> None:
        """Load the carriers, and listen where there is only one. Raises ConfigError when it cannot."""
        await asyncio.to_thread(self._carriers.load)
        self._facts = {name: self._facts[name] for name in self._carriers.names}
        if len(self._carriers.names) == 1:
            await self._listen(self._carriers.names[0])

    async def close(self) -> None:
        """Free everything; idempotent."""
        await self._carriers.close()

    def check(self, peer: Peer) -> None:
        """Raises UserError, saying why, for a replica that no carrier reaches."""
        if not self._reaching(peer):
            raise UserError(
                f"no carrier of weights reaches {peer.name}: the trainer can {_listed(self._facts)}, it can "
                f"{_listed(peer.carriers)}, and it is on {'this' if peer.host == self._host else 'another'} host; "
                "set weights.carrier to auto, or to the same one on both sides (gloo reaches other hosts)"
            )

    async def stage(self, source: WeightSource, peers: Iterable[Peer]) -> None:
        """Choose a route for each replica that takes part from the start, and stage the version. Raises MeshError."""
        if not self._choosing:  # also without replicas: it is ready for those that join later
            await self._prepare(self._carriers.names[0], source)
        for peer in peers:
            await self.choose(peer, source)

    async def choose(self, peer: Peer, source: WeightSource) -> Route:
        """The route of a version to a replica, ready to be used. Raises MeshError when no carrier can be."""
        reaching = self._reaching(peer)
        receivers = self._receivers(peer)
        version = source.manifest.version
        chosen = self._chosen.get(receivers)
        if chosen is not None and chosen[0] == version:
            return chosen[1]
        last = chosen[1].carrier if chosen else ""
        options = {
            f"{name} from a base" if self._has_base(name, last) else name: name for name in reaching
        }
        work = await self._work(options, source)
        rates = {option: self._facts[name].rate for option, name in options.items()}
        while True:
            option = (
                self._cost_model.choose(receivers, work, rates)
                if self._choosing
                else next(iter(options))
            )
            name = options[option]
            try:
                endpoint = await self._prepare(name, source)
            except SourceError:
                raise  # no carrier's fault
            except MeshError as error:
                if self._choosing:
                    self._cost_model.failed(receivers, option)
                if len(work) == 1:
                    raise
                logger.warning("weights cannot go by carrier %s: %s", name, error)
                del work[option]
            else:
                route = Route(
                    carrier=name,
                    measured_as=option,
                    endpoint=endpoint,
                    receivers=receivers,
                    work=work[option],
                )
                self._chosen[receivers] = (version, route)
                return route

    def grouped(self, peer: Peer, version: Version) -> str:
        """The carrier of a route that is chosen, if one channel of it can have more than two ends; else empty."""
        chosen = self._chosen.get(self._receivers(peer))
        if chosen is None or chosen[0] != version or not self._facts[chosen[1].carrier].groups:
            return ""
        return chosen[1].carrier

    def group(self, carrier: str, link: Link) -> Channel:
        """This end of a channel to several."""
        return self._carriers[carrier].channel(replace(link, endpoint=self._listening[carrier][1]))

    def channel(self, route: Route, link: Link) -> Channel:
        """This end of a channel."""
        return self._carriers[route.carrier].channel(link)

    def writes(self, route: Route) -> bool:
        """Whether what was sent is there for the replica once it is sent, and it must not look before."""
        return self._facts[route.carrier].writes

    def observe(self, route: Route, version: Version, seconds: float, opening_s: float) -> None:
        """A version has arrived: `opening_s` until the replica was ready for it, `seconds` from then on.

        What is measured is the way of the bytes: neither counts what they waited for the gather.
        """
        if not self._choosing:
            return
        seconds += self._staging_s.get((route.carrier, version), 0.0)
        self._cost_model.observe(route.receivers, route.measured_as, route.work, seconds, opening_s)

    def failed(self, route: Route) -> None:
        """A version has not arrived, and the carrier may be the cause: the next attempt chooses again."""
        if self._choosing:
            self._cost_model.failed(route.receivers, route.measured_as)
        self._chosen.pop(route.receivers, None)

    def committed(self, source: WeightSource) -> None:
        """The changes of the next version are counted from this one."""
        if self._choosing and any(each.sparse for each in self._facts.values()):
            before = self._committed
            self._changed = None if before is None else density(before, source)
        self._committed = source
        version = source.manifest.version
        self._staging_s = {k: s for k, s in self._staging_s.items() if k[1] >= version}

    @property
    def _choosing(self) -> bool:
        """False with one carrier: then there is nothing to choose or to measure."""
        return len(self._facts) > 1

    def _reaching(self, peer: Peer) -> list[str]:
        here = peer.host == self._host != ""
        return [
            name
            for name, each in self._facts.items()
            if name in peer.carriers and (here or each.reach != "host")
        ]

    def _receivers(self, peer: Peer) -> str:
        """Its class: replicas of one class get a version by the same route."""
        where = "here" if peer.host == self._host else "elsewhere"
        return f"{where}: {_listed(self._reaching(peer))}"

    def _has_base(self, name: str, last: str) -> bool:
        """Whether the carrier can send changes only: a version that came by another carrier is no base."""
        return self._facts[name].sparse and name == last and self._committed is not None

    async def _work(self, options: Mapping[str, str], source: WeightSource) -> dict[str, float]:
        total = float(source.manifest.total_bytes)
        work = dict.fromkeys(options, total)
        sparse = [option for option, name in options.items() if option != name]
        if len(work) > 1 and sparse and self._committed is not None:
            # Scanning and applying cost 0.3 of the bytes; about 1.5 bytes are sent for each that changed.
            # As much as the version before changed: this one may not have been gathered yet.
            changed = self._changed
            if changed is None:
                await whole(source)
                changed = density(self._committed, source)
            work |= dict.fromkeys(sparse, total * min(1.0, 0.3 + 1.5 * changed))
        return work

    async def _prepare(self, name: str, source: WeightSource) -> str:
        """Have the carrier listen and stage the version; returns its endpoint."""
        carrier, endpoint = await self._listen(name)
        version, facts = source.manifest.version, self._facts[name]
        if version in self._staged[name]:
            return endpoint  # also while a newer one is gathered, and staged meanwhile
        if not (facts.streams or facts.gathers):
            await whole(source)
        async with self._locks[name]:
            if version not in self._staged[name]:
                clock = asyncio.get_running_loop().time
                began = clock()
                waited_s = await carrier.stage(source)
                self._staging_s[name, version] = clock() - began - (waited_s or 0.0)
                self._staged[name].append(version)
        return endpoint

    async def _listen(self, name: str) -> tuple[Carrier, str]:
        async with self._starting[name]:
            if name not in self._listening:
                carrier = self._carriers[name]
                self._listening[name] = carrier, await carrier.listen()
            return self._listening[name]


def density(base: WeightSource, source: WeightSource) -> float:
    """Share of elements that differ between two versions, from samples; 1.0 when their layouts differ."""
    old, new = base.manifest, source.manifest
    if old.tensors != new.tensors or not new.tensors:
        return 1.0
    tensors = new.tensors[:: -(-len(new.tensors) // _SAMPLES)]
    changed = total = 0
    for tensor in tensors:
        item = _ITEM.get(tensor.dtype, np.uint8)
        part = slice(tensor.offset, tensor.offset + min(tensor.nbytes, _SAMPLE_BYTES))
        before = base.bucket(tensor.bucket)[part].view(item)
        after = source.bucket(tensor.bucket)[part].view(item)
        changed += int(np.count_nonzero(before != after))
        total += after.size
    return changed / total if total else 1.0


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
