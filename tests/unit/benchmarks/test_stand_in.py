"""`benchmarks/gpu/stand_in`: memory and code of the stand-in for a GPU. Needs gcc, but no CUDA."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .fat_library import GPU, MACHINE_CODE, PTX, Entry, fat_binary, script

SOURCES = ("memory.c", "fat_binary.c", "nvml.c")
ON_DEVICE, ON_HOST = 0, 1
MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or not sys.platform.startswith("linux"),
    reason="the stand-in is compiled by gcc, for Linux",
)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sources that need no CUDA header, as one library."""
    path = tmp_path_factory.mktemp("stand_in") / "stand_in.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(path)]
    sources = [str(GPU / "stand_in" / name) for name in SOURCES]
    subprocess.run([*command, *sources, "-lpthread"], check=True)
    return path


def loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("gpu_memory_take", "gpu_memory_open", "gpu_memory_reserve"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("gpu_memory_total", "gpu_memory_used"):
        getattr(library, name).restype = ctypes.c_size_t
    return library


def take(gpu: ctypes.CDLL, size: int, place: int = ON_DEVICE) -> int | None:
    found: int | None = gpu.gpu_memory_take(place, ctypes.c_size_t(size))
    return found


def give(gpu: ctypes.CDLL, start: int) -> None:
    gpu.gpu_memory_give(ctypes.c_void_p(start))


def test_there_is_as_much_memory_as_is_said_and_what_is_given_back_can_be_taken_again(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPU_GIB", "0.0625")
    gpu = loaded(compiled)
    assert gpu.gpu_memory_total() == 64 * MIB
    before = gpu.gpu_memory_used()
    assert take(gpu, 65 * MIB) is None
    first = take(gpu, 48 * MIB)
    assert first is not None and gpu.gpu_memory_used() == before + 48 * MIB
    assert take(gpu, 17 * MIB) is None
    host = take(gpu, 128 * MIB, ON_HOST)
    assert host is not None, "the host's memory is not the device's"
    assert gpu.gpu_memory_is(ON_DEVICE, ctypes.c_void_p(first))
    assert not gpu.gpu_memory_is(ON_DEVICE, ctypes.c_void_p(host))
    give(gpu, first)
    give(gpu, host)
    assert gpu.gpu_memory_used() == before
    again = take(gpu, 64 * MIB)
    assert again is not None
    give(gpu, again)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_zero_at_first_and_takes_values_and_zeros(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    if shared:
        monkeypatch.setenv("FAKE_GPU_SHARE", "1")
    gpu = loaded(compiled)
    start, size = take(gpu, 4 * MIB), ctypes.c_size_t(3 * MIB)
    assert start is not None
    content = (ctypes.c_ubyte * (4 * MIB)).from_address(start)
    assert not any(content)
    inside = ctypes.c_void_p(start + 5)
    gpu.gpu_memory_fill(inside, 7, size)
    assert bytes(content[:6]) == bytes(5) + b"\7" and content[3 * MIB + 4 : 3 * MIB + 6] == [7, 0]
    gpu.gpu_memory_fill(ctypes.c_void_p(start + 6), 0, size)
    assert bytes(content[:7]) == bytes(5) + b"\7\0" and not any(content[6:])
    give(gpu, start)


def test_another_process_opens_shared_memory_by_its_name_and_writes_into_it(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = loaded(compiled)
    name = ctypes.create_string_buffer(64)
    alone = take(gpu, MIB)
    assert alone is not None
    assert gpu.gpu_memory_share(ctypes.c_void_p(alone), name, 64) == -1, "it was not to be shared"
    give(gpu, alone)
    monkeypatch.setenv("FAKE_GPU_SHARE", "1")
    start = take(gpu, 2 * MIB)
    assert start is not None
    assert gpu.gpu_memory_share(ctypes.c_void_p(start + 9), name, 64) == 0
    program = """
import ctypes, sys
gpu = ctypes.CDLL(sys.argv[1])
gpu.gpu_memory_open.restype = ctypes.c_void_p
gpu.gpu_memory_used.restype = ctypes.c_size_t
assert gpu.gpu_memory_open(b"/proc/self/fd/999") is None
at = gpu.gpu_memory_open(sys.argv[2].encode())
assert gpu.gpu_memory_is(0, ctypes.c_void_p(at)) and gpu.gpu_memory_used() == 0
ctypes.memmove(at, b"from another process", 20)
"""
    words = [sys.executable, "-c", program, str(compiled), name.value.decode()]
    subprocess.run(words, check=True, timeout=120)
    assert ctypes.string_at(start, 20) == b"from another process"
    give(gpu, start)


def test_reserved_addresses_have_memory_while_it_is_mapped(compiled: Path) -> None:
    gpu = loaded(compiled)
    size = ctypes.c_size_t(2 * MIB)
    start = gpu.gpu_memory_reserve(size)
    assert start and gpu.gpu_memory_is(ON_DEVICE, ctypes.c_void_p(start))
    assert gpu.gpu_memory_map(ctypes.c_void_p(start), size, 1) == 0
    ctypes.memmove(start, b"here", 4)
    assert gpu.gpu_memory_map(ctypes.c_void_p(start), size, 0) == 0
    assert gpu.gpu_memory_map(ctypes.c_void_p(start), size, 1) == 0
    assert ctypes.string_at(start, 4) == bytes(4), "what was unmapped is gone"


OWN, OLD = Entry(MACHINE_CODE, 90, b"code" * 9), Entry(MACHINE_CODE, 80, b"code" * 7)
WIPED = Entry(MACHINE_CODE, 90, bytes(96))


@pytest.mark.parametrize(
    ("image", "code"),
    [
        (fat_binary(OLD, OWN), 2),
        (fat_binary(Entry(PTX, 80, b"text"), OLD), 1),
        (fat_binary(Entry(PTX, 100, b"text"), OLD), 0),
        (fat_binary(OLD, Entry(MACHINE_CODE, 100, b"code")), 0),
        (fat_binary(WIPED, OLD), 0),
        (fat_binary(), 0),
        (b"\x7fELF, a cubin", 2),
    ],
)
def test_it_finds_whether_a_fat_binary_has_code_for_it(
    compiled: Path, image: bytes, code: int
) -> None:
    assert loaded(compiled).gpu_code_in(image) == code


def test_what_is_missing_is_said_on_stderr_and_in_the_file_of_all_processes(
    compiled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_GPU_REPORT", str(tmp_path / "report"))
    for name in (b"kernel_a", b"k" * 2000):
        loaded(compiled).gpu_report(b"NO CODE for sm_90", name)
    first, second = (tmp_path / "report").read_text().splitlines()
    assert first == "stand-in GPU: NO CODE for sm_90: kernel_a" and second.endswith("kkk")
    assert capfd.readouterr().err.splitlines() == [first, second]


def test_nvml_tells_of_one_gpu(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPU_GIB", "3")
    nvml = loaded(compiled)
    count, handle, name = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(96)
    memory = (ctypes.c_ulonglong * 3)()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value == 1
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
    assert nvml.nvmlDeviceGetUUID(handle, name, 96) == 0
    assert name.value == b"GPU-66616b65-2d67-7075-2d30-303030303031"
    assert nvml.nvmlDeviceGetMemoryInfo(handle, memory) == 0 and memory[0] == 3 << 30


def test_torch_is_changed_when_it_is_imported_also_where_somebody_looked_for_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("loaded = True")
    site = script("stand_in/python/stand_in_torch.py")
    changed: list[object] = []
    monkeypatch.setattr(site, "replace_operations", changed.append)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [site.AfterTorch(), *sys.meta_path])
    try:
        assert importlib.util.find_spec("torch") is not None and not changed
        torch = importlib.import_module("torch")
        assert torch.loaded and changed == [torch]
        assert not any(isinstance(finder, site.AfterTorch) for finder in sys.meta_path)
    finally:
        sys.modules.pop("torch", None)


def test_a_process_that_no_variable_of_python_counts_for_has_it_too(tmp_path: Path) -> None:
    """Services of a mesh start with -E: a GPU that PYTHONPATH told them of computed nothing in them."""
    day = (GPU / "day.sh").read_text()
    function = day[day.index("environment() {") : day.index("# unpack")]
    subprocess.run(
        ["bash", "-ec", f'{function}\nenvironment "$1"', "-", str(tmp_path / "venv")],
        env={**os.environ, "base": sys.executable, "STAND_IN_PYTHON": str(GPU / "stand_in/python")},
        check=True,
    )
    shown = "import sys; print('stand_in_torch' in sys.modules)"
    command = [str(tmp_path / "venv/bin/python"), "-E", "-P", "-c", shown]
    assert subprocess.check_output(command, text=True) == "True\n"


def test_an_environment_without_the_headers_of_cuda_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no nvidia/cu13/include/cuda_runtime_api.h: "):
        script("stand_in/build.py").build(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
