"""The trainer's end of all carriers: which of them takes a version to which replica, ready to be used.

With one configured carrier there is nothing to choose; `auto` asks `carriers/auto.py`. A carrier listens when it is
chosen first, and writes a version down (`stage`) once, when it is first chosen for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.weights.carrier import Carriers, Cell, Link, Place
from meshrl.weights.carrier_facts import Traits, host_id, traits
from meshrl.weights.carriers.auto import Chooser

logger = logging.getLogger(__name__)
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_ITEM = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a replica has said of itself."""

    name: str
    host: str
    """See `traits.host_id`."""
    carriers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one version gets to one replica."""

    carrier: str
    measured_as: str
    """What the chooser calls it: a carrier that sends what changed is two, with a base and without."""
    endpoint: str
    receivers: str
    """The class that the replica belongs to."""
    work: float
    """Bytes that the carrier is expected to handle; see `carriers/auto.py`."""


class Routes:
    """Belongs to the plane's event loop."""

    def __init__(self, config: WeightsConfig, place: Place) -> None:
        self._carriers = Carriers(config, place)
        self._traits: dict[str, Traits] = {name: traits(name) for name in self._carriers.names}
        self._host = host_id()
        self._chooser = Chooser()
        self._endpoints: dict[str, str] = {}
        self._staged = {name: deque[Version](maxlen=config.keep) for name in self._traits}
        self._staging_s: dict[tuple[str, Version], float] = {}
        self._locks = {name: asyncio.Lock() for name in self._traits}
        self._chosen: dict[str, tuple[Version, Route]] = {}
        """By class: replicas of one class get a version in one way."""
        self._committed: WeightSource | None = None

    async def start(self) -> None:
        """Load the carriers, and listen where there is only one. Raises ConfigError when it cannot."""
        await asyncio.to_thread(self._carriers.load)
        self._traits = {name: self._traits[name] for name in self._carriers.names}
        if len(self._carriers.names) == 1:
            await self._endpoint(self._carriers.names[0])

    async def close(self) -> None:
        """Free everything; idempotent."""
        await self._carriers.close()

    def check(self, peer: Peer) -> None:
        """Raises UserError, saying why, for a replica that no carrier reaches."""
        if not self._reaching(peer):
            raise UserError(
                f"no carrier of weights reaches {peer.name}: the trainer can {_listed(self._traits)}, it can "
                f"{_listed(peer.carriers)}, and it is on {'this' if peer.host == self._host else 'another'} host; "
                "set weights.carrier to auto, or to the same one on both sides (gloo reaches other hosts)"
            )

    async def stage(self, source: WeightSource, peers: Iterable[Peer]) -> None:
        """Choose for those who take part from the start, and write down what must be. Raises MeshError."""
        if len(self._traits) == 1:  # also while there is nobody: who joins later finds it ready
            await self._prepare(self._carriers.names[0], source)
        for peer in peers:
            await self.choose(peer, source)

    async def choose(self, peer: Peer, source: WeightSource) -> Route:
        """The way of a version to a replica, ready to be used. Raises MeshError when none can be made ready."""
        reaching = self._reaching(peer)
        receivers = f"{'here' if peer.host == self._host else 'elsewhere'}: {_listed(reaching)}"
        version = source.manifest.version
        chosen = self._chosen.get(receivers)
        if chosen is not None and chosen[0] == version:
            return chosen[1]
        last = chosen[1].carrier if chosen else ""
        options = {
            f"{name} from a base" if self._has_base(name, last) else name: name for name in reaching
        }
        work = self._work(options, source)
        rates = {option: self._traits[name].rate for option, name in options.items()}
        while True:
            option = self._chooser.choose(receivers, work, rates)
            name = options[option]
            try:
                endpoint = await self._prepare(name, source)
            except MeshError as error:
                self._chooser.failed(receivers, option)
                if len(work) == 1:
                    raise
                logger.warning("weights cannot go by %s: %s", name, error)
                del work[option]
            else:
                way = Route(
                    carrier=name,
                    measured_as=option,
                    endpoint=endpoint,
                    receivers=receivers,
                    work=work[option],
                )
                self._chosen[receivers] = (version, way)
                return way

    def cell(self, way: Route, link: Link) -> Cell:
        """This end of a cell."""
        return self._carriers[way.carrier].cell(link)

    def observe(self, way: Route, version: Version, seconds: float, opening_s: float) -> None:
        """A version has arrived: `opening_s` until the replica was ready for it, `seconds` from then on."""
        seconds += self._staging_s.get((way.carrier, version), 0.0)
        self._chooser.observe(way.receivers, way.measured_as, way.work, seconds, opening_s)

    def failed(self, way: Route) -> None:
        """A version has not arrived, and the carrier may be why: the next attempt chooses anew."""
        self._chooser.failed(way.receivers, way.measured_as)
        self._chosen.pop(way.receivers, None)

    def committed(self, source: WeightSource) -> None:
        """What changes of the next version are counted from."""
        self._committed = source
        version = source.manifest.version
        self._staging_s = {k: s for k, s in self._staging_s.items() if k[1] >= version}

    def _reaching(self, peer: Peer) -> list[str]:
        here = peer.host == self._host != ""
        return [
            name
            for name, each in self._traits.items()
            if name in peer.carriers and (here or each.reach != "host")
        ]

    def _has_base(self, name: str, last: str) -> bool:
        """Whether what changed is enough: what a replica holds of a version that came otherwise is no base."""
        return self._traits[name].sparse and name == last and self._committed is not None

    def _work(self, options: Mapping[str, str], source: WeightSource) -> dict[str, float]:
        total = float(source.manifest.total_bytes)
        work = dict.fromkeys(options, total)
        sparse = [option for option, name in options.items() if option != name]
        if len(work) > 1 and sparse and self._committed is not None:
            # Scanning and applying, and what is sent: about 1.5 bytes for each that changed.
            changed = density(self._committed, source)
            work |= dict.fromkeys(sparse, total * min(1.0, 0.3 + 1.5 * changed))
        return work

    async def _prepare(self, name: str, source: WeightSource) -> str:
        endpoint = await self._endpoint(name)
        async with self._locks[name]:
            version = source.manifest.version
            if version not in self._staged[name]:
                began = time.monotonic()
                await self._carriers[name].stage(source)
                self._staging_s[name, version] = time.monotonic() - began
                self._staged[name].append(version)
        return endpoint

    async def _endpoint(self, name: str) -> str:
        async with self._locks[name]:
            if name not in self._endpoints:
                self._endpoints[name] = await self._carriers[name].listen()
            return self._endpoints[name]


def density(base: WeightSource, source: WeightSource) -> float:
    """Share of elements that differ between two versions, by samples; 1.0 when they are laid out differently."""
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
