"""Pack what a GPU machine without a network needs, in files of at most 64 MiB that travel one at a time.

    python benchmarks/gpu/kit.py mesh|vllm [--out .gpu] [--work build/gpu-kit]

The machine has torch 2.11.0+cu130, transformers 5.17, cupy 14.2 and Python 3.12, and one Hopper GPU.

- `mesh`: meshrl's wheels, NCCL 2.30.7 (two ranks may share a GPU from 2.30 on), the demo's warm-started model.
- `vllm`: the stock vLLM wheel without the code of other GPUs (`prune_fatbin.py`) and without what a dense or
  mixture model in bfloat16 does not need, and the packages which its server imports and the machine lacks.

Needs pip's index, `strip`, and for `mesh` an environment in which meshrl runs. Prints each part's size.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIMIT_MIB = 64
"""The most that reaches the machine at a time, the checkout included."""
CHECKOUT_MIB = 18
PYTHON = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in range(39, 4, -1)),
    "manylinux2014",
    "manylinux1",
)
"""pip matches these exactly; the machine's C library is 2.39."""
TARGET = (
    "--python-version",
    PYTHON,
    "--implementation",
    "cp",
    *(word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")),
    "--only-binary=:all:",
    "--no-deps",
)
NCCL = "nvidia-nccl-cu13==2.30.7"
VLLM = "vllm==0.32.0"
LIBRARIES = (
    "_C_stable_libtorch.abi3.so",
    "_moe_C_stable_libtorch.abi3.so",
    "cumem_allocator.abi3.so",
    "spinloop.abi3.so",
    "fs_io_C.abi3.so",
    "vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
"""vLLM's libraries that travel; others are imported where they are used, or their absence is a line of the log."""
LEFT_OUT = (
    "vllm-rs",
    "third_party/deep_gemm",
    "third_party/fmha_sm100",
    "third_party/tml_fa4",
    "benchmarks",
)
PACKAGES = (
    "annotated-types==0.8.0",
    "apache-tvm-ffi==0.1.11",
    "blake3",
    "cachetools",
    "cbor2",
    "compressed-tensors==0.17.0",
    "distro",
    "fastapi>=0.133,<0.137",
    "httpcore2",
    "httptools",
    "httpx2",
    "ijson",
    "jiter",
    "jmespath",
    "jsonschema",
    "jsonschema-specifications",
    "llguidance==1.7.6",
    "loguru",
    "model-hosting-container-standards<1",
    "msgspec",
    "openai",
    "oss-harmony==0.0.11",
    "outlines_core==0.2.14",
    "partial-json-parser",
    "prometheus-fastapi-instrumentator>=8",
    "pybase64",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "python-json-logger",
    "python-multipart",
    "pyzmq",
    "referencing",
    "rpds-py",
    "setproctitle",
    "sniffio",
    "starlette>=1,<2",
    "truststore",
    "typing-inspection",
    "uvicorn",
    "watchfiles",
    "xgrammar==0.2.8",
)
"""Packages that vLLM's server imports and the machine lacks, as `make venv-vllm` has them; found by starting it."""
TEST_PACKAGES = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
BUILD_PACKAGES = ("hatchling", "pathspec", "trove-classifiers")


def main() -> None:
    """Build one kit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kit", choices=("mesh", "vllm"))
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu-kit", help="downloads")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    kit = (
        mesh_kit(given.out, given.work) if given.kit == "mesh" else vllm_kit(given.out, given.work)
    )
    mib = sum(file.stat().st_size for file in [kit, *kit.rglob("*")] if file.is_file()) / 2**20
    print(f"{kit}: {mib:.1f} MiB")
    if mib + CHECKOUT_MIB > LIMIT_MIB:
        sys.exit(
            f"error: {kit} and the checkout ({CHECKOUT_MIB} MiB) are more than {LIMIT_MIB} MiB"
        )


def mesh_kit(out: Path, work: Path) -> Path:
    """A folder of wheels, the pruned NCCL and the demo's model."""
    kit = _empty(out / "mesh-kit")
    download(_locked(_requirements(("meshrl", *TEST_PACKAGES))), kit / "wheels")
    library = _nccl(_empty(work / "nccl"))
    with tarfile.open(kit / "nccl.tar.xz", "w:xz") as tar:
        tar.add(library, library.name)
    assets = ROOT / "runs" / "demo" / "assets"
    if not (assets / "model").is_dir():
        # Some 560 supervised steps, a minute of one core: not of the GPU machine's time.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "meshrl.cli", "demo", "--only-prepare"],
            cwd=ROOT,
            env=env,
            check=True,
        )
    with tarfile.open(kit / "assets.tar.xz", "w:xz") as tar:
        for path in (assets / name for name in ("model", "train.jsonl", "held_out.jsonl")):
            tar.add(path, path.relative_to(ROOT))
    return kit


def vllm_kit(out: Path, work: Path) -> Path:
    """One file with a folder `vllm-site`, for a `.pth` file."""
    wheels, site = work / "vllm-wheels", _empty(work / "vllm-site")
    download((VLLM, *PACKAGES), wheels)
    (wheel,) = wheels.glob("vllm-*.whl")
    others = [str(path) for path in wheels.glob("*.whl") if path != wheel]
    _pip("install", *TARGET, "--no-index", "--no-compile", "--target", str(site), *others)
    shutil.unpack_archive(wheel, site, "zip")
    for name in LEFT_OUT:
        path = site / "vllm" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kept = [site / "vllm" / name for name in LIBRARIES]
    for path in (site / "vllm").rglob("*.so"):
        if path not in kept:
            path.unlink()
    _prune(path for path in kept if path.stat().st_size > 1 << 20)
    for path in site.rglob("*.so*"):
        subprocess.run(["strip", "--strip-all", path], check=False)
    for path in site.rglob("__pycache__"):
        shutil.rmtree(path)
    kit = out / "vllm-kit.tar.xz"
    # Similar files lie beside each other: xz looks back 64 MiB.
    files = sorted(
        (path for path in site.rglob("*") if path.is_file()),
        key=lambda path: (path.suffix, path.name),
    )
    with (
        lzma.open(kit, "wb", preset=9 | lzma.PRESET_EXTREME) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for path in files:
            tar.add(path, path.relative_to(work))
    return kit


def download(requirements: Sequence[str], folder: Path) -> None:
    """Fetch wheels for the machine, without what they require."""
    _pip("download", *TARGET, "--dest", str(folder), *requirements)


def _pip(command: str, *arguments: str) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            command,
            "--quiet",
            "--disable-pip-version-check",
            *arguments,
        ],
        check=True,
    )


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _prune(libraries: Iterable[Path]) -> None:
    subprocess.run([sys.executable, HERE / "prune_fatbin.py", *libraries], check=True)


def _nccl(work: Path) -> Path:
    """The stock library, of whose 240 MiB the code for Hopper is 12."""
    download([NCCL], work)
    (wheel,) = work.glob("*.whl")
    shutil.unpack_archive(wheel, work, "zip")
    library = work / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    _prune([library])
    subprocess.run(["strip", "--strip-all", library], check=True)
    return library


def _requirements(roots: Sequence[str]) -> list[str]:
    """The names of `roots`' requirements and theirs, without what a machine with torch has."""
    waiting, known, found = list(roots), {"numpy", *roots}, [*roots[1:], *BUILD_PACKAGES]
    while waiting:
        for text in importlib.metadata.requires(waiting.pop()) or []:
            requirement = Requirement(text)
            name = requirement.name.lower().replace("_", "-")
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and name not in known:
                known.add(name)
                found.append(name)
                waiting.append(name)
    return found


def _locked(names: Iterable[str]) -> list[str]:
    """Each name with the version that CI runs with, where the lock has one."""
    locks = "\n".join(
        (ROOT / ".ci" / name).read_text() for name in ("requirements.lock", "lock-build.txt")
    )
    versions = dict(re.findall(r"^([A-Za-z0-9._-]+)(==[^ ;\\\n]+)", locks, flags=re.MULTILINE))
    pinned = {name.lower().replace("_", "-"): version for name, version in versions.items()}
    return sorted(name + pinned.get(name, "") for name in names)


if __name__ == "__main__":
    main()
