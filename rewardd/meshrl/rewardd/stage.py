"""The reward stage: leases rows that have a response and no reward, and writes their scores back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.contract.nouns import REWARD_STAGE, LeasedRow, Sample, Score
from meshrl.contract.ports import Judge, Queue
from meshrl.contract.rows import column_text, reward_write
from meshrl.contract.stage import Failure, StageLoop, StageResult, StageStats


class RewardStage:
    """Scores the rows of `runs` (a training run and its evaluation, say) until drained."""

    def __init__(
        self,
        queue: Queue,
        runs: Sequence[str],
        judge: Judge,
        *,
        worker: str,
        limit: int = 256,
        rows_per_call: int = 16,
    ) -> None:
        self._judge = judge
        self._loop = StageLoop(
            queue,
            runs,
            REWARD_STAGE,
            self._handle,
            worker=worker,
            limit=limit,
            rows_per_call=rows_per_call,
        )

    @property
    def stats(self) -> StageStats:
        """Rows since the start."""
        return self._loop.stats

    @property
    def held(self) -> int:
        """Rows being scored now."""
        return self._loop.held

    def drain(self) -> None:
        """Lease no more; `run` returns when what is held is scored."""
        self._loop.drain()

    async def run(self, *, grace_s: float = 30.0) -> None:
        """Score until drained. Raises ConfigError when the judge cannot be started."""
        await self._loop.run(grace_s=grace_s)

    async def _handle(self, rows: Sequence[LeasedRow]) -> Sequence[StageResult]:
        results: list[StageResult] = []
        for score in await self._judge.score([sample_of(row) for row in rows]):
            results.append(_result(score))
        return results


def sample_of(row: LeasedRow) -> Sample:
    """What the judge sees of a row: its task and the response.

    `extra_info` gains `response_length`, in tokens from the first sampled one on, where `loss_mask` was leased too.
    """
    extra_info = dict(row.task.extra_info)
    mask = row.columns.get("loss_mask")
    if mask is not None:
        extra_info["response_length"] = len(mask) - int(np.argmax(mask)) if mask.any() else 0
    return Sample(
        uid=row.uid,
        data_source=row.task.data_source,
        solution=column_text(row.columns["response_text"]),
        ground_truth=row.task.ground_truth,
        extra_info=extra_info,
    )


def _result(score: Score) -> StageResult:
    """An infrastructure fault is given back to the queue: it never becomes a reward."""
    if score.outcome.trainable:
        return reward_write(score)
    return Failure(uid=score.uid, outcome=score.outcome, reason=score.reason)
