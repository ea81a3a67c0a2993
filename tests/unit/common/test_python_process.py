"""Processes of the mesh in environments that change Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.python_process import PYTHON, spared, start_with

TELLS = """
import json, os, sys, types, warnings, logging
import neighbour
print(json.dumps({
    "debug": __debug__, "doc": (lambda: 0).__class__.__doc__ is not None, "warnings": sys.warnoptions,
    "inspect": sys.flags.inspect, "utf8": open(__file__).encoding, "said": sys.stdout.encoding,
    "neighbour": neighbour.HERE, "arguments": sys.argv[1:], "hash": hash("a"), "folder": sys.path[0],
    "kept": {k: v for k, v in os.environ.items() if k in json.loads(sys.argv[1])},
}))
"""
CHANGED = {
    "asserts": {"PYTHONOPTIMIZE": "1"},
    "docstrings": {"PYTHONOPTIMIZE": "2"},
    "warnings": {"PYTHONWARNINGS": "error"},
    "a prompt at the end": {"PYTHONINSPECT": "1"},
    "a file before the prompt": {"PYTHONSTARTUP": "raises.py"},
    "no bytecode": {"PYTHONDONTWRITEBYTECODE": "1"},
    "hashes": {"PYTHONHASHSEED": "7"},
    "terminal": {"PYTHONIOENCODING": "latin-1"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "nothing": {},
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody's modules, some of which are named as modules of the standard library."""
    (tmp_path / "neighbour.py").write_text("HERE = True")
    for name in ("types", "logging", "enum", "warnings", "json", "re", "random", "email"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} is hidden')")
    (tmp_path / "raises.py").write_text("raise RuntimeError")
    script = tmp_path.with_name("told")
    script.mkdir(exist_ok=True)
    (script / "tells.py").write_text(TELLS)
    yield tmp_path


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_a_process_starts_as_in_an_environment_that_says_nothing_to_python(
    folder: Path, changed: dict[str, str]
) -> None:
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(folder), **changed}
    script = folder.with_name("told") / "tells.py"
    done = subprocess.run(
        [*PYTHON, str(script), json.dumps(list(changed))],
        env=environment, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["debug"], found["doc"], found["warnings"], found["inspect"]) == (
        True,
        True,
        [],
        0,
    )
    assert (found["neighbour"], found["utf8"].lower(), found["said"]) == (True, "utf-8", "utf-8")
    assert (
        found["kept"] == changed
    )  # what it starts and has not written gets the environment as it is


def test_variables_that_a_process_asks_for_count_and_those_of_the_environment_do_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    words, environment = start_with({"PYTHONHASHSEED": "0"})
    asked = [*words, str(folder.with_name("told") / "tells.py"), "[]"]
    found = [json.loads(subprocess.check_output(asked, env=environment)) for _ in range(2)]
    assert found[0]["hash"] == found[1]["hash"]
    assert found[0]["debug"] and found[0]["neighbour"]


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_a_command_starts_itself_again_where_the_environment_changes_python(
    folder: Path, changed: dict[str, str]
) -> None:
    if "PYTHONWARNINGS" in changed:
        (folder / "warnings.py").unlink()  # Python itself imports it then, before any line
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(folder), **changed}
    command = Path(__file__).parents[3] / "services" / "bin" / "meshrl"  # as it is installed
    done = subprocess.run(
        [sys.executable, str(command), "--version"],
        env=environment, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("meshrl, version")


def test_a_server_of_others_starts_without_what_would_change_its_python(folder: Path) -> None:
    good = str(folder.with_name("told"))
    environment = {"PYTHONPATH": f"{good}:{folder}", "PYTHONOPTIMIZE": "2", "PATH": "/bin"}
    assert spared(environment) == (
        {"PYTHONPATH": good, "PATH": "/bin"},
        ["PYTHONOPTIMIZE", f"{folder} of PYTHONPATH"],
    )
    assert spared(environment, "PYTHONPATH", "PYTHONOPTIMIZE") == (environment, [])
    assert spared({"PATH": "/bin"}) == ({"PATH": "/bin"}, [])
