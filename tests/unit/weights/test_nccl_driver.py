"""Errors of a rank's process when the GPU's driver is missing, or a device is not seen; cupy is a stand-in."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshrl.contract.errors import ConfigError

MODULE = "meshrl.weights.nccl.libraries.cupy"


class CUDARuntimeError(RuntimeError):
    """The error that cupy raises."""


def library(monkeypatch: pytest.MonkeyPatch, count: Any) -> Any:
    """The library, on a cupy that sees so many devices."""
    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=CUDARuntimeError)
    nccl = ModuleType("cupy.cuda.nccl")
    nccl.get_version = lambda: 23007  # type: ignore[attr-defined]
    cuda = ModuleType("cupy.cuda")
    cuda.nccl, cuda.runtime = nccl, runtime  # type: ignore[attr-defined]
    cupy = ModuleType("cupy")
    cupy.cuda = cuda  # type: ignore[attr-defined]
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    found = importlib.import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    return found


def test_a_missing_driver_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> int:
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    with pytest.raises(ConfigError, match=r"no CUDA device .*cudaErrorNoDevice") as raised:
        library(monkeypatch, no_driver).Library(0)
    assert "\n" not in str(raised.value)


def test_a_device_that_is_not_seen_is_named_beside_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="device 2 is asked for, and this process sees 1 devices"):
        library(monkeypatch, lambda: 1).Library(2)


@pytest.mark.parametrize("preloaded", [True, False])
def test_torch_and_cupy_use_one_libnccl_which_ld_preload_can_name(
    monkeypatch: pytest.MonkeyPatch, preloaded: bool
) -> None:
    found = library(monkeypatch, lambda: 1)
    monkeypatch.setattr(found, "loaded_nccl", lambda maps: {"/a/libnccl.so.2", "/b/libnccl.so.2"})
    names = SimpleNamespace(ncclGetVersion=None) if preloaded else SimpleNamespace()
    monkeypatch.setattr(found.ctypes, "CDLL", lambda name: names)
    if preloaded:  # torch maps its own all the same, and uses the other
        assert found.Library(0).version == "2.30.7"
        return
    with pytest.raises(ConfigError, match=r"different files of NCCL \(/a/\S+, /b/\S+\)"):
        found.Library(0)
