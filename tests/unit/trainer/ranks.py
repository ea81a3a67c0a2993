"""Programs of several ranks without the seconds of imports: one process has imported them, and forks.

stdin  ◀── {"program", "arguments", "ranks", "port", "output"}, a job a line; a program is a function
stdout ──▶ the exit codes of its ranks, a line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from meshrl.launcher.address_book import free_port


class Ranks:
    """The test's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, *arguments: object, output: Path, ranks: int = 1) -> None:
        """Run `program` as so many ranks to their end; all must succeed. They print into `output`.

        `program` is a function of `rank_programs`; arguments become JSON.
        """
        job = {
            "program": program,
            "arguments": arguments,
            "ranks": ranks,
            "port": str(free_port("127.0.0.1")),
            "output": str(output),
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job, default=str) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline() or "null")
        assert codes == [0] * ranks, f"{program}: exit codes {codes}"

    def close(self) -> None:
        with self._process:  # closes its pipes
            self._process.kill()


def serve() -> None:
    """The end that forks, in a process with nothing but imports behind it."""
    sys.path += [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]
    import rank_programs
    import torch

    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        job = json.loads(line)
        all_done, not_done = os.pipe()
        children = [
            start(rank_programs, job, rank, all_done, not_done) for rank in range(job["ranks"])
        ]
        os.close(not_done)
        os.close(all_done)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), file=replies)


def start(
    programs: ModuleType, job: dict[str, Any], rank: int, all_done: int, not_done: int
) -> int:
    """One rank, which ends when all have closed `not_done`: gloo's last bytes to others may go with its sockets."""
    if child := os.fork():
        return child
    code = 1
    try:
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        sys.stdout = os.fdopen(1, "w", buffering=1)  # a line at once: ranks write into one file
        if job["ranks"] > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=job["port"],
            )  # fmt: skip
        getattr(programs, job["program"])(*job["arguments"])
        os.close(not_done)
        os.read(all_done, 1)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
