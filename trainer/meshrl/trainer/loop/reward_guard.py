"""Each batch is scored by one version of the reward, even if another was submitted while its rows were under way.

    take ──▶ hashes of its rows ─┬─ all as the step before ─────────────▶ as they are
                                 └─ otherwise: H = the version of now ──▶ rows that are not H are scored again with H

Why a batch cannot mix: a step trains on what `take` gave and `fetch` reads. `take` fixes one H for the step (all
takes of a step share it), and returns only after each of its rows either carries H in the queue or has a score by H
in the overlay, checked by the hash in that score. `fetch` gives the overlay's columns for the latter and the queue's
for the former. Nothing in this looks at the order of rows, at staleness, refills or redeliveries: none can break it.

Why a switch happens once, between batches: H is the version of the step before, or the one that the reward
service names as current when asked; what it names only moves on. So H moves only between steps, and never back to a
version that was superseded, although rows scored by that one may still arrive.

After a kill: the overlay dies with the trainer. Its batch was not settled, so the next trainer takes it again
and decides anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from meshrl.contract.errors import InfraError, UserError, WaitTimeoutError
from meshrl.contract.ports import Queue
from meshrl.contract.rows import column_text, reward_write, sample_again, text_column
from meshrl.contract.types import (
    REWARD_INPUTS,
    TOKEN_REWARDS,
    Batch,
    Columns,
    Json,
    Sample,
    Score,
    Uid,
)

log = logging.getLogger(__name__)

TRIES = 3
"""Attempts to score a row again; then its group leaves the run as filtered."""
REASON = "not scored again"


class RewardVersions(Protocol):
    """The reward service, as far as a batch needs it."""

    async def current(self) -> str:
        """The version that scores now."""
        ...

    async def score(self, samples: Sequence[Sample], *, reward_hash: str) -> Sequence[Score]:
        """One Score per sample, in order, by version `reward_hash`."""
        ...


class BatchQueue(Protocol):
    """Queue calls of a step about its own batch; a Queue is one, and so is the guard around it."""

    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        """Lease complete groups for a step; see Queue."""
        ...

    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        """The columns of rows, in the order of `uids`; see Queue."""
        ...


class RewardVersionGuard:
    """A BatchQueue whose batches are of one reward version."""

    def __init__(
        self, queue: Queue, versions: RewardVersions | None, *, token_rewards: bool = False
    ) -> None:
        """Guard the batches of `queue`.

        Args:
            queue: Source of batches.
            versions: The reward service; None where none is known, then a mixed batch is refused.
            token_rewards: Whether rows have a reward for each token.
        """
        self._queue = queue
        self._versions = versions
        self._token_rewards = token_rewards
        self._step = -1
        self._hash = ""
        """Reward version of the last batch, after rows of other versions were scored again."""
        self._hash_of_step = ""
        self._taking: dict[str, asyncio.Task[Batch]] = {}
        self._overlay: dict[Uid, Columns] = {}

    @property
    def metrics(self) -> dict[str, Json]:
        """Metrics of the step under way."""
        return {"reward/hash": self._hash, "reward/rescored_rows": len(self._overlay)}

    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        """Take a batch of one reward version; taking again joins the scoring under way.

        Raises:
            UserError: rows of several versions, and no reward service is known.
        """
        if step != self._step:
            self._step, self._hash_of_step = step, ""
            self._taking.clear()
            self._overlay.clear()
        if batch_id not in self._taking:
            batch = await self._queue.take(
                run, epoch=epoch, step=step, groups=groups, batch_id=batch_id, wait_s=wait_s
            )
            self._taking[batch_id] = asyncio.create_task(
                self._unified(batch, epoch), name="reward-version"
            )
        scoring = self._taking[batch_id]
        await asyncio.wait({scoring}, timeout=max(wait_s, 0.01))
        if not scoring.done():
            raise WaitTimeoutError(
                f"step {step + 1}: rows are being scored with version {self._hash}"
            )
        if scoring.cancelled() or scoring.exception() is not None:
            del self._taking[batch_id]
        return scoring.result()

    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        """Fetch rows, with the scores of `take`."""
        stored = await self._queue.fetch_rows(run, uids, columns)
        return [self._overlaid(uid, row) for uid, row in zip(uids, stored, strict=True)]

    async def close(self) -> None:
        """Cancel the scoring under way; idempotent. The queue stays open."""
        for task in self._taking.values():
            task.cancel()
        await asyncio.gather(*self._taking.values(), return_exceptions=True)

    def to_json(self) -> Json:
        """The scores of this step's rows, for the other ranks."""
        return {
            str(uid): {
                **{name: column_text(c[name]) for name in _TEXTS},
                **{name: c[name].tolist() for name in _NUMBERS if name in c},
            }
            for uid, c in self._overlay.items()
        }

    def load_json(self, scores: Mapping[str, Json]) -> None:
        """On another rank: take over what `to_json` gave on rank 0."""
        self._overlay = {}
        for uid, columns in scores.items():
            self._overlay[Uid.parse(uid)] = {
                name: text_column(value) if name in _TEXTS else np.array(value, dtype=np.float32)
                for name, value in columns.items()
            }

    def _overlaid(self, uid: Uid, row: Columns) -> Columns:
        over = self._overlay.get(uid)
        return row if over is None else {name: over.get(name, row[name]) for name in row}

    async def _unified(self, batch: Batch, epoch: int) -> Batch:
        uids = [row.uid for row in batch.rows]
        if not uids:  # all of it was damaged
            return batch
        rows = await self._queue.fetch_rows(batch.run, uids, ("reward_hash",))
        hashes = [column_text(row["reward_hash"]) for row in rows]
        current = self._hash_of_step = self._hash_of_step or await self._version_of(hashes)
        self._hash = current
        outdated = [uid for uid, own in zip(uids, hashes, strict=True) if own != current]
        if not outdated:
            return batch
        log.info(
            "step %d: %d of %d rows are scored again, with version %s",
            batch.step + 1,
            len(outdated),
            len(uids),
            current,
        )
        lost = await self._score_again(batch.run, outdated, current)
        if not lost:
            return batch
        tasks = {uid.task for uid in lost}
        leaving = [uid for uid in uids if uid.task in tasks]
        await self._queue.filter(batch.run, epoch=epoch, uids=leaving, reason=REASON)
        groups = tuple(group for group in batch.groups if group.task not in tasks)
        if not groups:
            raise InfraError(f"reward version {current} scores no row of step {batch.step + 1}")
        return replace(batch, groups=groups)

    async def _version_of(self, hashes: Sequence[str]) -> str:
        """H; the service is asked only when the rows differ from one another or from the step before."""
        distinct = set(hashes)
        if distinct == {self._hash}:
            return self._hash
        if self._versions is not None:
            return await self._versions.current()
        if len(distinct) == 1:
            return distinct.pop()
        raise self._refused(f"{len(distinct)} reward versions")

    def _refused(self, found: str) -> UserError:
        return UserError(
            f"the batch of step {self._step + 1} has rows of {found}, and this trainer knows no reward service to"
            " score them again: give --reward HOST:PORT, or set reward.mixed_versions=allow"
        )

    async def _score_again(self, run: str, uids: Sequence[Uid], current: str) -> Collection[Uid]:
        """Fill the overlay; returns the rows that could not be scored."""
        if self._versions is None:  # a take of a step whose earlier takes were of another version
            raise self._refused(f"another reward version than {current}, the step's")
        names = ["response_text", REWARD_INPUTS]
        if self._token_rewards:
            names.append("loss_mask")
        rows = dict(zip(uids, await self._queue.fetch_rows(run, uids, names), strict=True))
        unscored = {uid: sample_again(uid, columns) for uid, columns in rows.items()}
        for _ in range(TRIES):
            for score in await self._versions.score(list(unscored.values()), reward_hash=current):
                if not score.outcome.trainable:
                    log.warning(
                        "row %s: version %s gives no score: %s", score.uid, current, score.reason
                    )
                elif score.reward_hash != current:
                    raise InfraError(
                        f"asked for a score by {current}, got one by {score.reward_hash}"
                    )
                else:
                    mask = rows[score.uid].get("loss_mask")
                    self._overlay[score.uid] = reward_write(score, loss_mask=mask).columns
                    del unscored[score.uid]
            if not unscored:
                break
        return unscored.keys()


_TEXTS = ("reward_components", "reward_hash")
_NUMBERS = ("reward", TOKEN_REWARDS)
