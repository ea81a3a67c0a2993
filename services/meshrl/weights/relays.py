"""A replica's end of the chain: it passes on to other replicas what it has received and verified.

    RELAY(generation, hop, buckets) ─▶ Relay, one per receiver: open ▸ send, send, … ▸ done ▸ … ▸ close

Consumes the coordinator's orders, at once and in order, whatever the session waits for meanwhile. Waits for the
receiver's end and for the carrier, each under its deadline. Unblocked by `close`. A relay that fails only ends its
channel: the receiver and the coordinator notice, and another sender is named.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshrl.contract.errors import MeshError
from meshrl.contract.ports import LentBucket
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Carriers, Channel, Link

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """What a replica has of one version; filled while it arrives."""

    manifest: WeightManifest
    buckets: list[Uint8]
    missing: set[int]
    hashes: dict[int, tuple[str, Sequence[int]]]
    """Of each bucket and its tensors, as far as the trainer has said them."""
    lent: list[LentBucket] = field(default_factory=list)
    """Where they arrive on a device, in place of `buckets`; none: on the host."""
    digests: dict[int, str] = field(default_factory=dict)
    """Chunk digests, for those that arrive on a device."""

    @property
    def version(self) -> Version:
        """The version."""
        return self.manifest.version


class Relays:
    """All receivers of one session."""

    def __init__(
        self,
        carriers: Carriers,
        *,
        run: str,
        epoch: int,
        open_s: float,
        received: Callable[[], Received | None],
    ) -> None:
        """`received` is what the session holds now; `open_s` the longest wait for a receiver."""
        self._carriers = carriers
        self._run = run
        self._epoch = epoch
        self._open_s = open_s
        self._received = received
        self._relays: dict[tuple[int, int], _Relay] = {}

    def order(self, version: Version, order: pb.PlaneRelay) -> None:
        """Take an order; never waits."""
        key = order.generation, order.hop
        if order.close:
            if (ended := self._relays.pop(key, None)) is not None:
                ended.close()
            return
        if key not in self._relays:
            link = Link(
                run=self._run,
                epoch=self._epoch,
                generation=order.generation,
                hop=order.hop,
                endpoint=order.endpoint,
                rank=0,
            )
            self._relays[key] = _Relay(self._carriers, order.carrier, link, self._open_s)
        relay = self._relays[key]
        received = self._received()
        if not order.done and received is not None and received.version == version:
            relay.received = received
        if order.done:
            relay.received = None
        elif order.buckets:
            relay.send(version, order.buckets)

    def needs(self, version: Version) -> bool:
        """Whether some receiver has not got all of it yet."""
        held = [relay.received for relay in self._relays.values() if relay.received is not None]
        return any(each.version == version for each in held)

    def close(self) -> None:
        """End all; idempotent, never waits."""
        while self._relays:
            self._relays.popitem()[1].close()


class _Relay:
    """The channel to one receiver."""

    def __init__(self, carriers: Carriers, carrier: str, link: Link, open_s: float) -> None:
        self.received: Received | None = None
        """What it sends from, until the receiver has it all."""
        self._link = link
        self._channel: Channel | None = None
        self._orders: asyncio.Queue[tuple[Received, Sequence[int]]] = asyncio.Queue()
        self._task = asyncio.create_task(
            self._run(carriers, carrier, open_s), name=f"relay-{link.generation}-{link.hop}"
        )

    def send(self, version: Version, buckets: Sequence[int]) -> None:
        """Send these next."""
        received = self.received
        if received is None or received.version != version or received.missing & set(buckets):
            logger.warning("weights %s cannot be passed on: they are not held", version)
            self.close()
        else:
            self._orders.put_nowait((received, buckets))

    def close(self) -> None:
        """Give up."""
        self.received = None
        self._task.cancel()
        if self._channel is not None:
            self._channel.abort()

    async def _run(self, carriers: Carriers, carrier: str, open_s: float) -> None:
        """Owned by `close`."""
        try:
            self._channel = channel = carriers[carrier].channel(self._link)
            await channel.open(open_s)
            while True:
                received, buckets = await self._orders.get()
                for index in buckets:
                    await channel.send(received.manifest, index, received.buckets[index])
        except MeshError as error:
            logger.info("weights are not passed on by %s any more: %s", self._link.prefix, error)
        except Exception:
            logger.exception("passing weights on by %s failed", self._link.prefix)
        finally:
            self.received = None
            if self._channel is not None:
                self._channel.abort()
