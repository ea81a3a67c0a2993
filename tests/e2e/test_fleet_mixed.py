"""A fleet of three kinds of engines: a stock vLLM server under `up`, which SGLang and torch workers join."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from .. import servers
from ..fleet import end, fleet, wait_for, working
from ..mesh import PATIENCE_S, make_mesh

pytestmark = pytest.mark.slow


def server(package: str, *arguments: str) -> dict[str, object]:
    """`rollout.engine` of a real server."""
    return {
        "python": str(servers.python(package)),
        "dtype": "float32",
        "max_model_len": 128,
        "extra_args": list(arguments),
        "env": servers.environment(package),
    }


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not servers.is_here("vllm"), reason="no .venv-vllm: make venv-vllm makes it")
async def test_vllm_torch_and_sglang_sample_one_run(tmp_path: Path) -> None:
    joiners: dict[str, tuple[str, dict[str, object]]] = {"rollout-1": ("torch", {})}
    if servers.is_here("sglang"):
        sglang = server("sglang", *servers.SGLANG_ARGUMENTS, "--max-total-tokens", "4000")
        joiners["rollout-2"] = ("sglang", sglang)
    changes = {
        "rollout": {"name": "vllm", "engine": server("vllm", *servers.VLLM_ARGUMENTS), "slots": 4},
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
        with ExitStack() as stack:
            joined = {}
            for name, (kind, engine) in joiners.items():
                words = fleet(mesh, "add", "--print").split()
                assert words[words.index("--name") + 1] == name
                of_kind = [f"rollout.name={kind}", f"rollout.engine={json.dumps(engine)}"]
                joined[name] = stack.enter_context(mesh.serve(*words[2:4], *of_kind, *words[4:]))
                await wait_for(mesh, process, working(name), f"sampled with {kind}")
            all_of_them = working("rollout-0", *joined)
            await wait_for(mesh, process, all_of_them, "sampled with all")
            mesh.wait_for_step(process, len(mesh.steps()) + 3)
            for name, joiner in joined.items():
                fleet(mesh, "drain", name)
                assert joiner.wait(PATIENCE_S) == 0
        await end(mesh, process)
    # vLLM has sampled with weights that it was sent while it served.
    assert int(mesh.steps()[-1]["policy_version"].removeprefix("1.")) > 3
    # Scored again by the trainer's own forward pass: either engine sampled with the trainer's weights.
    assert max(line["mismatch/logprob_abs_max"] for line in mesh.steps()) < 1e-3
