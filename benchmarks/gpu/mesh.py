"""The demo's mesh on this machine's GPUs, in bfloat16, over one carrier of weights; what its metrics say.

    python benchmarks/gpu/mesh.py shm|cuda_ipc|nccl [--steps 20] [--on-policy] [--vllm PYTHON] [--rehearse]

`--on-policy`: every row is sampled by the weights that it trains, so the mismatch is that of the arithmetic alone.
`--vllm`: a vLLM server of that environment samples, instead of the embedded engine. On one GPU the services share it,
and `nccl` puts both ranks on it, which NCCL permits from 2.30 on. `--rehearse` takes three steps, with stand-ins for
NCCL and CUDA IPC, on a CPU in float32, or on the GPU that `stand_in/` plays. The last line is one JSON object: the
mismatch between what sampled and what trained, tokens a second, and whether the ledger balances.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from meshrl.config.machine import this_machines_gpus

CHECKOUT = Path(__file__).resolve().parents[2]
STUBS = {
    "shm": (),
    "nccl": ("weights.nccl.library=tests.doubles.nccl",),
    "cuda_ipc": ("weights.ipc.library=tests.doubles.device",),
}
VLLM_CACHE_BYTES = 4 << 30
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
    parser.add_argument("--on-policy", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of vLLM's environment")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    engine = "vllm" if given.vllm else "torch"
    gpu = bool(this_machines_gpus())
    name = f"gpu-{given.carrier.replace('_', '-')}-{engine}"
    shutil.rmtree(Path("runs", name), ignore_errors=True)
    overrides = [
        f"run.name={name}",
        f"weights.carrier={given.carrier}",
        f"trainer.total_training_steps={3 if given.rehearse else given.steps}",
        # An evaluation before the first step takes half a minute of a GPU machine.
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *((*STUBS[given.carrier], "data.train_batch_size=8") if given.rehearse else ()),
        *(("placement.colocate=true",) if gpu else ()),
        *(ONE_GPU if gpu and given.carrier == "nccl" else ()),
        *(("queue.max_staleness=0", "rollout.on_update=drain") if given.on_policy else ()),
        *(_vllm(given.vllm) if given.vllm else ()),
    ]
    command = [sys.executable, "-m", "meshrl.cli", "demo", "--plain", *overrides]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)} if given.rehearse else None
    code = subprocess.run(command, env=environment, check=False).returncode
    found = {"code": code, "seconds": round(time.monotonic() - began, 1), **read(name)}
    print(json.dumps({"benchmark": "mesh", "carrier": given.carrier, "engine": engine, **found}))
    sys.exit(code)


def _vllm(python: str) -> list[str]:
    # Bytes of cache, not a share of the GPU: vLLM ends where others give memory back while it measures.
    arguments = ["--enforce-eager", "--kv-cache-memory-bytes", str(VLLM_CACHE_BYTES)]
    return [
        "rollout.name=vllm",
        "rollout.workers=1",
        "rollout.deterministic=false",
        f"rollout.engine.python={python}",
        f"rollout.engine.extra_args={json.dumps(arguments)}",
    ]


def read(name: str) -> dict[str, Any]:
    """The figures in the run's files."""
    directory = Path("runs", name)
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    steps = [row for row in map(json.loads, lines) if "time/step_s" in row]
    finished = directory / "finished.json"
    balanced = json.loads(finished.read_text())["balanced"] if finished.is_file() else None
    wanted = ("mismatch/", "time/", "throughput/", "staleness/", "memory/")
    keys = sorted(
        {key for row in steps for key in row if key.startswith(wanted) and key.count("/") == 1}
    )
    means = {
        key: round(mean(values), 5)
        for key in keys
        if (values := [row[key] for row in steps if isinstance(row.get(key), int | float)])
    }
    return {"steps": len(steps), "balanced": balanced, **means}


if __name__ == "__main__":
    main()
