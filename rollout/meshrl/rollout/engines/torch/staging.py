"""Staging: memory in which a version waits for its commit, beside the served one.

    device   built on the device, a second version of the weights there: the commit swaps two references on a CPU, and
             copies on a GPU, from its memory to its memory
             or as it arrived there, in memory that was lent to the receiver: then the commit writes it over
    host     as it arrived, in host memory: the commit writes it over the served version between two decode steps,
             layer by layer, so that the device never holds two

Until the commit both can be forgotten. Loading buckets into the served version as they arrive would save the host's
copy, too, and is not there: nothing could be sampled or taken back while a version is under way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from meshrl.common.device_lease import DeviceShare
from meshrl.contract.errors import CapacityError
from meshrl.contract.types import Uint8, WeightManifest
from meshrl.rollout.engines.torch.architecture import DecoderArchitecture
from meshrl.rollout.engines.torch.weights import (
    Reader,
    Weights,
    bucket_reader,
    build,
    overwrite,
)

Staging = Literal["device", "host"]
HEADROOM = 1 << 30
"""Bytes of a device that stay free for activations beside a second version."""


class StagedVersion(Protocol):
    """A complete version, checked against the model."""

    def serve(self, live: Weights | None, device: torch.device) -> Weights:
        """The weights to decode with from now on; `live` are those until now, and not used again."""
        ...

    def to(self, device: torch.device) -> StagedVersion:
        """The same on `device`."""
        ...


@dataclass(frozen=True, slots=True)
class Built:
    """A version as the decoder multiplies it."""

    weights: Weights

    def serve(self, live: Weights | None, device: torch.device) -> Weights:
        """On a GPU at the addresses of `live`, so that CUDA graphs live on. Moves what waited for one that slept."""
        if live is None or device.type == "cpu" or live.embedding.device.type == "cpu":
            return self.weights.to(device)
        live.copy_(self.weights)
        return live

    def to(self, device: torch.device) -> Built:
        """The same on `device`."""
        return Built(self.weights.to(device))


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version in the buckets that it arrived in, which stay as they are."""

    read: Reader
    names: Collection[str]
    architecture: DecoderArchitecture
    dtype: torch.dtype

    def serve(self, live: Weights | None, device: torch.device) -> Weights:
        """Writes over `live`, which a failure leaves in pieces."""
        if live is None:
            return build(self.read, self.names, self.architecture, self.dtype, device)
        overwrite(live, self.read, self.names, self.architecture)
        if device.type == "cuda":  # who lent the memory may be sent the next version now
            torch.cuda.synchronize(device)
        return live.to(device)

    def to(self, device: torch.device) -> Arrived:
        """Itself: an engine that sleeps lends nothing, so it is in host memory."""
        return self


def stage(
    where: Staging,
    manifest: WeightManifest,
    buckets: Sequence[Uint8 | torch.Tensor],
    architecture: DecoderArchitecture,
    dtype: torch.dtype,
    device: torch.device,
) -> StagedVersion:
    """A version, checked. As it arrived it needs the buckets for as long as it waits; built it is a copy.

    Raises:
        UserError: it does not fit the model.
    """
    read, names = bucket_reader(manifest, buckets, architecture)
    if where == "host":
        return Arrived(read, names, architecture, dtype)
    return Built(build(read, names, architecture, dtype, device))


def needed_bytes(manifest: WeightManifest, dtype: torch.dtype | None) -> int:
    """Bytes of a second version on a device, with two buckets for fused tensors and the headroom.

    `dtype` is the engine's; None: it stays as it arrives.
    """
    version = manifest.total_bytes
    if dtype is not None:
        version = sum(math.prod(spec.shape) for spec in manifest.tensors) * dtype.itemsize
    return version + 2 * max(manifest.bucket_bytes, default=0) + HEADROOM


def choose(
    asked: Literal["auto"] | Staging,
    manifest: WeightManifest,
    dtype: torch.dtype | None,
    free: int | None,
) -> tuple[Staging, str]:
    """Choose the memory in which a version is staged; returns the reason too.

    Args:
        asked: `rollout.engine.weight_staging`.
        manifest: The version, of which the plan suffices.
        dtype: The engine's; None for a version that stays there as it arrives.
        free: Bytes of the device that a second version could take; None on a CPU, where no other memory is scarcer.

    Raises:
        CapacityError: the device was asked for, and does not have them.
    """
    if free is None:
        return ("host" if asked == "host" else "device"), "the engine computes on the CPU"
    needs = needed_bytes(manifest, dtype)
    why = f"a second version takes {needs / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    if asked == "device" and needs > free:
        raise CapacityError(
            f"weights {manifest.version}: rollout.engine.weight_staging is device, and {why} there;"
            " want auto or host, or a smaller rollout.engine.kv_cache_bytes"
        )
    if asked == "auto":
        return ("device" if needs <= free else "host"), why
    return asked, "rollout.engine.weight_staging says so"


def free_bytes(device: torch.device, promised: int) -> int | None:
    """Bytes of a GPU that a second version could take; None for a CPU.

    Args:
        device: Device of the engine.
        promised: Bytes that the cache may still grow by.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = DeviceShare.of()
    return free_of(
        free=free,
        total=total,
        share=1.0 if share is None else share.memory,
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        promised=promised,
    )


def free_of(
    *, free: int, total: int, share: float, allocated: int, reserved: int, promised: int
) -> int:
    """Free bytes and those that torch holds in reserve, within the engine's share, without what is promised."""
    return max(0, min(free + reserved - allocated, int(share * total) - allocated) - promised)
