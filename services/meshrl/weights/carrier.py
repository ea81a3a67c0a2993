"""The port of a carrier: how the bytes of a version get from the trainer's process to one replica."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshrl.config.weights import CARRIERS, WeightsConfig
from meshrl.contract.errors import ConflictError, MeshError
from meshrl.contract.plugins import load
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.carrier_facts import offered

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands."""

    directory: Path
    """The run's directory; the two ends may see it under different paths."""
    model_path: Path | None = None
    """The checkpoint whose config and tokenizer are laid beside weights that are written to disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What both ends of a cell must agree on; the trainer's process decides it and sends it."""

    run: str
    epoch: int
    generation: int
    endpoint: str
    rank: int
    """0 is the trainer's end."""
    size: int = 2

    @property
    def prefix(self) -> str:
        """Names the cell among all cells that ever meet at the endpoint."""
        return f"{self.run}/e{self.epoch}/g{self.generation}"


class Cell(Protocol):
    """One end of the channel between the trainer and one replica, for one generation.

    Buckets are sent and received in the same order. A cell that failed once is of no further use.
    """

    async def open(self, deadline_s: float) -> None:
        """Meet the other end. Raises UnavailableError."""
        ...

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Send one bucket; sending it again in this cell repairs what arrived before. Raises UnavailableError."""
        ...

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> Uint8 | None:
        """Fill `into`, uint8[bucket_bytes[index]], or return memory that holds the bucket already.

        What is returned stays as it is for as long as it is referred to.

        Raises UnavailableError; CorruptError when what arrived cannot even be read.
        """
        ...

    def committed(self, version: Version) -> None:
        """The engine at the replica's end serves `version` now; told to both ends, of no use to most carriers."""
        ...

    def abort(self) -> None:
        """Give everything up at once; never waits, idempotent."""
        ...

    async def close(self) -> None:
        """Part in peace; idempotent."""
        ...


class Carrier(Protocol):
    """What a process holds for all its cells."""

    def __init__(self, config: WeightsConfig, place: Place) -> None: ...

    async def listen(self) -> str:
        """Trainer's process: be ready for cells; returns the endpoint that is sent to the replicas."""
        ...

    async def stage(self, source: WeightSource) -> None:
        """Trainer's process: called once per version that some cell will send, before it does."""
        ...

    def cell(self, link: Link) -> Cell:
        """One end of a cell, not yet open."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent."""
        ...


class Carriers:
    """Those of one process, each made when it is first asked for."""

    def __init__(self, config: WeightsConfig, place: Place) -> None:
        """Raises ConfigError when the one configured carrier is unknown."""
        self._config = config
        self._place = place
        self._made: dict[str, Carrier] = {}
        self.names = offered(config)
        """By which this process can be reached."""
        if len(self.names) == 1:
            self[self.names[0]]

    def load(self) -> None:
        """Make all of several now, which may import torch, and offer no more those that cannot be made. Blocks."""
        for name in self.names if len(self.names) > 1 else ():
            try:
                self[name]
            except (MeshError, ImportError, OSError) as error:
                logger.warning("carrier %s is not offered: %s", name, error)
                self.names = tuple(each for each in self.names if each != name)

    def __getitem__(self, name: str) -> Carrier:
        """Raises ConflictError for one that this process does not offer, ConfigError when it cannot be loaded."""
        if name not in self.names:
            raise ConflictError(f"carrier {name!r}: this process offers {', '.join(self.names)}")
        if name not in self._made:
            index = self._config.among.index(name) if self._config.carrier == "auto" else 0
            port = self._config.port + index if self._config.port else 0
            config = self._config.model_copy(update={"carrier": name, "port": port})
            self._made[name] = load_carrier(config, self._place)
        return self._made[name]

    async def close(self) -> None:
        """Free everything; idempotent."""
        for carrier in self._made.values():
            await carrier.close()


def load_carrier(config: WeightsConfig, place: Place) -> Carrier:
    """The carrier that the configuration names. Raises ConfigError for an unknown one."""
    kind: type[Carrier] = load(CARRIERS, config.carrier, "Carrier")
    return kind(config, place)
