"""The demo's mesh on this machine's GPUs, in bfloat16, over one carrier of weights; what its metrics say.

    python benchmarks/gpu/mesh.py shm|cuda_ipc|nccl [--steps 20] [--rehearse]

On one GPU the services share it, and `nccl` puts both ranks on it, which NCCL permits from 2.30 on. `--rehearse` runs
on a CPU, in float32, with stand-ins for NCCL and CUDA IPC. The last line is one JSON object: the mismatch between
what sampled and what trained, tokens a second, and whether the ledger balances.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

STUBS = {
    "shm": (),
    "nccl": ("weights.nccl.library=meshrl.testing.libraries.stub",),
    "cuda_ipc": ("weights.ipc.library=meshrl.testing.devices.stub",),
}
ONE_GPU = (
    "rollout.workers=1",  # two ranks are as many as share a GPU
    "weights.nccl.env.NCCL_MULTI_RANK_GPU_ENABLE=1",
    "weights.nccl.env.NCCL_MAX_CTAS=8",
)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("carrier", choices=STUBS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    name = f"gpu-{given.carrier.replace('_', '-')}"
    overrides = [
        f"run.name={name}",
        f"weights.carrier={given.carrier}",
        f"trainer.total_training_steps={3 if given.rehearse else given.steps}",
        "trainer.test_freq=-1",
        *(STUBS[given.carrier] if given.rehearse else ("placement.colocate=true",)),
        *(ONE_GPU if given.carrier == "nccl" and not given.rehearse else ()),
    ]
    command = [sys.executable, "-m", "meshrl.cli", "demo", "--plain", *overrides]
    code = subprocess.run(command, check=False).returncode
    print(json.dumps({"benchmark": "mesh", "carrier": given.carrier, "code": code, **read(name)}))
    sys.exit(code)


def read(name: str) -> dict[str, Any]:
    """What the run's files say."""
    directory = Path("runs", name)
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    steps = [row for row in map(json.loads, lines) if "time/step_s" in row]
    finished = directory / "finished.json"
    balanced = json.loads(finished.read_text())["balanced"] if finished.is_file() else None
    keys = sorted(
        {key for row in steps for key in row if key.startswith("mismatch/") and key.count("/") == 1}
        | {"throughput/tokens_per_s", "time/publishing_s", "memory/peak_gib"}
    )
    means = {
        key: round(mean(values), 5)
        for key in keys
        if (values := [row[key] for row in steps if isinstance(row.get(key), int | float)])
    }
    return {"steps": len(steps), "balanced": balanced, **means}


if __name__ == "__main__":
    main()
