"""The reward stage: leases rows with a response and no reward, and writes their scores back."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.ports import Judge, Queue
from meshrl.contract.rows import (
    column_posted,
    column_text,
    reward_inputs,
    reward_write,
    text_column,
    times_column,
)
from meshrl.contract.stage_worker import Failure, Intake, StageResult, StageStats, StageWorker
from meshrl.contract.types import (
    DATA_SOURCE,
    POSTED_REWARD,
    REWARD_INPUTS,
    REWARD_STAGE,
    REWARD_TIMES,
    Int32,
    LeasedRow,
    Outcome,
    Sample,
    Score,
)
from meshrl.rewardd.judge import POSTED

MOST_COMPONENT_NAMES = 256
"""Different names of components that this process writes for one run: each is a curve in every metric and view."""
log = logging.getLogger(__name__)

TokenEnds = Callable[[Int32], Sequence[int]]
"""Maps response tokens, int32[R], to R counts: characters of the response up to the end of each token."""


INTAKE = Intake(limit=256, per_call=16)


class RewardStage:
    """Scores the rows of `runs` (for example a training run and its evaluation) until drained."""

    def __init__(
        self,
        queue: Queue,
        runs: Sequence[str],
        judge: Judge,
        *,
        worker: str,
        intake: Intake = INTAKE,
        keep_inputs: Collection[str] = (),
        token_rewards: Collection[str] = (),
        token_ends: TokenEnds | None = None,
    ) -> None:
        """Leases nothing before `run`.

        Args:
            queue: The queue of the runs.
            runs: Names of the runs whose rows are scored.
            judge: Scores the rows.
            worker: This stage's name in leases.
            intake: How many rows it holds, and how many one call of the judge scores.
            keep_inputs: Runs whose rows also keep the judge's inputs (`reward_inputs`), to be scored again.
            token_rewards: Runs whose rows carry a reward for each token (`token_rewards`).
            token_ends: For these runs: computes `extra_info["token_ends"]`, where in the text each token ends.
        """
        self._judge = judge
        self._keep_inputs = keep_inputs
        self._token_rewards = token_rewards
        self._token_ends = token_ends
        self._component_names: dict[str, set[str]] = defaultdict(set)
        """Component names by run."""
        self._told: set[str] = set()
        """Runs whose further names are dropped."""
        self._loop = StageWorker(
            queue,
            runs,
            REWARD_STAGE,
            self._handle,
            worker=worker,
            intake=intake,
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
        """Lease no more; `run` returns when the held rows are scored."""
        self._loop.drain()

    async def run(self, *, grace_s: float = 30.0) -> None:
        """Score until drained. Raises ConfigError when the judge cannot be started."""
        await self._loop.run(grace_s=grace_s)

    async def _handle(self, rows: Sequence[LeasedRow]) -> Sequence[StageResult]:
        samples = [sample_of(row, self._token_ends) for row in rows]
        began = time.time()
        scores = await self._judge.score(samples)
        times = times_column(began, time.time())
        results: list[StageResult] = []
        for row, sample, score in zip(rows, samples, scores, strict=True):
            if not score.outcome.trainable:
                # The row goes back to the queue: an infrastructure fault never becomes a reward.
                fault, lasting = score.outcome, score.lasting
                results.append(
                    Failure(uid=row.uid, outcome=fault, reason=score.reason, lasting=lasting)
                )
                continue
            mask = row.columns.get("loss_mask") if row.uid.run in self._token_rewards else None
            try:
                written = reward_write(self._with_known_components(score), loss_mask=mask)
            except UserError as error:
                fault, reason = Outcome.INFRA_FAULT, error.message
                results.append(Failure(uid=row.uid, outcome=fault, reason=reason, lasting=True))
                continue
            columns = {**written.columns, REWARD_TIMES: times}
            if sample.data_source:
                columns[DATA_SOURCE] = text_column(sample.data_source)
            if row.uid.run in self._keep_inputs:
                columns[REWARD_INPUTS] = reward_inputs(sample)
            results.append(replace(written, columns=columns))
        return results

    def _with_known_components(self, score: Score) -> Score:
        """`score` without the components beyond its run's limit of names; the first is logged."""
        names = self._component_names[score.uid.run]
        kept = {}
        for name, value in score.components.items():
            if len(names) < MOST_COMPONENT_NAMES:
                names.add(name)
            if name in names:
                kept[name] = value
            elif score.uid.run not in self._told:
                self._told.add(score.uid.run)
                log.warning(
                    "run %s: its rewards have components of more than %d names; %r and further ones are dropped",
                    score.uid.run,
                    MOST_COMPONENT_NAMES,
                    name,
                )
        return replace(score, components=kept)


def sample_of(row: LeasedRow, token_ends: TokenEnds | None = None) -> Sample:
    """The judge's input of a row: its task and the response.

    Added to `extra_info`: with a `loss_mask` column `response_length` (tokens from the first sampled one on) and
    `num_turns` (of both sides, the prompt being one, as verl counts); with `token_ends` and a `tokens` column
    `token_ends`; and `posted_reward` if the row's agent posted one.
    """
    extra_info = {key: value for key, value in row.task.extra_info.items() if key != POSTED}
    posted = row.columns.get(POSTED_REWARD)
    if posted is not None and (reward := column_posted(posted)) is not None:
        extra_info[POSTED] = reward.to_json()
    mask = row.columns.get("loss_mask")
    if mask is not None:
        length = len(mask) - int(np.argmax(mask)) if mask.any() else 0
        extra_info["response_length"] = length
        extra_info["num_turns"] = 1 + int(np.count_nonzero(np.diff(mask)))
        tokens = row.columns.get("tokens")
        if token_ends is not None and tokens is not None:
            extra_info["token_ends"] = list(token_ends(tokens[len(tokens) - length :]))
    return Sample(
        uid=row.uid,
        data_source=row.task.data_source,
        solution=column_text(row.columns["response_text"]),
        ground_truth=row.task.ground_truth,
        extra_info=extra_info,
        messages=row.task.conversation,
    )


def token_ends(directory: Path) -> TokenEnds:
    """A function from response tokens, int32[R], to R counts of characters: where in the text each token ends.

    A special token adds 0 characters. A character of several tokens ends with the last of them.

    Raises:
        ConfigError: `directory` has no tokenizer.json, or the package tokenizers is missing.
    """
    file = directory / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream
    except ImportError as error:
        raise ConfigError(
            "reward.token_rewards needs the package tokenizers: pip install tokenizers"
        ) from error
    if not file.is_file():
        raise ConfigError(f"reward.token_rewards needs {file}, which does not exist")
    tokenizer = Tokenizer.from_file(str(file))

    def ends(tokens: Int32) -> Sequence[int]:
        stream = DecodeStream(skip_special_tokens=True)
        return list(accumulate(len(stream.step(tokenizer, int(t)) or "") for t in tokens))

    return ends
