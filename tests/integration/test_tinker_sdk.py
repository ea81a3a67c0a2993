"""The published SDK of Tinker on `meshrl serve tinker`: log-probs, samplers of saved weights, a kill in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.http.tinker.app import PREFIX
from meshrl.launcher.address_book import free_port
from meshrl.rpc import credentials
from meshrl.rpc.credentials import MeshRole
from meshrl.testing import vision
from tests import servers
from tests.chaos.reward_service import Service, serving

CLIENT = Path(__file__).parent / "tinker_client.py"
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "tinker_loop.py"
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:];"
    " runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if kind := getattr(request, "param", ""):
        vision.random_checkpoint(kind, tmp_path / "model")
    else:
        write_tiny_model(tmp_path / "model", seed=0, head_dim=32)
    return tmp_path / "model"


def server_of_adapters() -> dict[str, object]:
    return {
        "python": str(servers.python("vllm")),
        "dtype": "float32",
        "extra_args": list(servers.VLLM_ARGUMENTS),
        "env": servers.environment("vllm"),
        "max_lora_rank": 4,
    }


def of_server(model: Path) -> list[int]:
    """Processes of the server that samples from a model, its guard left out."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = command.read_bytes().split(b"\0")
            if b"vllm.entrypoints.openai.api_server" in words[:6] and bytes(model) in words:
                found.append(int(command.parent.name))
    assert found
    return found


@pytest.fixture
async def service(
    request: pytest.FixtureRequest, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    port = free_port("127.0.0.1")
    recipe = {
        "run": {"name": "tk", "dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "tinker": {"http_port": port},
    }
    if request.node.get_closest_marker("vllm"):
        recipe["rollout"] = {"name": "vllm", "slots": 8, "engine": server_of_adapters()}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    served = Service("tinker", tmp_path / "recipe.yaml", ("--metrics-port", "0"))
    async with serving(served):
        token = credentials.file_of_role(tmp_path / "run", MeshRole.TUNER).read_text().strip()
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TINKER_API_KEY", PREFIX + token)
        yield served


async def client(*arguments: object) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *map(str, arguments), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )


async def ended(process: Process) -> str:
    """Its output, once it has ended well."""
    out, err = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()


async def test_a_loop_of_the_sdk(service: Service, model: Path) -> None:
    await ended(await client(CLIENT, "loop", model))


@pytest.mark.vllm
@pytest.mark.skipif(not servers.is_here("vllm"), reason="no vLLM here: `make venv-vllm`")
async def test_samplers_are_adapters_of_a_server_and_outlive_it(
    service: Service, model: Path
) -> None:
    await ended(await client(CLIENT, "loop", model))
    process = await client(CLIENT, "server", model)
    assert process.stdin is not None and process.stdout is not None
    said = await asyncio.wait_for(process.stdout.readline(), 240)
    assert said == b"kill the server\n", said
    for process_id in of_server(model):
        os.kill(process_id, signal.SIGKILL)
    process.stdin.write(b"killed\n")
    await ended(process)


@pytest.mark.parametrize(
    ("model", "loop"), [("", "killed"), ("Qwen3_5", "pictures")], indirect=["model"]
)
async def test_a_killed_server_repeats_no_step_and_loses_none(
    service: Service, model: Path, loop: str
) -> None:
    process = await client(CLIENT, loop, model)
    assert process.stdin is not None and process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 240) == b"kill it\n"
    await service.kill()
    process.stdin.write(b"killed\n")
    assert await process.stdout.readline() == b"start it\n"
    await service.start()
    await ended(process)


@pytest.mark.vllm
@pytest.mark.skipif(not servers.is_here("vllm"), reason="no vLLM here: `make venv-vllm`")
@pytest.mark.parametrize("model", ["Qwen3VL"], indirect=True)
async def test_what_is_sampled_on_pictures_has_the_log_probs_that_are_learned_from(
    service: Service, model: Path
) -> None:
    await ended(await client(CLIENT, "shown", model))


async def test_the_loop_of_the_page_runs_without_torch(
    service: Service, model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"q={n};r=q+5?", "answer": "1"} for n in range(1, 9)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = await ended(await client("-c", WITHOUT_TORCH, EXAMPLE, model, data, data, 1))
    assert "step 0: held-out 0.0" in printed
