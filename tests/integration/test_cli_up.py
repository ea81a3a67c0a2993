"""`meshrl up` from the outside: what it refuses, how it ends, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from meshrl.launcher.address_book import is_up, run_lock

from ..small_checkpoint import write_tokenizer, write_weights
from ..waiting import until

CLI = (sys.executable, "-m", "meshrl.cli")
RECIPE = """
run: {name: tiny}
model: {path: model}
data: {train_files: [train.jsonl]}
reward: {custom_reward_function: {path: mine.py}}
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that pass every check of a recipe, though no model could be loaded from them."""
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(RECIPE)
    Path("train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    Path("mine.py").write_text("def compute_score(**given): return 0.0\n")
    Path("model").mkdir()
    Path("model/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    write_tokenizer(Path("model"))
    write_weights(Path("model/model.safetensors"))
    return tmp_path


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *CLI,
        "up",
        "my.yaml",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str, list[str]]:
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode().splitlines()


def processes_of(directory: Path) -> list[str]:
    """Command lines of the processes that work in `directory`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "cwd").resolve() == directory.resolve():
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return [line for line in found if "meshrl" in line]


async def test_a_service_that_refuses_its_recipe_ends_the_run_in_one_line(workplace: Path) -> None:
    (workplace / "taken").write_text("a file, not a directory")
    code, out, err = await ended(await start("queue.path=taken"))
    assert (code, err) == (2, [f"error: queue: queue.path: {workplace / 'taken'}: File exists"])
    assert "reward" not in out.split("run tiny: ")[1].split("\n", 1)[1]
    assert processes_of(workplace) == []


async def test_a_second_up_on_the_same_run_is_refused(workplace: Path) -> None:
    (workplace / "runs/tiny").mkdir(parents=True, mode=0o700)
    with run_lock(Path("runs/tiny")):
        code, _, (line,) = await ended(await start())
    assert code == 2
    assert line.startswith("error: runs/tiny is in use: another `meshrl up` (pid ")


async def test_a_refused_start_leaves_the_recipe_of_the_run_as_it_was(workplace: Path) -> None:
    (workplace / "taken").write_text("a file, not a directory")
    kept = workplace / "runs/tiny/recipe.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text("the recipe that was accepted")
    code, _, _ = await ended(await start("queue.path=taken", "rollout.n=4"))
    assert code == 2
    assert kept.read_text() == "the recipe that was accepted"


async def test_a_busy_port_is_said_before_anything_starts(workplace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, out, (line,) = await ended(await start("--port", f"queue={port}"))
    assert (code, out) == (75, "")
    assert line == (
        f"error: --port queue={port}: another program listens on 127.0.0.1:{port}; choose another port"
    )


async def test_a_signal_drains_and_nothing_is_left(workplace: Path) -> None:
    process = await start("--port", "queue=20999")
    log = Path("runs/tiny/logs/queue.log")
    await until(lambda: log.exists() and "serving" in log.read_text())
    assert is_up(Path("runs/tiny"))
    mesh_file = json.loads((workplace / "runs/tiny/mesh.json").read_text())
    assert mesh_file["services"]["queue"]["port"] == 20999
    process.send_signal(signal.SIGTERM)
    code, _, err = await ended(process)
    assert (code, err) == (
        143,
        ["stopped by SIGTERM; the same command continues from there"],
    )
    assert processes_of(workplace) == []
    assert not is_up(Path("runs/tiny"))


async def test_a_pipe_that_closes_ends_a_run_as_a_lost_terminal_does(workplace: Path) -> None:
    process = await start("--port", "queue=20998")
    assert process.stdout is not None
    await process.stdout.readline()
    transport = process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
    transport.close()  # as `meshrl up | head -1` does
    code, _, err = await ended(process)
    assert code == 128 + signal.SIGPIPE
    assert err[-1].startswith("stopped by a closed pipe"), err
    assert processes_of(workplace) == [] and not is_up(Path("runs/tiny"))


async def test_nothing_survives_an_up_that_is_killed(workplace: Path) -> None:
    process = await start()
    log = Path("runs/tiny/logs/queue.log")
    await until(lambda: log.exists() and "serving" in log.read_text())
    process.kill()
    await process.wait()
    await until(lambda: processes_of(workplace) == [])
