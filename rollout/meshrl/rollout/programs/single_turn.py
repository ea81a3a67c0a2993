"""The program `single_turn`: one prompt, one response."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshrl.contract.nouns import GenerateRequest, Outcome, Task, Trajectory, Uid
from meshrl.rollout.ports import Generator, Rollout
from meshrl.rollout.sampling import sample
from meshrl.rollout.tokenizer import Tokenizer

OUTCOMES = {"stop": Outcome.OK, "length": Outcome.TRUNCATED}
"""By finish reason; anything else means that the engine gave the request up."""


async def run(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout:
    """Sample one response to the task's prompt; see `meshrl.rollout.ports.Program`."""
    request = GenerateRequest(
        request_id=str(uid), prompt_ids=task.prompt_ids, sampling=task.sampling
    )
    response = await sample(engine, request)
    start = len(task.prompt_ids)
    zeros = np.zeros(start, dtype=np.float32)
    trajectory = Trajectory(
        uid=uid,
        tokens=np.concatenate([task.prompt_ids, response.tokens]).astype(np.int32),
        loss_mask=np.repeat(np.array([0, 1], dtype=np.uint8), [start, len(response.tokens)]),
        rollout_logprobs=np.concatenate([zeros, response.logprobs]),
        spans=tuple(
            replace(span, start=span.start + start, end=span.end + start) for span in response.spans
        ),
        response_text=tokenizer.decode(response.tokens.tolist()),
    )
    outcome = OUTCOMES.get(response.finish_reason, Outcome.CANCELLED)
    return Rollout(trajectory=trajectory, outcome=outcome, finish_reason=response.finish_reason)
