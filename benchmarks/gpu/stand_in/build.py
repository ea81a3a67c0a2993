"""Builds a stand-in for a GPU, beside one environment with torch: `python build.py SITE_PACKAGES OUT`.

Then `source OUT/env.sh`: what Python starts from that shell sees one NVIDIA H100. The parts are

    libcudart.so.13         runtime.c, kernels.c     preloaded, so before the one of torch's wheels
    libcuda.so.1            driver.c, memory.c, fat_binary.c
    libnvidia-ml.so.1       nvml.c
    libstand-in-names.so    cuBLAS, cuDNN, NCCL and so on: every name that torch wants of them returns 0
    python/                 stand_in_torch.py: torch's operations there are computed by the CPU

Memory of the device is memory of the process, copies copy, torch's own operations compute. Kernels of Triton, of
extensions and of flash attention do nothing, so most values are zeros, and no number that a rehearsal prints means
anything.

It proves, on a machine without a GPU: that the host's code runs where `torch.cuda.is_available()`: imports, shapes,
how much is allocated (FAKE_GPU_GIB), the capture of CUDA graphs, Triton's and Inductor's compilers for sm_90,
servers, processes that open each other's memory (FAKE_GPU_SHARE=1), and that every kernel of a pruned library that
is launched has code for sm_90: one without fails as on the GPU, and is named on stderr and in the file
FAKE_GPU_REPORT. FAKE_GPU_LAUNCHES=1 names every kernel.

It does not prove: numbers, speed, order (all work is done when it is asked for, so no synchronisation can be
missing), that the driver takes a library, NCCL between processes, a limit of memory that processes share. cupy has
its own runtime inside and sees no GPU here.

It wants gcc, binutils and CUDA 13's headers, as the wheels of torch and Triton bring them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = "libstand-in-names.so"
GROUPS = r"(cublasLt|cublas|cudnn|cusparseLt|cusparse|cusolver|cufft|nccl|cuFile)[A-Z]"
"""Prefixes of the functions that torch's libraries leave to those of other wheels."""

NEW_HANDLE = "*handle = (void *)4096; return 0;"
ANSWERS = {
    **{
        name: f"int {name}(void **handle) {{ {NEW_HANDLE} }}"
        for name in (
            "cublasCreate_v2",
            "cublasLtCreate",
            "cudnnCreate",
            "cusparseCreate",
            "cusolverDnCreate",
            "ncclCommInitRank",
            "ncclCommInitRankConfig",
        )
    },
    **{
        name: f'const char *{name}(void) {{ return "the stand-in has no errors"; }}'
        for name in ("cudnnGetErrorString", "ncclGetErrorString", "ncclGetLastError")
    },
    # Too old for attention, whose plans would be wanted; as torch was built where it asks for that.
    "cudnnGetVersion": "long cudnnGetVersion(void) { return 80000; }",
    "cudnnGetProperty": (
        "int cudnnGetProperty(int which, int *value)"
        " { *value = which == 0 ? 9 : which == 1 ? 19 : 0; return 0; }"
    ),
    "cudnnGetCudartVersion": "long cudnnGetCudartVersion(void) { return 13000; }",
    "ncclGetVersion": "int ncclGetVersion(int *value) { *value = 22809; return 0; }",
    "ncclCommGetAsyncError": (
        "int ncclCommGetAsyncError(void *comm, int *error) { *error = 0; return 0; }"
    ),
    "cublasLtMatmulAlgoGetHeuristic": (
        "int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f,"
        " void *g, int wanted, char *result, int *found)"
        " { for (int i = 0; i < 256; i++) result[i] = 0; *found = 1; return 0; }"
    ),
}
"""The functions whose 0 alone would not do."""

ABSENT = (
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMulticastCreate",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastUnbind",
    "cuMulticastGetGranularity",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
    "cuCtxFromGreenCtx",
    "cuCtxPushCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent",
    "cuCtxPopCurrent_v2",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGetDevResource",
)
"""Functions of the driver that extensions are linked with, and that answer CUDA_ERROR_NOT_SUPPORTED."""


def wanted_names(site: Path) -> set[str]:
    """Functions of the maths libraries, cuDNN and NCCL that torch's libraries ask for."""
    found: set[str] = set()
    for library in sorted(site.glob("torch/lib/libtorch*.so")):
        command = ["readelf", "-W", "--dyn-syms", str(library)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for fields in map(str.split, listed.splitlines()):
            if len(fields) >= 8 and fields[6] == "UND" and re.match(GROUPS, fields[7]):
                found.add(fields[7].partition("@")[0])
    return found


def include_folders(site: Path) -> list[Path]:
    """Folders of CUDA 13's headers; the second is Triton's, which has those that the first includes.

    Raises:
        SystemExit: they are not there.
    """
    folders = [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]
    for folder, header in zip(folders, ("cuda_runtime_api.h", "crt/host_defines.h"), strict=True):
        if not (folder / header).is_file():
            sys.exit(
                f"error: {site} has no {(folder / header).relative_to(site)}: the stand-in is built"
                " beside torch for CUDA 13 and its Triton (pip install torch==2.11.0)"
            )
    return folders


def build(site: Path, out: Path) -> Path:
    """Compile the four libraries into `out`; returns the script that a shell sources to use them."""
    includes = [f"-I{folder}" for folder in include_folders(site)]
    out.mkdir(parents=True, exist_ok=True)
    names = wanted_names(site) | set(ANSWERS)
    generated = out / "names.c"
    generated.write_text(
        "".join(ANSWERS.get(name, f"int {name}() {{ return 0; }}") + "\n" for name in sorted(names))
    )
    absent = out / "absent.c"
    absent.write_text("".join(f"int {name}() {{ return 801; }}\n" for name in ABSENT))
    versions = out / "versions.map"
    versions.write_text("libcudart.so.13 { global: cuda*; __cuda*; local: *; };\n")

    def link(name: str, *parts: str | Path) -> None:
        command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-fvisibility=hidden", *includes]
        command += ["-o", str(out / name), f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", f"-L{out}"]
        subprocess.run([*command, *map(str, parts), "-ldl", "-lpthread"], check=True)

    def source(*names: str) -> list[Path]:
        return [HERE / name for name in names]

    shown = "-fvisibility=default"
    link("libcuda.so.1", shown, *source("driver.c", "memory.c", "fat_binary.c"), absent)
    link(
        "libcudart.so.13",
        *source("runtime.c", "kernels.c"),
        "-l:libcuda.so.1",
        f"-Wl,--version-script={versions}",
    )
    link("libnvidia-ml.so.1", *source("nvml.c", "memory.c"))
    link(NAMES, shown, generated)
    environment = out / "env.sh"
    here = out.resolve()
    environment.write_text(
        f"export LD_PRELOAD={here}/libcudart.so.13:{here}/{NAMES}${{LD_PRELOAD:+:$LD_PRELOAD}}\n"
        f"export LD_LIBRARY_PATH={here}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\n"
        f"export TRITON_LIBCUDA_PATH={here} TORCH_CUDNN_SDPA_ENABLED=0\n"
        # Services start with -E: no variable of Python counts there.
        f"export STAND_IN_PYTHON={HERE / 'python'}\n"
        # What a kernel should have written is zero then, and not what another tensor has left.
        "export PYTORCH_NO_CUDA_MEMORY_CACHING=1\n"
        # A cache of 79 GiB is addresses only, but what is touched is this machine's memory.
        "export FAKE_GPU_GIB=${FAKE_GPU_GIB:-4}\n"
    )
    return environment


def main() -> None:
    """Build, and say what to source."""
    if len(sys.argv) != 3:
        sys.exit("error: want two arguments: SITE_PACKAGES (of the environment with torch) OUT")
    print(f"source {build(Path(sys.argv[1]), Path(sys.argv[2]))}")


if __name__ == "__main__":
    main()
