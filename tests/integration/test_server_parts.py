"""Parts of the server engines that need no server: files, processes, version spans, errors in logs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.contract.errors import InfraError, UserError
from meshrl.contract.types import Version
from meshrl.rollout.engines import sglang
from meshrl.rollout.server_engine.checkpoint import check_version, read_checkpoint, write_version
from meshrl.rollout.server_engine.managed_server import ManagedServer, ServerProcess, last_error
from meshrl.rollout.server_engine.response import Chunk, ResponseReader
from meshrl.rollout.server_engine.staging import PREFIX, Staging

from ..unit.rollout.checkpoints import VOCAB, make_model, pack
from ..waiting import gone, runs, until

OLD, NEW = Version(1, 0), Version(1, 1)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("Qwen3", head_dim=8, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def test_a_checkpoint_is_read_without_torch(checkpoint: Path) -> None:
    facts = read_checkpoint(checkpoint)
    assert (facts.vocab_size, facts.max_length, facts.eos_token_ids) == (VOCAB, 256, (2,))
    assert facts.tied
    assert facts.shapes["model.embed_tokens.weight"] == (VOCAB, 32)
    script = "import sys, meshrl.rollout.engines.vllm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_written_version_is_the_model_to_the_bit(
    model: Any, checkpoint: Path, tmp_path: Path, dtype: str
) -> None:
    manifest, buckets = pack(model, OLD, dtype)
    facts = read_checkpoint(checkpoint)
    check_version(manifest, buckets, facts)
    write_version(tmp_path, manifest, buckets, tied=facts.tied)
    read = load_file(tmp_path / "model.safetensors")
    expected = {n: p.detach().to(getattr(torch, dtype)) for n, p in model.named_parameters()}
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_a_version_of_another_model_is_refused_with_what_differs(checkpoint: Path) -> None:
    facts = read_checkpoint(checkpoint)
    deeper = make_model("Qwen3", head_dim=8, num_hidden_layers=3, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"unknown model\.layers\.2\.\S+, .* and \d+ more"):
        check_version(*pack(deeper, OLD), facts)


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.mtp.norm.weight", "model.layers.2.x"])
def test_layers_that_predict_further_tokens_are_no_part_of_a_version(
    model: Any, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    """Checkpoints of Qwen3.5, MiMo and DeepSeek-V3 have some, which transformers does not load."""
    shutil.copy(checkpoint / "config.json", tmp_path)
    held = load_file(checkpoint / "model.safetensors")
    save_file({**held, name: torch.ones(2)}, tmp_path / "model.safetensors")
    check_version(*pack(model, OLD), read_checkpoint(tmp_path))


def chunk(tokens: list[int], reason: str = "", spans: Any = None) -> Chunk:
    logprobs = [-0.5] * len(tokens)
    return Chunk(tokens=tokens, logprobs=logprobs, finish_reason=reason, spans=spans)


def test_tokens_after_an_update_has_begun_wait_for_the_servers_version_spans() -> None:
    reader = ResponseReader(OLD, None)
    reader.add(chunk([1, 2]))
    first = reader.certain()
    assert first is not None and first.version == OLD
    reader.add(chunk([3, 4, 5]))  # an update has begun: `certain` is not called any more
    last = chunk([6], "length", [("1.0", 0, 3), ("1.1", 3, 6)])
    reader.add(last)
    rest = reader.rest(last)
    assert [(d.tokens.tolist(), d.version) for d in rest[:-1]] == [([3], OLD), ([4, 5, 6], NEW)]
    assert [delta.finish_reason for delta in rest] == ["", "", "length"]


@pytest.mark.parametrize(
    ("reason", "spans", "message"),
    [
        ("stop", [("default", 0, 3)], "'default', which the mesh did not load"),
        ("stop", [("1.1", 0, 3)], "another program changes its weights"),
        ("stop", [("1.0", 0, 2)], "which version sampled 2 of 3 tokens"),
        ("stop", None, "does not say which weights"),
        ("abort", [("1.0", 0, 3)], "ended a request by itself: abort"),
    ],
)
def test_tokens_of_unknown_weights_are_refused(reason: str, spans: Any, message: str) -> None:
    reader = ResponseReader(OLD, None)
    reader.add(chunk([1, 2]))
    reader.certain()
    last = chunk([3], reason, spans)
    reader.add(last)
    with pytest.raises(InfraError, match=message):
        reader.rest(last)


def test_the_reported_error_is_the_cause_and_not_the_reference_to_it() -> None:
    text = """
(EngineCore pid=7) ERROR 11-20 22:04:25 [core.py:99] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-20 22:04:25 [core.py:99]   File "x.py", line 3, in f
(EngineCore pid=7) ERROR 11-20 22:04:25 [core.py:99] \x1b[31mValueError: no such dtype\x1b[0m
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
INFO: shutting down
"""
    assert last_error(text) == "ValueError: no such dtype"
    assert last_error("api_server.py: error: unrecognized arguments: --x") == (
        "api_server.py: error: unrecognized arguments: --x"
    )
    assert last_error("") == "it wrote nothing"


def test_staging_removes_its_files_and_those_of_a_killed_process(
    tmp_path: Path,
) -> None:
    script = (
        "import os, pathlib; from meshrl.rollout.server_engine.staging import Staging;"
        f"Staging(pathlib.Path({str(tmp_path)!r}), version_bytes=1).new().path.mkdir();"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    (abandoned,) = tmp_path.glob(f"{PREFIX}*")
    first = Staging(tmp_path, version_bytes=1)
    second = Staging(tmp_path, version_bytes=1)
    assert not abandoned.exists()
    assert len(list(tmp_path.iterdir())) == 2  # running processes keep theirs
    for staging in (first, second, first):
        staging.close()
    assert list(tmp_path.iterdir()) == []


FAMILY = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, flush=True)
time.sleep(600)
"""


async def first_number(path: Path) -> int:
    return int(await until(lambda: path.read_text().partition("\n")[0]))


async def test_a_server_and_its_children_end_when_it_is_stopped(tmp_path: Path) -> None:
    server = ServerProcess([sys.executable, "-c", FAMILY], dict(os.environ), tmp_path / "log")
    await server.start()
    grandchild = await first_number(server.log)
    assert runs(grandchild)
    await server.stop()
    await server.stop()
    await gone(grandchild)


async def test_processes_that_a_killed_guard_leaves_are_killed(
    tmp_path: Path,
) -> None:
    server = ServerProcess([sys.executable, "-c", FAMILY], dict(os.environ), tmp_path / "log")
    await server.start()
    grandchild = await first_number(server.log)
    # The group's number is the guard's pid.
    os.kill(os.getpgid(grandchild), signal.SIGKILL)
    assert await server.ended() == -signal.SIGKILL
    await gone(grandchild)
    await server.stop()


def test_logprobs_of_a_long_response_stay_with_their_tokens() -> None:
    reader = ResponseReader(OLD, None)
    for start in range(0, 30, 3):
        tokens = [start, start + 1, start + 2]
        logprobs = [-float(token) for token in tokens]
        reader.add(Chunk(tokens=tokens, logprobs=logprobs, finish_reason="", spans=None))
    delta = reader.certain()
    assert delta is not None
    np.testing.assert_array_equal(delta.logprobs, -delta.tokens.astype(np.float32))
    assert reader.certain() is None


SLOW_TO_END = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit()))
pathlib.Path(sys.argv[-1]).write_text(f"{os.getpid()}\\n")
time.sleep(60)
"""


async def test_an_interrupted_end_of_a_server_is_finished_by_the_next_close(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As when an engine is closed while it replaces its server: nothing waits for the process otherwise."""
    ready = tmp_path / "ready"

    def runs() -> bool:
        return Path("/proc", ready.read_text().strip()).exists()

    config = sglang.Config.model_validate(
        {
            "command": [sys.executable, "-c", SLOW_TO_END],
            "extra_args": [str(ready)],
            "log": str(tmp_path / "log"),
        }
    )
    server = ManagedServer(sglang.SglangServer(config), config, slots=2)
    starting = asyncio.create_task(server.start(read_checkpoint(checkpoint), 64))
    await until(lambda: ready.is_file() and ready.read_text().endswith("\n"))
    starting.cancel()  # it ends its server, and is interrupted in that
    await asyncio.sleep(0.1)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert starting.cancelled()
    assert runs()
    await server.close()
    assert not runs()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_staging_directory_is_as_readable_as_the_umask_lets_it_be_and_ours_to_write(
    tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        staging = Staging(tmp_path, version_bytes=1)
        version = staging.new().path
        version.mkdir()
    finally:
        os.umask(before)
    assert stat.S_IMODE(version.parent.stat().st_mode) == 0o755 & ~umask
    assert stat.S_IMODE(version.stat().st_mode) == 0o777 & ~umask
    staging.close()
