"""`meshrl queue` and the ledger's audit: against a queue that serves, one that was stopped, and a backup."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.config import load_recipe
from meshrl.config.loading import save_recipe
from meshrl.config.recipe import RECIPE_NAME
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook
from meshrl.rpc.clients.operators import QueueAdminClient
from meshrl.rpc.queue_metrics import QueueCollector
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueAdminServicer, QueueServicer
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue import store as queue_store
from meshrl.transferqueue import stores
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.queue import TransferQueue

from ..unit.transferqueue.rewritten import rewrite

RECIPE = """
model: {path: model}
run: {name: run, dir: RUNS}
queue: {reserve_bytes: 0}
"""


@dataclass
class Mesh:
    """A served queue with rows in it, and a way to ask about it at the command line."""

    actors: Actors
    server: GrpcServer
    folder: Path
    capsys: pytest.CaptureFixture[str]

    async def meshrl(self, *arguments: str) -> tuple[int, str, str]:
        def call() -> int:
            try:
                main(arguments)
            except SystemExit as ended:
                return int(ended.code or 0)

        self.capsys.readouterr()
        code = await asyncio.to_thread(call)
        return code, *self.capsys.readouterr()

    @property
    def address(self) -> list[str]:
        return ["--queue", self.server.address, "--run", "run"]


@pytest.fixture
async def mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Mesh]:
    (tmp_path / "my.yaml").write_text(RECIPE.replace("RUNS", str(tmp_path / "runs")))
    recipe = load_recipe(tmp_path / "my.yaml", check=False)
    recipe.run.path.mkdir(parents=True)
    save_recipe(recipe, recipe.run.path / RECIPE_NAME)
    AddressBook(run="run", recipe=recipe.run.path / RECIPE_NAME, services={}).save(
        recipe.run.path / ADDRESS_BOOK_NAME
    )
    store = stores.build(recipe.queue, recipe.queue_path)
    queue = await TransferQueue.open(store)
    servicers = [
        QueueServicer(queue),
        QueueAdminServicer(QueueAdmin(queue, store)),
    ]
    async with GrpcServer(ServerSettings(), servicers) as server:
        server.registry.register(QueueCollector(queue, store))
        await server.ready()
        actors = Actors(queue)
        await actors.start(spec(max_staleness=99.0))
        await actors.feed(tasks(4))
        await actors.work(limit=6)
        yield Mesh(actors, server, tmp_path, capsys)
    await queue.close()


async def test_a_queue_that_serves_is_backed_up_verified_and_restored(mesh: Mesh) -> None:
    # Larger than one message, so that it travels in parts.
    await mesh.actors.feed(tasks(1, start=9, extra_info={"filler": "x" * (3 << 20)}))
    ledger = await mesh.actors.ledger()
    backup = str(mesh.folder / "backup")
    code, out, err = await mesh.meshrl("queue", "backup", backup, *mesh.address)
    assert (code, err) == (0, "") and out.startswith(f"backed up to {backup}: ")
    code, out, err = await mesh.meshrl("queue", "backup", backup, *mesh.address)
    assert code == 1 and err.startswith(f"error: {backup} exists")

    for target in ([], [backup]):
        where = target or mesh.address
        code, out, _ = await mesh.meshrl("queue", "verify", *where)
        assert code == 0 and out.startswith("no problems: 1 run, 10 resident rows")
        code, out, _ = await mesh.meshrl("queue", "verify", "--json", *where)
        found = json.loads(out)
        assert found["problems"] == [] and found["ledgers"]["run"]["admitted"] == ledger.admitted

    recipe = str(mesh.folder / "my.yaml")
    fresh = f"run.dir={mesh.folder / 'fresh'}"
    code, out, err = await mesh.meshrl("queue", "restore", backup, recipe, fresh)
    assert (code, err) == (0, "") and out.startswith(f"restored {backup} for run run: ")
    code, _, err = await mesh.meshrl("queue", "restore", backup, recipe, fresh)
    assert code == 1 and "holds a queue already" in err
    code, _, err = await mesh.meshrl("queue", "restore", backup, recipe)
    assert code == 2 and "is already open in process" in err
    restored = load_recipe(mesh.folder / "my.yaml", [fresh], check=False)
    queue = await TransferQueue.open(stores.build(restored.queue, restored.queue_path))
    assert await queue.ledger("run") == ledger
    await queue.close()


async def test_a_backup_whose_copy_does_not_fit_ends_in_one_line(mesh: Mesh) -> None:
    mesh.actors.queue._store._reserve_bytes = 1 << 60  # type: ignore[attr-defined]
    backup = mesh.folder / "backup"
    for words in (["queue", "backup", str(backup)], ["queue", "verify"]):
        code, _, err = await mesh.meshrl(*words, *mesh.address)
        assert code == 1 and err.count("\n") == 1, err
        assert "no room for the copy that an export reads" in err
    code, _, err = await mesh.meshrl("queue", "verify", str(backup))
    assert code == 1 and "holds no backup" in err


async def test_the_ledger_is_audited_at_the_command_line(mesh: Mesh) -> None:
    code, out, _ = await mesh.meshrl("ledger", "--audit", *mesh.address)
    assert code == 0 and "run: balanced" in out and "no problems" in out
    mesh.actors.queue.open_runs[0].ledger.admitted += 1  # type: ignore[attr-defined]
    code, out, _ = await mesh.meshrl("ledger", "--audit", "--json", *mesh.address)
    assert code == 1 and "the queue reports" in json.loads(out)["problems"][0]
    code, _, err = await mesh.meshrl("ledger", "--audit", "--watch", *mesh.address)
    assert code == 2 and "not with --watch" in err


async def test_a_run_that_is_over_is_removed_from_a_queue_that_serves(mesh: Mesh) -> None:
    other = Actors(mesh.actors.queue, "other")
    await other.start(spec("other"))
    await other.feed(tasks(2, run="other"))
    kept = await mesh.actors.ledger()
    code, out, err = await mesh.meshrl("runs", "stored", "--json", *mesh.address[:2])
    assert (code, err) == (0, "")
    assert [(one["run"], len(one["attached"])) for one in json.loads(out)] == [
        ("run", 1),
        ("other", 1),
    ]
    queue = ["--queue", mesh.server.address]
    code, out, err = await mesh.meshrl("runs", "remove", "other", *queue)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert err.startswith("error: run other is worked on: a service has worked on it")
    code, out, err = await mesh.meshrl("runs", "remove", "other", "--force", *queue)
    assert (code, err) == (0, "")
    assert out == (
        "run other is removed from the queue; lost: 4 resident rows, 0 dead letters and the feeder's position\n"
    )
    code, _, err = await mesh.meshrl("runs", "remove", "other", *queue)
    assert code == 1 and "no run named 'other' is open (open: run)" in err
    code, out, _ = await mesh.meshrl("runs", "stored", *queue)
    assert code == 0 and "other" not in out and "a service has worked on it" in out
    assert await mesh.actors.ledger() == kept
    code, out, _ = await mesh.meshrl("queue", "verify", *mesh.address)
    assert code == 0 and out.startswith("no problems: 1 run")


async def test_a_run_is_removed_from_a_queue_that_does_not_run(mesh: Mesh) -> None:
    await Actors(mesh.actors.queue, "other").start(spec("other"))
    await mesh.actors.queue.close()
    run_dir = ["--run-dir", str(mesh.folder / "runs")]
    code, out, _ = await mesh.meshrl("runs", "stored", "--json", *run_dir)
    assert code == 0 and [one["attached"] for one in json.loads(out)] == [[], []]
    code, out, _ = await mesh.meshrl("runs", "remove", "run", *run_dir)
    assert code == 0 and out.startswith("run run is removed from the queue; lost: 8 resident rows")
    code, out, _ = await mesh.meshrl("runs", "stored", *run_dir)
    assert code == 0 and "other" in out
    code, out, _ = await mesh.meshrl("queue", "verify", *run_dir)
    assert code == 0 and out.startswith("no problems: 1 run, 0 resident rows")


async def test_a_queue_that_was_stopped_is_audited_from_its_store(mesh: Mesh) -> None:
    await mesh.actors.queue.close()
    run_dir = ["--run-dir", str(mesh.folder / "runs")]
    code, out, err = await mesh.meshrl("queue", "verify", *run_dir)
    assert code == 0 and out.startswith("no problems")
    assert err.startswith("run run in ") and err.endswith(", not running\n")
    queue = load_recipe(mesh.folder / "my.yaml", check=False).queue_path
    await rewrite(queue, "meta", b"g", b"12345678[]")
    code, out, _ = await mesh.meshrl("queue", "verify", *run_dir)
    assert code == 1 and "do not match their checksum" in out


async def test_a_queue_of_another_format_is_refused(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_store, "FORMAT", 99)
    async with QueueAdminClient(mesh.server.address) as admin:
        with pytest.raises(UserError, match="this meshrl reads format 99"):
            await anext(admin.export())


async def test_prometheus_sees_rows_commits_and_bytes(mesh: Mesh) -> None:
    def scrape() -> str:
        url = f"http://127.0.0.1:{mesh.server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read(), "utf-8")

    await mesh.actors.take(0)
    lines = dict(
        line.rsplit(" ", 1)
        for line in (await asyncio.to_thread(scrape)).splitlines()
        if line.startswith("meshrl_queue")
    )
    assert lines['meshrl_queue_rows{run="run",state="taken"}'] == "4.0"
    assert lines['meshrl_queue_admitted_total{run="run"}'] == "8.0"
    assert lines['meshrl_queue_left_total{exit="trained",run="run"}'] == "0.0"
    assert lines['meshrl_queue_lease_expiries_total{run="run",stage="rollout"}'] == "0.0"
    assert lines['meshrl_queue_ready_to_taken_seconds_count{run="run"}'] == "4.0"
    assert float(lines["meshrl_queue_commit_seconds_count"]) >= 5
    assert float(lines["meshrl_queue_commit_seconds_sum"]) > 0
    assert float(lines["meshrl_queue_store_bytes"]) > 0
    assert float(lines['meshrl_queue_open_bytes{run="run"}']) > 0


async def test_prometheus_sees_leases_that_expire(mesh: Mesh) -> None:
    queue = mesh.actors.queue
    await queue.open_run(spec("short", lease_ttl_s=0.05, gated=False))
    short = Actors(queue, run="short")
    await short.feed(tasks(1, run="short"))
    await short.lease(worker="dead")
    # Its second holder gets the rows when the first has lost them.
    await short.lease(wait_s=20.0)
    (run,) = (run for run in queue.open_runs if run.name == "short")  # type: ignore[attr-defined]
    assert run.lease_expiries["rollout"] == 2
