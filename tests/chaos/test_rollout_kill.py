"""kill -9 and SIGTERM at rollout processes in mid-response: others continue the responses, token for token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from meshrl.contract import rows
from meshrl.contract.types import (
    ROLLOUT_COLUMNS,
    ROLLOUT_STAGE,
    SamplingParams,
    Task,
    Trajectory,
    Uid,
)
from meshrl.testing.contract.queue_actors import Actors, spec
from meshrl.transferqueue.queue import TransferQueue

from ..processes import python
from ..unit.rollout.checkpoints import forced_logprobs, greedy, make_model
from .rollout_process import FIRST, RUN, Numbers

pytestmark = pytest.mark.slow

GROUP = 4
GROUPS = 6
SLOTS = 6
INTERVAL = 16
LENGTHS = [60 + 9 * number for number in range(GROUPS)]
"""Response tokens by task; so few slots that of one group some siblings are done, some run, some wait."""
TOKENS = GROUP * sum(LENGTHS)


class Worker:
    """One rollout process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log
        self._read = 0
        self._responses: dict[str, tuple[int, int]] = {}

    async def go(self) -> None:
        assert self.process.stdout is not None and self.process.stdin is not None
        assert await self.process.stdout.readline() == b"ready\n"
        self.process.stdin.write(b"go\n")

    def responses(self) -> dict[str, tuple[int, int]]:
        """Tokens of each response when it began, and now, by uid."""
        found = self._responses
        with self._log.open("rb") as log:
            log.seek(self._read)
            whole, newline, _ = log.read().rpartition(b"\n")  # the last line may be half written
        self._read += len(whole + newline)
        for line in whole.splitlines():
            event = json.loads(line)
            if "continued" in event:
                found[event["uid"]] = (event["continued"], event["continued"])
            else:
                found[event["uid"]] = (found[event["uid"]][0], event["tokens"])
        return found

    async def sampled(self, tokens: int) -> None:
        """Wait until it has sampled so many tokens."""
        async with asyncio.timeout(120):
            while sum(end - start for start, end in self.responses().values()) < tokens:
                assert self.process.returncode is None
                await asyncio.sleep(0.01)

    async def end(self, number: signal.Signals) -> int:
        os.kill(self.process.pid, number)
        return await self.process.wait()


@asynccontextmanager
async def rollout_process(address: str, model: Path, name: str) -> AsyncIterator[Worker]:
    log = model / f"{name}.jsonl"
    options = {"queue": address, "model": model, "log": log, "slots": SLOTS, "interval": INTERVAL}
    words = [f"--{key}={value}" for key, value in options.items()]
    log.touch()
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    async with python("-m", "tests.chaos.rollout_process", *words, **pipes) as process:
        yield Worker(process, log)


def task(number: int) -> Task:
    """Every second one is greedy."""
    return Task(
        run=RUN,
        task_id=f"t{number}",
        prompt_ids=np.arange(3, 9 + number, dtype=np.int32),
        group_size=GROUP,
        sampling=SamplingParams(
            max_tokens=LENGTHS[number], temperature=float(number % 2), seed=number
        ),
    )


def number_of(uid: Uid) -> int:
    return int(uid.task[1:])


async def everything(actors: Actors) -> list[Trajectory]:
    batch = await actors.take(0, groups=GROUPS, wait_s=120)
    uids = [row.uid for row in batch.rows]
    columns = await actors.queue.fetch_rows(RUN, uids, ROLLOUT_COLUMNS)
    return [rows.trajectory(uid, each) for uid, each in zip(uids, columns, strict=True)]


async def test_responses_outlive_the_processes_that_sample_them(
    queue: TransferQueue, queue_address: str, tmp_path: Path
) -> None:
    model = make_model(
        "Qwen3",
        **{"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 6, "head_dim": 32},
        **{"tie_word_embeddings": True, "max_position_embeddings": 512, "initializer_range": 0.1},
    )
    model.save_pretrained(tmp_path)
    actors = Actors(queue, RUN)
    async with AsyncExitStack() as stack:
        killed, drained, last = [
            await stack.enter_async_context(rollout_process(queue_address, tmp_path, name))
            for name in ("killed", "drained", "last")
        ]
        changes = {"group_size": GROUP, "batch_groups": GROUPS, "stages": (ROLLOUT_STAGE,)}
        await actors.start(spec(RUN, **changes, lease_ttl_s=15.0))  # no busy machine is a death
        await actors.feed([task(number) for number in range(GROUPS)])
        await queue.close_feed(RUN)

        await killed.go()
        await killed.sampled(TOKENS // 3)
        assert await killed.end(signal.SIGKILL) == -signal.SIGKILL
        await drained.go()
        await drained.sampled(TOKENS // 3)
        assert await drained.end(signal.SIGTERM) == 0
        await last.go()
        done = await everything(actors)
        ledger = await queue.ledger(RUN)
        assert await last.end(signal.SIGTERM) == 0

    before, between, after = killed.responses(), drained.responses(), last.responses()
    # The drained process has given all that it had to its successors, and the killed one all but an interval a row.
    moved = between.keys() & after.keys()
    assert moved
    assert [after[uid][0] for uid in moved] == [between[uid][1] for uid in moved]
    torn = before.keys() & (between.keys() | after.keys())
    went_on = {uid: (between.get(uid) or after[uid])[0] for uid in torn}
    assert 0 < len(torn) <= SLOTS and any(went_on.values())
    assert 0 <= sum(before[uid][1] - went_on[uid] for uid in torn) <= INTERVAL * len(torn)
    # Groups that were done stay as they were.
    assert len(before.keys() - torn) >= GROUP
    assert all(before[uid][1] == LENGTHS[number_of(Uid.parse(uid))] for uid in before.keys() - torn)

    assert ledger.balanced and not ledger.dead_lettered
    assert len(done) == GROUPS * GROUP
    model.generation_config.eos_token_id = None
    expected = {
        number: greedy(model, task(number).prompt_ids.tolist(), LENGTHS[number])
        for number in range(0, GROUPS, 2)
    }
    for row in done:
        row_task = task(number_of(row.uid))
        prompt = row_task.prompt_ids.tolist()
        response = row.tokens[len(prompt) :].tolist()
        assert row.tokens[: len(prompt)].tolist() == prompt
        assert len(response) == row_task.sampling.max_tokens
        assert row.loss_mask.tolist() == [0] * len(prompt) + [1] * len(response)
        assert [(s.version, s.start, s.end) for s in row.spans] == [
            (FIRST, len(prompt), len(row.tokens))
        ]
        assert row.response_text == Numbers().decode(response)
        want = forced_logprobs(model, prompt, response)
        np.testing.assert_allclose(row.rollout_logprobs[len(prompt) :], want, atol=1e-3)
        if row_task.sampling.temperature == 0:
            assert response == expected[number_of(row.uid)]
