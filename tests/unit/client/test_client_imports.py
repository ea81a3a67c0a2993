"""The client imports no other part of the mesh."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOW = """
import sys
before = set(sys.modules)
import {module}
new = {{name.partition(".")[0] for name in sys.modules.keys() - before}}
print(" ".join(new - sys.stdlib_module_names))
"""
HEAVY = {
    "torch",
    "transformers",
    "lmdb",
    "uvloop",
    "rich",
    "click",
    "prometheus_client",
    "pydantic",
    "yaml",
}


@pytest.mark.parametrize("module", ["meshrl.client", "meshrl.client.sync"])
def test_the_client_imports_grpc_and_numpy_and_little_else(module: str) -> None:
    code = SHOW.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert {"grpc", "numpy", "meshrl"} <= modules
    assert modules & HEAVY == set()


def test_a_run_names_itself() -> None:
    from meshrl.client.queue import Run

    assert repr(Run(None, "mine")) == "Run('mine')"  # type: ignore[arg-type]
