"""The GPUs of a machine, asked of the driver's management library: no torch, no CUDA context, no program started."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96
GIB = 1 << 30
NO_GPU = "no GPU"
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""As PCI numbers the maker, and the classes of its GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device."""

    id: str
    """As CUDA_VISIBLE_DEVICES names it."""
    name: str = ""
    memory: int = 0
    """In bytes; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine."""

    name: str
    gpus: tuple[Gpu, ...]
    bus_order: bool = True
    """The ids count by place on the bus; False: they are those of the user's CUDA_VISIBLE_DEVICES."""


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpus_of(environment: Mapping[str, str], library: Any | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would see with this environment.

    Args:
        environment: Its CUDA_VISIBLE_DEVICES is obeyed: numbers, or beginnings of UUIDs. As CUDA does, what stands
            behind an unknown one does not count.
        library: NVIDIA's management library (NVML), loaded; None where there is none.
    """
    present = _present(library)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpu for gpu, _ in present)
    found: list[Gpu] = []
    for word in filter(None, map(str.strip, visible.split(","))):
        if word.isdigit():
            match = next((gpu for gpu, _ in present if gpu.id == word), None)
        else:
            # A slice of a GPU (MIG) has a UUID of its own, whose memory is not asked for.
            slice_of_one = Gpu(id=word) if word.startswith("MIG-") and present else None
            match = next((g for g, uuid in present if uuid.startswith(word)), slice_of_one)
        if match is None:
            break
        found.append(Gpu(id=word, name=match.name, memory=match.memory))
    return tuple(found)


def _present(library: Any | None) -> list[tuple[Gpu, str]]:
    """Every GPU of the machine with its UUID, by place on the bus."""
    if library is not None and library.nvmlInit_v2() == 0:
        try:
            count = ctypes.c_uint()
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
            return [_asked(library, index) for index in range(count.value)]
        finally:
            library.nvmlShutdown()
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    return [(Gpu(id=str(index)), "") for index in range(len(nodes))]


def _asked(library: Any, index: int) -> tuple[Gpu, str]:
    device, memory = ctypes.c_void_p(), _Memory()
    name, uuid = (ctypes.create_string_buffer(NAME_BYTES) for _ in range(2))
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
        library.nvmlDeviceGetName(device, name, NAME_BYTES)
        library.nvmlDeviceGetUUID(device, uuid, NAME_BYTES)
        library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    shown = name.value.decode(errors="replace")
    return Gpu(id=str(index), name=shown, memory=memory.total), uuid.value.decode()


def on_the_bus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """How many GPUs of NVIDIA the kernel has found, with a driver or without one."""
    found = 0
    for device in devices.glob("*"):
        try:
            maker, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += maker == _NVIDIA and kind.startswith(_DISPLAYS)
    return found


def this_machines_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA would see in this process."""
    return _gpus_with(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _gpus_with(visible: str | None) -> tuple[Gpu, ...]:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        library = None
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return gpus_of(environment, library)
