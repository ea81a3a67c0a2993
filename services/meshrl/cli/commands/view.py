"""`meshrl view`: a web page over run directories and, while they run, their services."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from meshrl.cli.commands.fleet import membership_json
from meshrl.cli.find_mesh import Mesh, MeshAddress, mesh_of, read_membership
from meshrl.cli.options import RUN, checked_run
from meshrl.common.plain_text import say
from meshrl.common.process_guard import die_with_supervisor
from meshrl.common.sockets import Certificates, is_loopback
from meshrl.config.loading import load_run
from meshrl.config.recipe import RECIPE_NAME
from meshrl.contract.ports import Queue
from meshrl.contract.types import DeadLetter
from meshrl.launcher.address_book import is_up, newest_run_dir
from meshrl.rpc.credentials import MeshRole, new_token
from meshrl.rpc.runtime import ServerSettings, permit_insecure, run_service

RETRY_S = 2.0
"""How long a service that does not answer is tried."""
SHOWN_WAITS = 100
SHOWN_UIDS = 5
SHOWN_REASONS = 50
LONGEST_REASON = 500


@click.command()
@click.argument("runs", type=RUN, nargs=-1, metavar="[RUN]...")
@click.option("--host", envvar="MESHRL_VIEW_HOST", default="127.0.0.1", show_default=True)
@click.option(
    "--port",
    envvar="MESHRL_VIEW_PORT",
    type=click.IntRange(0, 65535),
    default=0,
    help="A free one if not given.",
)
@click.option(
    "--allowed-host", "allowed", multiple=True, help="A further name by which browsers call it."
)
@click.option(
    "--allow-insecure-bind",
    is_flag=True,
    help="Listen beyond this machine, unencrypted: only in a network that you trust.",
)
def view(
    runs: tuple[Path, ...],
    host: str,
    port: int,
    allowed: tuple[str, ...],
    allow_insecure_bind: bool,
) -> None:
    """Serve a page over each RUN (the newest one here if none is given) until Ctrl-C.

    It shows curves, the fleet, the flow of rows, the configuration and the rollouts. Open the address that it prints:
    the token in it lets you in, to read. Only who shows an operator's credential of the run may replay dead letters.
    """
    die_with_supervisor()
    directories = [checked_run(run) for run in runs] or [newest_run_dir()]
    settings = ServerSettings(
        host=host,
        port=port,
        allow_insecure_bind=allow_insecure_bind,
        tls=Certificates() if is_loopback(host) else _certificates(directories),
    )
    if not is_loopback(host) and settings.tls.cert is None:
        permit_insecure(
            settings,
            f"--host {host} can be reached from other machines, and the page's token would travel unencrypted: "
            f"keep 127.0.0.1 (over ssh: ssh -L), set tls.cert and tls.key in the run's recipe, or give "
            "--allow-insecure-bind",
            f"the page on {host} sends its token and all rows unencrypted",
        )
    sys.exit(run_service(lambda: _serve(directories, settings, allowed)))


def _certificates(directories: Sequence[Path]) -> Certificates:
    """Certificates of the first run. Raises ConfigError."""
    path = directories[0] / RECIPE_NAME
    return load_run(path).tls.certificates if path.exists() else Certificates()


async def _serve(
    directories: Sequence[Path], settings: ServerSettings, allowed: Sequence[str]
) -> None:
    # Imported here: with it comes FastAPI, which `--help` can do without.
    from meshrl.http.common import problem
    from meshrl.http.view.app import Admission, build_app, viewed_runs
    from meshrl.rpc.http_server import serving_http

    token, _ = new_token()
    shown = viewed_runs(directories)
    closing = asyncio.Event()
    app = build_app(shown, Services(), Admission(token, shown), closing)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, closing.set)
    async with serving_http(
        app,
        settings.host,
        settings.port,
        settings.tls,
        refuse=problem,
        name="view",
        allowed_hosts=allowed,
    ) as url:
        say(f"{', '.join(run.key for run in shown)}: {url}/#token={token}")
        await closing.wait()


class Services:
    """Asks the services of a run for the page, as a reader; the queue's files where it does not run."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        """The credential in use is the process's: one run is asked after the other."""
        self._stored: dict[Path, tuple[Mapping[Path, int], dict[str, Any]]] = {}
        """The last answer of a run that does not run, and the state of its files then."""
        self._letters: dict[Path, tuple[Mapping[str, int], list[dict[str, Any]]]] = {}
        """The last answer about a run's dead letters, and the counts of its ledger then: there may be many."""

    def is_up(self, run_dir: Path) -> bool:
        """True while an `up` holds the directory."""
        try:
            return is_up(run_dir)
        except OSError:
            return False

    async def fleet(self, run_dir: Path) -> dict[str, Any]:
        """The output of `meshrl fleet --json`. Raises MeshError."""
        async with self._asking:
            mesh = await asyncio.to_thread(mesh_of, run_dir, role=MeshRole.READER)
            assert mesh.trainer is not None
            address = MeshAddress(trainer=mesh.trainer, run_dir=run_dir)
            return membership_json(await read_membership(address))

    async def flow(self, run_dir: Path) -> dict[str, Any]:
        """The answers of `meshrl ledger`, `why-waiting` and `dead-letters`. Raises MeshError."""
        async with self._asking:
            mesh = await asyncio.to_thread(mesh_of, run_dir, stopped=True, role=MeshRole.READER)
            if mesh.stopped is None:
                async with mesh.open_queue(RETRY_S) as queue:
                    return await self._flow(run_dir, mesh, queue)
            files = _files(mesh.stopped.queue_path)
            if run_dir not in self._stored or self._stored[run_dir][0] != files:
                async with mesh.open_queue() as queue:
                    answer = await self._flow(run_dir, mesh, queue)
                self._stored[run_dir] = (_files(mesh.stopped.queue_path), answer)
            return self._stored[run_dir][1]

    async def replay(self, run_dir: Path, stage: str, outcome: str, reason: str) -> int:
        """Replay the dead letters of one reason, as `meshrl dead-letters replay`. Raises MeshError."""
        async with self._asking:
            mesh = await asyncio.to_thread(mesh_of, run_dir, stopped=True, role=MeshRole.OPERATOR)
            async with mesh.open_queue(RETRY_S) as queue:
                uids = [
                    one.uid
                    for one in await queue.dead_letters(mesh.run)
                    if (one.stage, one.outcome.value, one.reason[:LONGEST_REASON])
                    == (stage, outcome, reason)
                ]
                return await queue.replay(mesh.run, uids)

    async def _flow(self, run_dir: Path, mesh: Mesh, queue: Queue) -> dict[str, Any]:
        up = mesh.stopped is None
        ledgers = await mesh.ledgers(queue)
        waits = await mesh.waits(queue) if up else []
        counts = ledgers[0].dead_lettered
        if run_dir not in self._letters or self._letters[run_dir][0] != counts:
            self._letters[run_dir] = counts, _by_reason(await queue.dead_letters(mesh.run))
        return {
            "up": up,
            "ledgers": [asdict(one) | {"balanced": one.balanced} for one in ledgers],
            "waiting": [
                asdict(wait)
                | {"uids": [str(uid) for uid in wait.uids[:SHOWN_UIDS]], "rows": len(wait.uids)}
                for wait in waits[:SHOWN_WAITS]
            ],
            "dead_letters": self._letters[run_dir][1],
        }


def _files(directory: Path) -> Mapping[Path, int]:
    """When each file under `directory` was changed, in ns."""
    try:
        return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    except OSError:
        return {}


def _by_reason(letters: Sequence[DeadLetter]) -> list[dict[str, Any]]:
    """Rows that were given up by stage, outcome and reason, the most frequent first."""
    counted = Counter((one.stage, one.outcome.value, one.reason) for one in letters)
    return [
        {
            "stage": stage,
            "outcome": outcome,
            "reason": reason[:LONGEST_REASON],
            "rows": count,
            "uids": [
                str(one.uid)
                for one in letters
                if (one.stage, one.outcome.value, one.reason) == (stage, outcome, reason)
            ][:SHOWN_UIDS],
        }
        for (stage, outcome, reason), count in counted.most_common(SHOWN_REASONS)
    ]
