"""vLLM and SGLang servers in tests, real ones and the SGLang of ours: how they start quickly on a CPU."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .forks import SWITCH

ROOT = Path(__file__).parent.parent
FORKS = ROOT / "tests" / "server_forks"
KV_BYTES = 64 << 20
VLLM_ARGUMENTS = ("--enforce-eager", "--kv-cache-memory-bytes", str(KV_BYTES))
"""A start in seconds, and no half of the machine's memory for the cache."""
SGLANG_ARGUMENTS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # else its scheduler keeps a core busy
)
OURS = "meshrl"
"""The package of `meshrl.testing.sglang_server`, in this environment."""
COMMAND = [sys.executable, "-m", "meshrl.testing.sglang_server"]
ENVIRONMENT = {
    OURS: {},
    "vllm": {},
    "sglang": {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "tests" / "sglang_cpu"),
    },
}
MODULES = {
    OURS: ("uvicorn", "meshrl.testing.sglang_server.routes"),
    "vllm": (
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        *(f"vllm.model_executor.models.{name}" for name in ("qwen3", "qwen3_moe", "qwen3_vl")),
    ),
    "sglang": (
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        *(f"sglang.srt.models.{name}" for name in ("qwen3", "qwen3_moe", "qwen3_vl")),
    ),
}
"""Modules that a server imports before it serves the models of the tests."""


def venv(package: str) -> Path:
    """The environment of a server; VLLM_VENV or SGLANG_VENV is another one."""
    return Path(os.environ.get(f"{package.upper()}_VENV", ROOT / f".venv-{package}"))


def python(package: str) -> Path:
    return Path(sys.executable) if package == OURS else venv(package) / "bin" / "python"


def is_here(package: str) -> bool:
    """`make venv-vllm` or `make venv-sglang` has come to its end."""
    return any(venv(package).glob(".ready-*"))


def has_numba() -> bool:
    """vLLM's environment can guess tokens by n-grams."""
    find = "from importlib.util import find_spec; raise SystemExit(find_spec('numba') is None)"
    return is_here("vllm") and not subprocess.run([python("vllm"), "-c", find]).returncode


def environment(package: str) -> Mapping[str, str]:
    """`rollout.engine.env` of a server on a CPU. Each is a fork, unless TEST_FORKS is 0."""
    own: dict[str, str] = ENVIRONMENT[package]
    if os.environ.get(SWITCH) == "0":
        return own
    paths = (str(FORKS), own.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""))
    own = {**own, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return {**own, "SERVER_FORKS": _zygote(package, tuple(own.items()))}


@functools.cache
def _zygote(package: str, own: tuple[tuple[str, str], ...]) -> str:
    """The socket of a process that has imported the server, which ends with this one."""
    path = f"{tempfile.mkdtemp(prefix='server-forks-')}/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        command = [str(python(package)), str(FORKS / "zygote.py"), str(listener.fileno())]
        process = subprocess.Popen(
            [*command, *MODULES[package]],
            stdin=subprocess.PIPE,
            env={
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                **os.environ,
                **dict(own),
                "OMP_NUM_THREADS": "1",
            },
            pass_fds=[listener.fileno()],
        )
    atexit.register(_end, process, path)
    return path


def _end(process: subprocess.Popen[bytes], path: str) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    Path(path).unlink()
    Path(path).parent.rmdir()
