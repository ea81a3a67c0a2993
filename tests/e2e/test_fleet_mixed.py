"""A fleet of two kinds of engines: a stock vLLM server under `up`, and a torch worker that joins it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..fleet import end, fleet, wait_for, working
from ..mesh import PATIENCE_S, make_mesh

pytestmark = pytest.mark.slow

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: make venv-vllm makes it")
async def test_vllm_and_torch_sample_one_run(tmp_path: Path) -> None:
    vllm = {
        "python": str(PYTHON),
        "dtype": "float32",
        "max_model_len": 128,
        # A start in seconds, and no half of the machine's memory for the cache.
        "extra_args": ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)],
    }
    changes = {
        "rollout": {"name": "vllm", "engine": vllm, "slots": 4},
        # Steps so small that every version says the same: what differs then is the engines.
        "actor": {"optim": {"lr": 1e-12}, "use_kl_loss": False},
        "queue": {"max_staleness": 4, "lease_ttl_s": 30},
        "trainer": {"total_training_steps": 100_000, "save_freq": 1_000, "test_freq": -1},
        "data": {"val_files": []},
    }
    mesh = make_mesh(tmp_path, changes, head_dim=32)
    with mesh.up() as process:
        # vLLM first: beside a run that trains it would take minutes to start.
        mesh.wait_for_step(process, 1)
        words = fleet(mesh, "add", "--print").split()
        torch = ["rollout.name=torch", "rollout.engine={}"]
        with mesh.serve(*words[2:4], *torch, *words[4:]) as joiner:
            both = working("rollout-0", "rollout-1")
            await wait_for(mesh, process, both, "sampled with both")
            mesh.wait_for_step(process, len(mesh.steps()) + 3)
            fleet(mesh, "drain", "rollout-1")
            assert joiner.wait(PATIENCE_S) == 0
        await end(mesh, process)
    # vLLM has sampled with weights that it was sent while it served.
    assert int(mesh.steps()[-1]["policy_version"].removeprefix("1.")) > 3
    # Scored again by the trainer's own forward pass: either engine sampled with the trainer's weights.
    assert max(line["mismatch/logprob_abs_max"] for line in mesh.steps()) < 1e-3
