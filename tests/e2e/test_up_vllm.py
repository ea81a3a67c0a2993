"""The same recipe with a stock vLLM server in the torch engine's place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ..mesh import make_mesh

pytestmark = pytest.mark.slow

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: make venv-vllm makes it")
def test_a_run_samples_with_vllm_and_updates_its_weights(tmp_path: Path) -> None:
    engine = {
        "python": str(PYTHON),
        "dtype": "float32",
        "max_model_len": 128,
        # A start in seconds, and no half of the machine's memory for the cache.
        "extra_args": ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)],
    }
    changes = {
        "rollout": {"name": "vllm", "engine": engine},
        "queue": {"max_staleness": 1, "lease_ttl_s": 30},
    }
    mesh = make_mesh(tmp_path, changes, head_dim=32)
    mesh.run()
    ledger = asyncio.run(mesh.ledger())
    assert ledger.balanced and ledger.trained == 4 * 16
    assert mesh.steps()[-1]["policy_version"] == "1.4"
    # Sampled by vLLM, scored again by the trainer's own forward pass: the very same weights answered.
    assert mesh.steps()[0]["mismatch/logprob_abs_max"] < 1e-3
