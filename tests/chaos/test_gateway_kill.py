"""kill -9 of a worker during its agents' conversations: the agents end with it, their rows start again at another."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np

from meshrl.contract.rows import column_posted
from meshrl.contract.types import POSTED_REWARD, SamplingParams, rollout_stage
from meshrl.testing.contract.queue_actors import Actors, spec, task
from meshrl.transferqueue.queue import TransferQueue

from ..chat_model import write_chat_model
from ..processes import python
from ..waiting import gone, runs, until
from .gateway_process import RUN

AGENT = """
import json, os, subprocess, sys, urllib.request
def post(path, body):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
task = json.load(sys.stdin)
answer = post("/completions", {"prompt": "x", "max_tokens": 4})
if os.path.exists(sys.argv[1] + ".hang"):
    # A child in a session of its own, which a signal to the group would miss.
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(sys.argv[1], "a") as pids:
        pids.write(f"{os.getpid()} {child.pid}\\n")
    child.wait()
post("/reward", {"score": 7})
"""


def gateway_process(
    address: str, model: Path, name: str
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    options = {
        "queue": address,
        "name": name,
        "model": model,
        "agent": model / "agent.py",
        "pids": model / "pids",
    }
    words = [f"--{key}={value}" for key, value in options.items()]
    return python("-m", "tests.chaos.gateway_process", *words)


def pids(path: Path) -> list[int]:
    found = path / "pids"
    return [int(pid) for pid in found.read_text().split()] if found.exists() else []


async def test_agents_end_with_their_worker_and_their_rows_start_again(
    queue: TransferQueue, queue_address: str, tmp_path: Path
) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    hang = tmp_path / "pids.hang"
    hang.touch()
    actors = Actors(queue, RUN)
    stages = (rollout_stage(posted=True),)
    await actors.start(spec(RUN, batch_groups=1, lease_ttl_s=3.0, stages=stages))
    one_token = {"prompt_ids": np.array([5], np.int32), "sampling": SamplingParams(max_tokens=40)}
    await actors.feed([task("t", RUN, program="openai", **one_token)])
    async with gateway_process(queue_address, tmp_path, "w0") as first:
        await until(lambda: len(pids(tmp_path)) >= 4)
        assert len(pids(tmp_path)) == 4 and all(map(runs, pids(tmp_path)))
        os.kill(first.pid, signal.SIGKILL)
        await first.wait()
    await gone(*pids(tmp_path))
    hang.unlink()
    async with gateway_process(queue_address, tmp_path, "w1") as second:
        batch = await actors.take(0, groups=1, wait_s=120)
        rows = await queue.fetch_rows(
            RUN, [row.uid for row in batch.rows], (POSTED_REWARD, "loss_mask")
        )
        rewards = [column_posted(row[POSTED_REWARD]) for row in rows]
        assert [reward.score for reward in rewards if reward] == [7.0, 7.0]
        assert [int(row["loss_mask"].sum()) for row in rows] == [1, 1]
        await actors.ledger()
        second.send_signal(signal.SIGTERM)
        assert await second.wait() == 0
