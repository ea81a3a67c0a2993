"""The port of a carrier: how the bytes of a version get from the trainer's process to one replica.

A carrier's module may assign these literals, which are read without importing it; what it leaves out is as below.

    REACH = "host" | "network" | "directory"     which replicas: this host, any host, those that see the directory
    NEEDS = ("torch", "cuda")                    modules that both ends must be able to import; cuda: a GPU driver
    STREAMS = False                              whether it takes each bucket as soon as it is gathered: `send` does,
                                                 and `stage` reads none, or waits for each (`gathering`); for other
                                                 carriers a version is gathered first
    WRITES = False                               whether what `send` gives is where the replica reads it when `send`
                                                 has ended, not before: it is told of a bucket then
    GROUPS = False                               whether a channel may have more than two ends: rank 0 sends each
                                                 bucket once, to all others
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from meshrl.common import plugins
from meshrl.config.weights import CARRIERS, WeightsConfig
from meshrl.contract.errors import ConflictError, MeshError, UnavailableError
from meshrl.contract.ports import DeviceReceiver, LentBucket, WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.shared_memory import FOLDER, boot_id

logger = logging.getLogger(__name__)
_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Where a process finds the run and the model."""

    directory: Path
    """The run's directory; the two ends may see it under different paths."""
    model_path: Path | None = None
    """The checkpoint whose config and tokenizer are copied beside weights that are written to disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What both ends of a channel must agree on; the trainer's process decides it and sends it."""

    run: str
    epoch: int
    generation: int
    endpoint: str
    rank: int
    """0 is the trainer's end."""
    group: int = 0
    """Numbers the channels of more than two ends in one epoch; `generation` says nothing then."""
    size: int = 2

    @property
    def prefix(self) -> str:
        """Names the channel among all channels that ever use the endpoint."""
        if self.group:
            return f"{self.run}/e{self.epoch}/all{self.group}"
        return f"{self.run}/e{self.epoch}/g{self.generation}"


class Channel(Protocol):
    """One end of the connection between the trainer and one replica, for one generation; or all, see GROUPS.

    Each end overrides what it does: the trainer's sends, a replica's receives.

    Buckets are sent and received in the same order. A channel that failed once is of no further use. One that sends
    what changed has `moved_bytes` too: what travelled of the bucket that was received last.
    """

    async def open(self, deadline_s: float) -> None:
        """Connect to the other end. Raises UnavailableError."""
        return

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Send one bucket; sending it again in this channel repairs what arrived before. Raises UnavailableError."""
        raise UnavailableError("a replica's end of a channel does not send")

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> Uint8 | None:
        """Fill `into`, uint8[bucket_bytes[index]], or return memory that holds the bucket already.

        What is returned stays unchanged for as long as somebody refers to it.

        Raises UnavailableError; CorruptError when what arrived cannot even be read.
        """
        raise UnavailableError("the trainer's end of a channel does not receive")

    def committed(self, version: Version) -> None:
        """The engine at the replica's end serves `version` now. Called on both ends; most carriers ignore it."""
        return

    def abort(self) -> None:
        """Give everything up at once; never waits, idempotent."""
        return

    async def close(self) -> None:
        """End the channel in an orderly way; idempotent."""
        self.abort()


@runtime_checkable
class DeviceChannel(Channel, Protocol):
    """One whose bytes can arrive in memory of a device that an engine lends."""

    @property
    def device(self) -> DeviceReceiver | None:
        """Once it is open: this end, which opens that memory; None where it cannot."""
        ...

    async def receive_lent(self, bucket: LentBucket) -> str:
        """`receive` into it; the chunk digest of what lies there then. Raises UnavailableError."""
        ...


class Carrier(Protocol):
    """What a process holds for all its channels."""

    def __init__(self, config: WeightsConfig, paths: RunPaths) -> None: ...

    async def listen(self) -> str:
        """Trainer's process: be ready for channels; returns the endpoint that is sent to the replicas."""
        ...

    async def stage(self, source: WeightSource) -> None:
        """Trainer's process: called once per version that some channel will send, before it does."""
        ...

    def channel(self, link: Link) -> Channel:
        """One end of a channel, not yet open."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent."""
        ...


LoadCarrier: TypeAlias = Callable[[WeightsConfig, RunPaths], Carrier]
"""Makes the carrier that the configuration names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierFacts:
    """What the module of a carrier states; see the top of this file."""

    reach: str
    needs: tuple[str, ...]
    groups: bool
    streams: bool
    writes: bool

    @property
    def met(self) -> bool:
        """Whether this process has what the carrier needs."""
        return all(
            _DRIVER.exists() if need == "cuda" else importlib.util.find_spec(need) is not None
            for need in self.needs
        )


def carrier_facts(name: str) -> CarrierFacts:
    """Of a module of `meshrl.weights.carriers`, or a dotted path."""

    def constant(what: str, default: object) -> object:
        return plugins.constant(CARRIERS, name, what, default)

    needs = constant("NEEDS", ())
    assert isinstance(needs, tuple)
    return CarrierFacts(
        reach=str(constant("REACH", "network")),
        needs=needs,
        groups=bool(constant("GROUPS", False)),
        streams=bool(constant("STREAMS", False)),
        writes=bool(constant("WRITES", False)),
    )


class Carriers:
    """The carriers of one process, each created when it is first asked for."""

    def __init__(
        self, config: WeightsConfig, paths: RunPaths, load: LoadCarrier | None = None
    ) -> None:
        """`load` makes a carrier; None: `load_carrier`. Raises ConfigError when the one configured is unknown."""
        self._config = config
        self._load = load or load_carrier
        self._paths = paths
        self._created: dict[str, Carrier] = {}
        self.names = offered(config)
        """The carriers by which this process can be reached."""
        if len(self.names) == 1:
            self[self.names[0]]

    def load(self) -> None:
        """Create all of several carriers now, and stop offering those that fail. Blocks: it may import torch."""
        for name in self.names if len(self.names) > 1 else ():
            try:
                self[name]
            except (MeshError, ImportError, OSError) as error:
                logger.warning("carrier %s is not offered: %s", name, error)
                self.give_up(name)

    def give_up(self, name: str) -> None:
        """Offer it no more; idempotent. Its channels stay."""
        self.names = tuple(each for each in self.names if each != name)

    def __getitem__(self, name: str) -> Carrier:
        """Raises ConflictError for one that this process does not offer, ConfigError when it cannot be loaded."""
        if name in self._created:
            return self._created[name]
        if name not in self.names:
            raise ConflictError(f"carrier {name!r}: this process offers {', '.join(self.names)}")
        port = self._config.port and self._config.port + self._config.choices.index(name)
        config = self._config.model_copy(update={"carrier": name, "port": port})
        self._created[name] = self._load(config, self._paths)
        return self._created[name]

    async def close(self) -> None:
        """Free everything; idempotent."""
        for carrier in self._created.values():
            await carrier.close()


def offered(config: WeightsConfig) -> tuple[str, ...]:
    """The carriers that this process can be reached by: the configured one, or those of `auto` that it can run."""
    if config.carrier != "auto":
        return config.choices
    return tuple(name for name in config.choices if carrier_facts(name).met)


def load_carrier(config: WeightsConfig, paths: RunPaths) -> Carrier:
    """The carrier that the configuration names. Raises ConfigError for an unknown one."""
    kind: type[Carrier] = plugins.load(CARRIERS, config.carrier, "Carrier")
    return kind(config, paths)


def host_id() -> str:
    """The kernel and its shared memory: equal for two processes that can share memory. Empty when unknown."""
    boot = boot_id()
    try:
        return f"{boot}/{FOLDER.stat().st_dev}" if boot else ""
    except OSError:
        return ""
