"""What a service gets of a machine with GPUs: devices, memory and ports, handed on as environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshrl.contract.errors import ConfigError

DEVICES = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
MEMORY = "MESHRL_GPU_MEMORY_SHARE"
PORTS = "MESHRL_PORTS"
IN_TURNS = "MESHRL_GPU_IN_TURNS"

LOGIT_BYTES = 10
"""In half precision, with two float32 buffers: what the trainer takes uncompiled; compiled it takes 4."""
ROWS_PER_LAID = 2
"""Tokens of a micro-batch's rows, per token that it may lay: attention copies a shared prompt for each row."""
_LOGITS_SHARE = 20
_FEWEST_LOGITS, _MOST_LOGITS = 1 << 25, 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """One service's part."""

    devices: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them; empty: it computes on the CPU."""
    memory: float = 1.0
    """Share of each device's memory that it may take."""
    ports: range = range(0)
    """Ports for the processes that it starts; empty: any."""
    bus_order: bool = True
    """The devices are numbered by their place on the bus; False: as CUDA numbers them for the user."""
    in_turns: bool = False
    """Others take this memory too, while this service sleeps."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What `of` reads again in the service."""
        found = {DEVICES: ",".join(self.devices), MEMORY: f"{self.memory:g}"}
        if self.bus_order:
            found[ORDER] = "PCI_BUS_ID"
        if self.in_turns:
            found[IN_TURNS] = "1"
        if self.ports:
            found[PORTS] = f"{self.ports.start}-{self.ports.stop - 1}"
        return found

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> DeviceShare | None:
        """The share in an environment; None where nobody gave one."""
        if MEMORY not in environment:
            return None
        first, _, last = environment.get(PORTS, "").partition("-")
        return cls(
            devices=tuple(filter(None, environment.get(DEVICES, "").split(","))),
            memory=float(environment[MEMORY]),
            ports=range(int(first), int(last) + 1) if last else range(0),
            bus_order=environment.get(ORDER) == "PCI_BUS_ID",
            in_turns=environment.get(IN_TURNS) == "1",
        )


def chosen_device(
    key: str, asked: str, torch: Any, environment: Mapping[str, str] = os.environ
) -> str:
    """`cpu` or `cuda`: where a service computes.

    Args:
        key: Of the recipe, which `asked` stands at: auto, cpu or cuda.
        asked: Its value.
        torch: The module.
        environment: Of the process.

    Raises:
        ConfigError: CUDA was asked for, or GPUs were given to this service, and torch sees none.
    """
    if asked != "cpu" and torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise ConfigError(f"{key}: cuda, but torch sees no CUDA device; use cpu or auto")
    share = DeviceShare.of(environment)
    if asked == "auto" and share is not None and share.devices:
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
        raise ConfigError(
            f"{key}: auto, GPU {','.join(share.devices)} is this service's, and torch {torch.__version__}, which"
            f" {build}, sees none; install a torch that fits the driver, or set it to cpu"
        )
    return "cpu"


def logits_at_once(memory: int) -> int:
    """How many logits a trainer holds that may take so many bytes of a GPU: a power of two, a 20th of it at most."""
    fits = max(1, memory // _LOGITS_SHARE // LOGIT_BYTES)
    return min(_MOST_LOGITS, max(_FEWEST_LOGITS, 1 << fits.bit_length() - 1))
