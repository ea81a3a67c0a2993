"""The trainer's turns on a device that engines use too: between them its models and moments are in host memory.

batch ─▶ acquire: engines sleep, state to the device ─▶ learn ─▶ snapshot ─▶ release: state to the host ─▶ publish
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from meshrl.common.device_lease import DeviceLease
from meshrl.contract.types import Json
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.learner.optimizer import Optimizers, move_state
from meshrl.trainer.ranks.world import Compute


class DeviceTurns(Protocol):
    """When the trainer has its device."""

    metrics: Mapping[str, Json]
    """Metrics of the last turn."""

    async def acquire(self) -> None:
        """Have the device, with everything that a step needs on it; idempotent. Raises WaitTimeoutError."""
        ...

    async def release(self, *, version_follows: bool = False) -> None:
        """Let others have it; idempotent. `version_follows`: engines get a new version at once."""
        ...


class Always(DeviceTurns):
    """The device is the trainer's own."""

    metrics: Mapping[str, Json] = {}

    async def acquire(self) -> None:
        """Return at once: the device is never shared."""

    async def release(self, *, version_follows: bool = False) -> None:
        """Do nothing: no engine uses the device."""


class TimeSlices(DeviceTurns):
    """DeviceTurns by a lease, which this process holds when this is made."""

    def __init__(
        self, lease: DeviceLease, learner: Learner, compute: Compute, *, wait_s: float
    ) -> None:
        """`wait_s`: how long engines may take to give the device up."""
        self._lease = lease
        self._compute = compute
        self._wait_s = wait_s
        self._device = learner.world.device
        beside = learner.beside.values()
        self._parts: Sequence[tuple[nn.Module, Optimizers]] = [
            (learner.policy, learner.optimizers),
            *((each.model, each.optimizers) for each in beside),
        ]
        self._moving = [model for model, _ in self._parts if _device(model) == self._device.type]
        """Models on the device; those whose parameters FSDP keeps on the host stay there (`model.param_offload`)."""
        self._held = True
        self._began = time.monotonic()
        self.metrics = {}

    @override
    async def acquire(self) -> None:
        if self._held:
            return
        asked = time.monotonic()
        await self._lease.acquire(self._wait_s)
        self._held = True
        self._began = time.monotonic()
        await self._compute.run(lambda: self._move(self._device))
        self.metrics = {
            "time_slices/wait_s": self._began - asked,
            "time_slices/load_s": time.monotonic() - self._began,
        }

    @override
    async def release(self, *, version_follows: bool = False) -> None:
        if not self._held:
            return
        began = time.monotonic()
        await self._compute.run(lambda: self._move(torch.device("cpu")))
        self._held = False
        self._lease.release(version_follows=version_follows)
        ended = time.monotonic()
        self.metrics |= {
            "time_slices/offload_s": ended - began,
            "time_slices/held_s": ended - self._began,
        }

    def _move(self, to: torch.device) -> None:
        """Move the tensors that the device holds between two steps, offloaded optimizer moments left out."""
        for model in self._moving:
            model.to(to)
        for _, optimizers in self._parts:
            for part in () if optimizers.offloaded else optimizers.parts:
                move_state(part)
        if self._device.type == "cuda" and to.type == "cpu":
            torch.cuda.empty_cache()


def _device(model: nn.Module) -> str:
    return next(model.parameters()).device.type
