"""Keeps a run's rows: a Parquet file for each training step and evaluation, written beside training on rank 0.

    event loop        fetch texts beside `learn` ▸ hand over ▸ ········ next step
    compute thread    learn ────────────────────▸ Learned
    writer thread                                  table ▸ draft ▸ rename ▸ make room

consumes: rows of trained batches and of evaluations. waits for: nothing of training's. produces: files. Training
depends on none of this: what cannot be fetched or written is left out, with one warning until a file is written
again; a step that finds `MOST_WAITING` others unwritten is left out as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import MeshError
from meshrl.contract.rows import media_of_row, sample_again, trajectory, with_media
from meshrl.contract.types import (
    MEDIA,
    NOTES,
    REWARD_COLUMNS,
    REWARD_INPUTS,
    ROLLOUT_COLUMNS,
    BatchRow,
    Columns,
    Sample,
    Task,
    Trajectory,
    Version,
)
from meshrl.trainer.learner.experience import Schedule
from meshrl.trainer.learner.learner import Learned
from meshrl.trainer.loop.reward_guard import BatchQueue
from meshrl.trainer.trajectories.files import (
    FLOATS,
    PICTURES,
    SHARE,
    LoggedFile,
    PictureFiles,
    Split,
    beyond,
    draft_of,
    file_of,
    logged_files,
)
from meshrl.trainer.trajectories.table import (
    LoggedRow,
    LoggedStep,
    TableBuilder,
    open_decoder,
)

log = logging.getLogger(__name__)

MOST_WAITING = 4
"""Steps that wait for the writer; their rows are in memory."""
LARGE = (
    "prompt",
    "response",
    "extra_info",
    "messages.list.element.content",
    "prompt_ids.list.element",
    "response_ids.list.element",
    "token_texts.list.element",
    "loss_mask.list.element",
    *(f"{name}.list.element" for name in FLOATS),
)
# A column costs a writer more than its bytes: dictionaries, statistics and compression only where they pay.
ENCODING: dict[str, Any] = {
    "compression": {name: "zstd" for name in LARGE},
    "use_dictionary": ["token_texts.list.element", "prompt", "messages.list.element.content"],
    "write_statistics": ["step", "reward", "advantage", "staleness"],
}
CLOSE_S = 30.0
"""How long the end of training waits for the last files."""


class TrajectoryLog:
    """The folder of one run's rows; one process writes it."""

    def __init__(
        self,
        folder: Path,
        *,
        share: float = 1.0,
        max_bytes: int = 10 << 30,
        tokenizer: Path | None = None,
        keeps_inputs: bool = False,
        pictures: bool = False,
        on_rows: Callable[[int, Split, Any], None] | None = None,
    ) -> None:
        """Nothing is written before the first rows.

        Args:
            folder: Directory of the files; made when it is needed.
            share: Share of the groups that are kept, 0 for none. Which, depends on the task alone.
            max_bytes: Size limit of the folder; beyond it the oldest files go, down to nine tenths of it.
            tokenizer: Its directory, for the texts of prompts and tokens.
            keeps_inputs: Whether rows of training have what their judge saw.
            pictures: Whether prompts may have pictures, which are kept too.
            on_rows: Gets step, split and `pyarrow.Table` of what is written, in the writer's thread.
        """
        self._folder = folder
        self._share = share
        self._max_bytes = max_bytes
        self._tokenizer = tokenizer
        self._on_rows = on_rows
        self._columns = [*ROLLOUT_COLUMNS, *REWARD_COLUMNS, *chain(*NOTES.values())]
        if keeps_inputs:
            self._columns.append(REWARD_INPUTS)
        if pictures:
            self._columns.append(MEDIA)
        self._pictures = PictureFiles(folder / PICTURES, max_bytes // SHARE)
        self._jobs: queue.Queue[Callable[[], LoggedStep] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._builder: TableBuilder | None = None
        self._missed = 0
        self._files: dict[Path, LoggedFile] | None = None
        """Files in the folder; None before the first one is written."""
        self._bytes = 0

    def resume_at(self, step: int) -> None:
        """Remove files of what followed when `step` was made, which tell of a history that is no more, and drafts."""
        self._files = None
        try:
            # An older meshrl counted the steps of a run from 0.
            of_step = 0 if file_of(self._folder, "train", 0).exists() else 1
            gone = [
                file.path
                for file in logged_files(self._folder)
                if file.step >= step + of_step * (file.split == "train")
            ]
            for path in (*gone, *self._folder.glob(".*.writing")):
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: rows of steps after %d stay: %s", self._folder, step, error)

    @asynccontextmanager
    async def step(
        self, schedule: Schedule, epoch: int, batches: BatchQueue
    ) -> AsyncIterator[Callable[[Learned], None] | None]:
        """Around a step's `learn`, whose observer it gives: reads the rows meanwhile, and hands them over at the end.

        The rows must be in the queue until the end.
        """
        chosen = [at for at, row in enumerate(schedule.rows) if self._keeps(row.group)]
        if not chosen:
            yield None
            return
        rows = [schedule.rows[at] for at in chosen]
        learned: list[Learned] = []
        batch = schedule.batch
        reading = asyncio.create_task(
            _fetched(batches, batch.run, rows, self._columns), name=f"log-rows-{batch.step + 1}"
        )
        try:
            yield learned.append
            columns = await reading
        finally:
            reading.cancel()
        if columns is None:
            self._miss(f"the rows of step {batch.step + 1} could not be read")
            return
        now = time.time()

        def made() -> LoggedStep:
            return LoggedStep(
                split="train",
                step=batch.step + 1,
                epoch=epoch,
                time_unix_s=now,
                rows=_rows(rows, columns),
                per_token=per_token(learned[0], chosen),
            )

        self._hand_over(made, f"step {batch.step + 1}")

    def evaluated(
        self, version: Version, tasks: Mapping[str, Task], rows: Sequence[Trajectory]
    ) -> None:
        """Keep the rows of an evaluation of `version`; `tasks` has their tasks by id, in order."""
        place = {task: at for at, task in enumerate(tasks)}
        chosen = sorted(
            (row for row in rows if self._keeps(str(place[row.uid.task]))),
            key=lambda row: (place[row.uid.task], row.uid.index),
        )
        if not chosen:
            return
        now = time.time()

        def made() -> LoggedStep:
            return LoggedStep(
                split="eval",
                step=version.step,
                epoch=version.epoch,
                time_unix_s=now,
                rows=[_held_out(row, tasks[row.uid.task]) for row in chosen],
            )

        self._hand_over(made, f"the evaluation of {version}")

    def close(self) -> None:
        """Write what was handed over; idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        end = time.monotonic() + CLOSE_S
        try:
            self._jobs.put(None, timeout=CLOSE_S)
        except queue.Full:
            log.warning("%s: the last rows are not written", self._folder)
            return
        thread.join(timeout=max(0.0, end - time.monotonic()))

    def _keeps(self, group: str) -> bool:
        """The same for all rows of a group, and whenever it is asked."""
        if self._share >= 1.0:
            return True
        digest = hashlib.blake2b(group.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._share * 2**64

    def _hand_over(self, made: Callable[[], LoggedStep], what: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="trajectory-log", daemon=True
            )
            self._thread.start()
        try:
            self._jobs.put_nowait(made)
        except queue.Full:
            self._miss(f"the disk is behind, and the rows of {what} are left out")

    def _write_all(self) -> None:
        """Write all rows; the writer thread."""
        while (made := self._jobs.get()) is not None:
            try:
                self._write(made())
            except Exception as error:  # pyarrow and tokenizers raise anything, and training does not depend on them
                self._miss(f"{type(error).__name__}: {error}")
            else:
                if self._missed:
                    log.info("rows are logged again; %d files are missing", self._missed)
                self._missed = 0

    def _write(self, step: LoggedStep) -> None:
        import pyarrow.parquet as parquet

        if self._builder is None:
            self._builder = TableBuilder(open_decoder(self._tokenizer) if self._tokenizer else None)
        table = self._builder.build(step)
        if self._on_rows is not None:
            self._on_rows(step.step, step.split, table)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        media = {each.sha256: each for row in step.rows for each in row.trajectory.media}
        if media:
            self._pictures.keep(media.values())
        path = file_of(self._folder, step.split, step.step)
        draft = draft_of(path)
        try:
            with open(draft, "wb", opener=_private) as stream:
                parquet.write_table(table, stream, **ENCODING)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._make_room(LoggedFile(step.step, step.split, path, path.stat().st_size))

    def _make_room(self, written: LoggedFile) -> None:
        """Remove the oldest files where there are too many bytes, a tenth at once: a run may have very many files."""
        if self._files is None:
            self._files = {file.path: file for file in logged_files(self._folder)}
            self._bytes = sum(file.size for file in self._files.values())
        else:
            before = self._files.get(written.path)
            self._bytes += written.size - (before.size if before else 0)
            self._files[written.path] = written
        if self._bytes > self._max_bytes:
            for old in beyond(self._files.values(), self._max_bytes * 9 // 10):
                old.path.unlink(missing_ok=True)
                del self._files[old.path]
                self._bytes -= old.size

    def _miss(self, reason: str) -> None:
        """Count a file that is left out; the first one is worth a warning."""
        self._missed += 1
        if self._missed == 1:
            log.warning(
                "%s: no rows are logged for now, training continues: %s", self._folder, reason
            )


async def _fetched(
    batches: BatchQueue, run: str, rows: Sequence[BatchRow], columns: Sequence[str]
) -> Sequence[Columns] | None:
    """The columns of rows; None where the queue does not give them: the trainer will report why."""
    try:
        return await batches.fetch_rows(run, [row.uid for row in rows], columns)
    except MeshError as error:
        log.debug("rows to log: %s", error)
        return None


def _rows(rows: Sequence[BatchRow], columns: Sequence[Columns]) -> list[LoggedRow]:
    made = with_media(
        [trajectory(row.uid, column) for row, column in zip(rows, columns, strict=True)]
    )
    return [
        LoggedRow(
            trajectory=each,
            start=each.prompt_length,
            group_size=row.group_size,
            outcome=str(row.outcome),
            sample=sample_again(row.uid, column) if REWARD_INPUTS in column else None,
        )
        for row, column, each in zip(rows, columns, made, strict=True)
    ]


def _held_out(row: Trajectory, task: Task) -> LoggedRow:
    sample = Sample(
        uid=row.uid,
        data_source=task.data_source,
        solution=row.response_text,
        ground_truth=task.ground_truth,
        extra_info=task.extra_info,
        messages=task.conversation,
    )
    row = replace(row, media=media_of_row(row.uid, row.row_media, task.media))
    return LoggedRow(
        trajectory=row, start=row.prompt_length, group_size=task.group_size, sample=sample
    )


def per_token(learned: Learned, rows: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of `LoggedStep.per_token` for some rows of the batch."""
    experience, targets = learned.experience, learned.targets
    columns = {
        "trainer_logprobs": learned.logprobs,
        "ref_logprobs": experience.ref_logprobs,
        "advantages": targets.advantages,
        "returns": targets.returns,
        "token_rewards": targets.token_rewards,
        "values": learned.values,
        "importance_weights": targets.weights,
    }
    found: dict[str, npt.NDArray[Any]] = {"trained_mask": targets.mask.numpy()}
    for name, column in columns.items():
        if column is not None:
            found[name] = column.numpy().astype(np.float32, copy=False)
    if len(rows) < experience.ragged.num_rows:
        places = experience.tokens_of(rows).numpy()
        found = {name: column[places] for name, column in found.items()}
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
