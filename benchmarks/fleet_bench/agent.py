"""A long-tailed task: an agent that thinks, calls a tool, thinks again; lengths are drawn from the row's name.

Turns are geometric, tokens of a turn log-normal, a tool takes 50 to 500 ms (an `asyncio.sleep`, as a call to a
service elsewhere is). Trajectories of eight agents that began together end seconds apart: that is what waiting
for the slowest costs.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import numpy as np

from meshrl.contract.types import GenerateRequest, Outcome, Task, Trajectory, Uid, VersionSpan
from meshrl.rollout.ports import Generator, Rollout
from meshrl.rollout.streams import Response, sample
from meshrl.rollout.tokenizer import Tokenizer

GOES_ON, MOST_TURNS = 0.6, 10
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 60, 1.0, 1_200
TOOL_S = (0.05, 0.5)


async def run(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout:
    """One trajectory; see `meshrl.rollout.ports.Program`."""
    draw = random.Random(f"{uid.task}/{uid.index}")
    turns: list[Response] = []
    while True:
        tokens = int(MEDIAN_TOKENS * math.exp(draw.gauss(0, SIGMA)))
        request = GenerateRequest(
            request_id=f"{uid}/{len(turns)}",
            prompt_ids=task.prompt_ids,
            sampling=replace(task.sampling, max_tokens=min(max(1, tokens), MOST_TOKENS)),
        )
        turns.append(await sample(engine, request))
        if draw.random() > GOES_ON or len(turns) == MOST_TURNS:
            return joined(task, uid, turns)
        await asyncio.sleep(draw.uniform(*TOOL_S))


def joined(task: Task, uid: Uid, turns: list[Response]) -> Rollout:
    """The turns as one row, each token under the version that sampled it."""
    tokens = np.concatenate([task.prompt_ids, *(turn.tokens for turn in turns)])
    prompt = len(task.prompt_ids)
    spans: list[VersionSpan] = []
    start = prompt
    for turn in turns:
        for span in turn.spans:
            if spans and spans[-1].version == span.version:
                spans[-1] = replace(spans[-1], end=start + span.end)
            else:
                shifted = replace(span, start=start + span.start, end=start + span.end)
                spans.append(shifted)
        start += len(turn.tokens)
    mask = np.ones(len(tokens), dtype=np.uint8)
    mask[:prompt] = 0
    logprobs = np.concatenate([np.zeros(prompt), *(turn.logprobs for turn in turns)])
    trajectory = Trajectory(
        uid=uid,
        tokens=tokens.astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs.astype(np.float32),
        spans=tuple(spans),
        response_text="",
    )
    return Rollout(trajectory=trajectory, outcome=Outcome.OK, finish_reason="stop")
