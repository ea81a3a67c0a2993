"""Forks with and without an open connection: `python forks.py ADDRESS` prints what each process can do."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Callable

from client_scenes import spec

from meshrl.client import UserError
from meshrl.client.sync import Queue, Run


def connect() -> None:
    with Queue.connect(sys.argv[1]) as queue:
        print(queue.open_run(spec("forks")).name, flush=True)


def in_a_fork(call: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(60, exit=True)  # ends a fork that hangs
        try:
            call()
        except UserError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)


def with_a_connection(run: Run) -> None:
    in_a_fork(run.ledger)
    in_a_fork(connect)
    print(run.ledger().run, flush=True)


def main() -> None:
    with Queue.connect(sys.argv[1]) as queue:
        with_a_connection(queue.open_run(spec("forks")))
    del queue
    gc.collect()
    in_a_fork(connect)


if __name__ == "__main__":
    main()
