"""One service as a process: it answers, it drains, and the commands that ask it tell what it said."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from meshrl.cli.commands.serve import _node_rank
from meshrl.config import load_recipe, train_spec
from meshrl.contract.errors import UserError
from meshrl.contract.types import ROLLOUT_STAGE, Outcome, Task, Version, reward_stage
from meshrl.launcher.address_book import ServiceAddress, free_port
from meshrl.launcher.service import is_serving
from meshrl.rpc import credentials
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.exit_codes import Exit

CLI = (sys.executable, "-m", "meshrl.cli")


async def test_a_file_that_cannot_be_read_ends_a_service_for_good(tmp_path: Path) -> None:
    code, _, err = await meshrl(
        "serve", "queue", str(recipe(tmp_path)), "--address-book", str(tmp_path)
    )
    assert (code, err) == (Exit.REFUSED, f"error: {tmp_path}: Is a directory\n")


def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\n"
        "model: {path: not-on-this-machine}\n"
        "data: {train_batch_size: 2}\n"
        "rollout: {n: 2}\n"
        "queue: {max_attempts: 1}\n"
    )
    return path


async def meshrl(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *CLI, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@asynccontextmanager
async def queue_service(tmp_path: Path) -> AsyncIterator[str]:
    port = free_port("127.0.0.1")
    process = await asyncio.create_subprocess_exec(
        *CLI, "serve", "queue", str(recipe(tmp_path)), "--port", str(port)
    )
    entry = ServiceAddress(kind="queue", host="127.0.0.1", port=port, metrics_port=0)
    try:
        async with asyncio.timeout(120):
            while not await is_serving(entry):
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield entry.address
    finally:
        process.terminate()
        async with asyncio.timeout(120):
            assert await process.wait() == 0


async def test_a_queue_is_served_asked_and_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_service(tmp_path) as address:
        run_dir = tmp_path / "run"
        assert run_dir.stat().st_mode & 0o777 == 0o700
        code, out, err = await meshrl("ledger", "--queue", address, "--run", "run")
        assert (code, out) == (1, "") and "this call needs a credential of the run" in err
        operator = credentials.file_of_role(run_dir, MeshRole.OPERATOR)
        monkeypatch.setenv(credentials.FILE_VARIABLE, str(operator))
        spec = train_spec(load_recipe(recipe(tmp_path), check=False))
        task = Task(
            run=spec.run, task_id="t", prompt_ids=np.arange(3, dtype=np.int32), group_size=2
        )
        async with QueueClient(address) as queue:
            await queue.open_run(spec)
            state = await queue.acquire(spec.run, "test")
            version = Version(state.epoch, 0)
            await queue.publish(spec.run, version)
            await queue.admit(spec.run, [task], cursor="1", wait_s=1.0)
            lease = await queue.lease(
                [spec.run], "rollout", worker="w", limit=1, version=version, wait_s=1.0
            )
            (row,) = lease.rows
            await queue.fail(
                spec.run, "rollout", row.uid, row.token, Outcome.INFRA_FAULT, "no memory"
            )

        here = ("--queue", address, "--run", spec.run)
        code, out, _ = await meshrl("ledger", *here, "--json")
        ledger = json.loads(out)[spec.run]
        assert (code, ledger["admitted"], ledger["balanced"]) == (0, 2, True)
        code, out, _ = await meshrl("ledger", *here)
        assert code == 0 and "balanced" in out

        code, out, _ = await meshrl("dead-letters", *here, "--json")
        (letter,) = [one for one in json.loads(out) if one["reason"] == "no memory"]
        assert (letter["uid"], letter["stage"]) == (str(row.uid), ROLLOUT_STAGE.name)
        code, out, _ = await meshrl("dead-letters", *here, "replay", str(row.uid))
        assert code == 0 and out == "1 row admitted again\n"
        code, _, err = await meshrl("dead-letters", *here, "replay", "nonsense")
        assert (code, err) == (
            2,
            "error: not a uid: 'nonsense' (want run/task/index.attempt)\n",
        )

        code, out, _ = await meshrl("status", *here, "--json")
        assert (code, json.loads(out)["published"]) == (0, str(version))
        code, out, _ = await meshrl("why-waiting", *here, "--json")
        assert code == 0 and isinstance(json.loads(out), list)


async def test_a_run_that_the_queue_does_not_know_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_service(tmp_path) as address:
        reader = credentials.file_of_role(tmp_path / "run", MeshRole.READER)
        monkeypatch.setenv(credentials.FILE_VARIABLE, str(reader))
        code, out, err = await meshrl("ledger", "--queue", address, "--run", "nobody")
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert "nobody" in err


async def test_a_port_in_use_is_one_line_with_a_code_of_its_own(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, out, err = await meshrl("serve", "queue", str(recipe(tmp_path)), "--port", str(port))
    assert (code, out) == (Exit.PORT_IN_USE, "")
    assert err == f"error: queue cannot listen on 127.0.0.1:{port}: the port is in use\n"


async def test_a_service_without_its_peer_says_how_to_name_it(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    path.write_text(path.read_text() + "reward: {functions: [{name: exact_match}]}\n")
    code, _, err = await meshrl("serve", "reward", str(path))
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: reward must reach the queue service: give --queue HOST:PORT or --address-book FILE",
    )


async def test_a_service_checks_what_it_reads_and_no_more(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    code, _, err = await meshrl("serve", "rollout", str(path), "--queue", "127.0.0.1:1")
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith(f"error: {path}:2: model.path: no such directory: not-on-this-machine")


def test_the_stages_of_a_run_are_those_of_its_services(tmp_path: Path) -> None:
    spec = train_spec(load_recipe(recipe(tmp_path), check=False))
    assert spec.stages == (ROLLOUT_STAGE, reward_stage(keep_inputs=True))


async def test_a_reward_service_that_anybody_could_submit_to_is_refused(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    where = ("--host", "0.0.0.0", "--queue", "127.0.0.1:1")
    code, _, err = await meshrl("serve", "reward", str(path), *where)
    assert code == 2
    assert err.splitlines()[-1].startswith(
        "error: host '0.0.0.0' can be reached from other machines, where anybody could submit a reward: "
        "set reward.registry.tokens (meshrl reward token) or tls.client_ca, or bind 127.0.0.1"
    )


@pytest.mark.parametrize(
    ("named", "said"),
    [("none.yaml", "none.yaml: no such recipe"), ("wrong.yaml", "no such key")],
)
async def test_a_service_that_cannot_start_stays_where_its_supervisor_would_start_it_again(
    tmp_path: Path, named: str, said: str
) -> None:
    (tmp_path / "wrong.yaml").write_text("quee: {}\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "meshrl.cli",
        "serve",
        "queue",
        named,
        cwd=tmp_path,
        env={**os.environ, "MESHRL_STAY_ON_USER_ERROR": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    lines = []
    while not lines or "waiting to be stopped" not in lines[-1]:
        line = await asyncio.wait_for(process.stderr.readline(), 60)
        assert line, lines
        lines.append(line.decode())
    assert lines[0].startswith("error: ") and said in lines[0], lines
    assert process.returncode is None
    process.terminate()
    assert await process.wait() == Exit.USER_ERROR


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trainer.nnodes=2",), "2 machines, and nothing says which one this is: want --node-rank, 0"),
        (("trainer.nnodes=2", "--node-rank", "2"), "--node-rank: 2, and trainer.nnodes is 2: want 0 to 1"),
        (("--node-rank", "1"), "--node-rank: 1, and trainer.nnodes is 1: want 0"),
    ],
)  # fmt: skip
def test_a_machine_of_the_trainer_says_which_one_it_is(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("model: {path: small}\n")
    given = next((int(word) for word in words if word.isdigit()), None)
    loaded = load_recipe(path, [word for word in words if "=" in word], check=False)
    with pytest.raises(UserError) as refused:
        _node_rank(loaded, "trainer", given)
    assert said in str(refused.value)
    assert _node_rank(loaded, "feeder", given) == 0
