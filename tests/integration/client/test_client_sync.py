"""The client without await, against a queue process: the same methods, Ctrl-C, forks, drift."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.client import LeaseLostError, UserError
from meshrl.client.sync import Queue, Run

from .client_scenes import GROUP, answer, fill, queue_process, spec, tasks

SERVICES = Path(__file__).parents[3] / "services"


def test_the_sync_client_is_what_the_generator_writes() -> None:
    module = runpy.run_path(str(SERVICES / "generate_sync.py"))
    assert (SERVICES / "meshrl/client/sync.py").read_text() == module["text"](), "run: make sync"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with queue_process(tmp_path_factory.mktemp("queue")) as address:
        yield address


@pytest.fixture
def run(address: str, request: pytest.FixtureRequest) -> Iterator[Run]:
    with Queue.connect(address) as queue:
        yield queue.open_run(spec(request.node.name, lease_ttl_s=0.9))


def test_rows_go_from_put_to_trained(address: str) -> None:
    fill(address, 5)
    with Queue.connect(address) as queue:
        run = queue.run("run")
        batches = run.batches(groups=2)
        assert [len(batch.rows) for batch in batches] == [4, 4, 2]
        with batches.checkpoint() as step:
            assert step == 3
        assert run.ledger().trained == 5 * GROUP
        assert run.why_waiting() == []


def test_a_closed_queue_connects_again(address: str) -> None:
    queue = Queue.connect(address)
    for _ in range(2):
        with queue:
            queue.open_run(spec("again"))
    queue.close()
    with pytest.raises(UserError, match="not connected"):
        queue.run("again")


def test_a_lease_that_is_lost_in_its_block_raises_at_the_write(run: Run) -> None:
    run.put(tasks(1, run.name))
    with pytest.raises(LeaseLostError), run.lease("rollout", limit=GROUP) as lease:
        tokens = {row.uid: row.token for row in lease.rows}
        release = run._wrapped._port.release(run.name, "rollout", tokens)
        run._thread.call(release)
        while lease.held:
            threading.Event().wait(0.05)
        lease.write([answer(row) for row in lease.rows])
    assert run.ledger().resident["queued"] == GROUP


def test_ctrl_c_ends_a_wait_and_the_connection_still_works(run: Run) -> None:
    main = threading.get_ident()
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), run.lease("rollout"):
        raise AssertionError("there are no rows")
    assert run.why_waiting() == []
    run.put(tasks(1, run.name))
    with pytest.raises(KeyboardInterrupt), run.lease("rollout", limit=GROUP):
        raise KeyboardInterrupt
    assert run.ledger().resident["queued"] == GROUP


def test_a_fork_of_a_connected_process_says_so_and_one_of_a_closed_one_connects(
    address: str,
) -> None:
    script = Path(__file__).with_name("forks.py")
    done = subprocess.run(
        [sys.executable, str(script), address], capture_output=True, text=True, timeout=120
    )
    used, connected, parent, closed = done.stdout.splitlines()
    assert "does not work in its fork" in used
    assert "was forked from one with a queue connection" in connected
    assert (parent, closed) == ("forks", "forks")
