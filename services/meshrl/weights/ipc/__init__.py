"""The port of a device whose memory another process can open. Its calls block: a worker thread makes them."""

from __future__ import annotations

from typing import Protocol

from meshrl.common.plugins import load
from meshrl.config.weights import IpcConfig
from meshrl.contract.types import Uint8

DEVICES = "meshrl.weights.ipc.devices"


class Device(Protocol):
    """One GPU, seen from one process. Pointers are plain numbers. Whatever fails raises RuntimeError."""

    gpu: str
    """The same in every process that sees this GPU."""

    def allocate(self, nbytes: int) -> int:
        """New device memory."""
        ...

    def export(self, pointer: int) -> bytes:
        """The handle by which another process opens what `allocate` gave."""
        ...

    def write(self, pointer: int, host: Uint8) -> None:
        """Copy from host memory; the bytes are there on return."""
        ...

    def free(self, pointer: int) -> None:
        """Free memory; no process may have it open."""
        ...

    def open(self, handle: bytes) -> int:
        """Open memory of another process. Open it once, and close it."""
        ...

    def read(self, pointer: int, host: Uint8) -> None:
        """Copy to host memory; the bytes are there on return."""
        ...

    def close(self, pointer: int) -> None:
        """Undo `open`."""
        ...


def load_device(config: IpcConfig, gpu: str | None = None) -> Device:
    """The trainer's device, or the one with the PCI address that the trainer sent.

    Raises:
        ConfigError: there is none, this process does not see that one, or there is no such library.
    """
    device: Device = load(DEVICES, config.library, "open_device")(config, gpu)
    return device
