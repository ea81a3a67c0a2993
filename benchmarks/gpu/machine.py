"""This machine as one JSON object: GPUs, driver's view, torch, cupy, NCCL, and what placement would do.

python benchmarks/gpu/machine.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess

import torch

from meshrl.config.machine import this_machines_gpus


def _version(*packages: str) -> str | None:
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "not a checkout"


def main() -> None:
    """Print it."""
    cuda = torch.cuda.is_available()
    found = {
        "gpus": [
            {"id": gpu.id, "name": gpu.name, "gib": round(gpu.memory / 2**30, 1)}
            for gpu in this_machines_gpus()
        ],
        "torch": torch.__version__,
        "torch_sees": torch.cuda.device_count() if cuda else 0,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cupy": _version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "vllm": _version("vllm"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "commit": _commit(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
