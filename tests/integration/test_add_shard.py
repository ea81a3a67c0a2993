"""`meshrl queue add-shard` against queue processes that no `up` here has started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.cli.commands import queue as command
from meshrl.cli.find_mesh import Mesh
from meshrl.cli.operator import shards_of
from meshrl.config import load_recipe
from meshrl.config.stages import train_spec
from meshrl.contract.errors import UnavailableError, UserError
from meshrl.launcher.ports import free_port
from meshrl.launcher.stage_service import open_run
from meshrl.rpc.queue_connection import connect_queue
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.testing.contract.queue_actors import Actors, spec, tasks

SETTINGS = ServerSettings(metrics_port=None, drain_grace_s=1)


async def add(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code of the command, and its one line."""

    def call() -> int:
        try:
            main(("queue", "add-shard", *words))
        except SystemExit as ended:
            return int(ended.code or 0)

    capsys.readouterr()
    code = await asyncio.to_thread(call)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("\n") == 1
    return code, (captured.out + captured.err).strip()


async def test_a_shard_is_added_and_every_service_finds_it_by_the_addresses_it_always_had(
    addresses: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: m}\nrun: {name: run}\nqueue: {shards: 2}\n")
    recipe = load_recipe(path, check=False)
    given = train_spec(recipe)
    async with connect_queue(",".join(addresses[:2])) as queue:
        await open_run(queue, given, recipe)
        code, line = await add(capsys, addresses[2], "--queue", ",".join(addresses[:2]))
        assert code == 0 and line.startswith(f"{addresses[2]} is shard 2: new groups go to it")
        actors = Actors(queue)
        actors.epoch = (await queue.acquire("run", "trainer")).epoch
        await actors.publish(0)
        await actors.feed(tasks(int(given.admission_groups)))
        admitted = (await actors.ledger()).admitted
    assert await asyncio.to_thread(shards_of, Mesh(run="run", queue=",".join(addresses[:2]))) == 3
    for named in (addresses[:2], addresses):
        async with connect_queue(",".join(named)) as queue:
            await open_run(queue, given, recipe)
            assert (await queue.ledger("run")).admitted == admitted
    async with connect_queue(addresses[0]) as alone:
        one = load_recipe(path, ["queue.shards=1"], check=False)
        with pytest.raises(UserError, match="run run is on 3 queue shards, not on 1"):
            await open_run(alone, given, one)
    async with connect_queue(addresses[2]) as alone:
        assert 0 < (await alone.ledger("run")).admitted < admitted


async def test_what_does_not_fit_is_said_in_one_line(
    addresses: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = addresses
    both = f"{first},{second}"
    for words, said in (
        ((second, "--queue", both), f"the queue at {second} is shard 1 of this one already"),
        (("there", "--queue", both), "'there' is no address of a queue; want host:port"),
        ((third, "--queue", first), "a queue of one process gets shards only at a start"),
        ((third,), "give the shards that there are with --queue"),
    ):
        code, line = await add(capsys, *words)
        assert (code, said in line) == (2, True), line
    async with connect_queue(both) as queue:
        await queue.open_run(spec("run"))
    code, line = await add(capsys, first, "--queue", f"{third},{second}")
    assert code == 2 and "holds runs" in line


async def test_a_shard_that_nobody_serves_cannot_be_reached(addresses: list[str]) -> None:
    nowhere = f"127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(UnavailableError, match=f"queue at {nowhere} cannot be reached"):
        await command._add_shard(",".join(addresses[:2]), nowhere, retry_s=0.2)


async def test_an_address_of_something_else_is_said_to_be_none_of_a_queue(
    addresses: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    async with GrpcServer(SETTINGS, []) as server:
        code, line = await add(capsys, server.address, "--queue", ",".join(addresses[:2]))
    assert code == 1 and f"queue at {server.address} does not know this method" in line
