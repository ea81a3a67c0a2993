"""CUDA's own calls through cupy, API 14.2: cudaMalloc, cudaIpcGetMemHandle, cudaIpcOpenMemHandle.

Memory is cudaMalloc's and none of torch's allocator, whose blocks are parts of larger ones, and with
`expandable_segments:True` cannot be exported at all. The device is the calling thread's: each call sets it first.
"""

from __future__ import annotations

from typing import Any

import cupy.cuda.runtime

from meshrl.config.weights import IpcConfig
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Uint8

REQUIRES = ("cupy",)
runtime: Any = cupy.cuda.runtime


def open_device(config: IpcConfig, gpu: str | None) -> CudaDevice:
    """The first device, or the one with this PCI address. Raises ConfigError."""
    try:
        if not runtime.getDeviceCount():
            raise ConfigError("weights.carrier=cuda_ipc: this process sees no CUDA device")
        return CudaDevice(0 if gpu is None else runtime.deviceGetByPCIBusId(gpu))
    except runtime.CUDARuntimeError as error:
        wanted = f"GPU {gpu}, the trainer's," if gpu else "a CUDA device"
        raise ConfigError(
            f"weights.carrier=cuda_ipc: {wanted} is not seen here: {error}"
        ) from error


class CudaDevice:
    """A Device. cupy's CUDARuntimeError is a RuntimeError."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self.gpu: str = runtime.deviceGetPCIBusId(ordinal)

    def allocate(self, nbytes: int) -> int:
        """Calls cudaMalloc."""
        runtime.setDevice(self._ordinal)
        return int(runtime.malloc(nbytes))

    def export(self, pointer: int) -> bytes:
        """Calls cudaIpcGetMemHandle."""
        runtime.setDevice(self._ordinal)
        return bytes(runtime.ipcGetMemHandle(pointer))

    def write(self, pointer: int, host: Uint8) -> None:
        """Calls cudaMemcpy and waits for the device: from pageable memory cudaMemcpy may return before the copy."""
        runtime.setDevice(self._ordinal)
        runtime.memcpy(pointer, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice)
        runtime.streamSynchronize(0)

    def free(self, pointer: int) -> None:
        """Calls cudaFree."""
        runtime.setDevice(self._ordinal)
        runtime.free(pointer)

    def open(self, handle: bytes) -> int:
        """Calls cudaIpcOpenMemHandle."""
        runtime.setDevice(self._ordinal)
        return int(runtime.ipcOpenMemHandle(handle))

    def read(self, pointer: int, host: Uint8) -> None:
        """Calls cudaMemcpy, which to host memory returns when the bytes are there."""
        runtime.setDevice(self._ordinal)
        runtime.memcpy(host.ctypes.data, pointer, host.nbytes, runtime.memcpyDeviceToHost)

    def close(self, pointer: int) -> None:
        """Calls cudaIpcCloseMemHandle."""
        runtime.setDevice(self._ordinal)
        runtime.ipcCloseMemHandle(pointer)
