"""Options of the carrier `cuda_ipc`. Imports no cupy."""

from __future__ import annotations

from pydantic import NonNegativeInt

from meshrl.contract.config import Config


class IpcConfig(Config):
    """The GPU that trainer and rollout process share."""

    library: str = "cupy"
    """A module of `meshrl.weights.ipc.devices` (cupy; stub, without a GPU), or a dotted path."""
    device: NonNegativeInt = 0
    """The trainer's CUDA device, of those that it sees; a rollout process finds the same GPU by its PCI address."""
