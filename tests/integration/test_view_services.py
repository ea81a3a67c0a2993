"""Data of `meshrl view`: from a queue that serves, as a reader, and from the files of a stopped one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from meshrl.cli.commands.view import Services
from meshrl.config import load_recipe
from meshrl.config.loading import save_recipe
from meshrl.config.recipe import RECIPE_NAME
from meshrl.contract.errors import MeshError, NotFoundError, UnavailableError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, ServiceAddress, run_lock
from meshrl.launcher.up import view_page
from meshrl.rpc.credentials import ensure_credentials, verifiers_file
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue import stores
from meshrl.transferqueue.queue import TransferQueue

RECIPE = "model: {path: model}\nrun: {name: run, dir: RUN}\nqueue: {reserve_bytes: 0}\n"


async def test_the_flow_of_rows_is_asked_of_the_queue_and_then_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE.replace("RUN", str(tmp_path / "run")))
    recipe = load_recipe(tmp_path / "my.yaml", check=False)
    run_dir = recipe.run.path
    run_dir.mkdir(mode=0o700)
    ensure_credentials(run_dir)
    save_recipe(recipe, run_dir / RECIPE_NAME)
    services = Services()
    with pytest.raises(NotFoundError, match="no address book"):
        await services.flow(run_dir)

    queue = await TransferQueue.open(stores.build(recipe.queue, recipe.queue_path))
    settings = ServerSettings(verifiers=verifiers_file(run_dir))
    async with GrpcServer(settings, [QueueServicer(queue)]) as server:
        await server.ready()
        port = int(server.address.rpartition(":")[2])
        here = {"host": "127.0.0.1", "port": port, "metrics_port": 0}
        entries = {kind: ServiceAddress(kind=kind, **here) for kind in ("queue", "trainer")}
        AddressBook(run="run", recipe=run_dir / RECIPE_NAME, services=entries).save(
            run_dir / ADDRESS_BOOK_NAME
        )
        actors = Actors(queue)
        await actors.start(spec())
        await actors.feed(tasks(2))
        with run_lock(run_dir):
            assert services.is_up(run_dir)
            flow = await services.flow(run_dir)
            assert flow["up"] and flow["ledgers"][0]["admitted"] == 4
            assert flow["ledgers"][0]["balanced"] and flow["dead_letters"] == []
            # Neither a fleet nor an `up` answers at these addresses.
            with pytest.raises(UnavailableError):
                await services.fleet(run_dir)
    await queue.close()

    stopped = await services.flow(run_dir)
    assert not services.is_up(run_dir) and not stopped["up"] and stopped["waiting"] == []
    assert stopped["ledgers"][0]["admitted"] == 4
    # Asked again, it opens the files only if they changed: another process may have them now.
    with run_lock(run_dir), pytest.raises(MeshError):
        await services.flow(run_dir)
    assert await services.flow(run_dir) is stopped


async def test_the_page_of_up_says_its_address_and_ends_with_it(tmp_path: Path) -> None:
    ensure_credentials(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    said: asyncio.Queue[str] = asyncio.Queue()
    async with view_page(tmp_path, lambda _, line: said.put_nowait(line)):
        line = await said.get()
        run, page, token = re.fullmatch(r"(\S+): (\S+)/#token=(\S+)", line).groups()  # type: ignore[union-attr]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            runs = await client.get(
                f"{page}/api/runs", headers={"authorization": f"Bearer {token}"}
            )
            assert [(one["key"], one["step"]) for one in runs.json()] == [(run, 7)]
            evil = await client.get(page, headers={"host": "evil.example"})
            assert evil.status_code == 403
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(page)
