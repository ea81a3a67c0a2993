from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from tokenizers import Tokenizer

from meshrl.contract.errors import UnavailableError
from meshrl.contract.rows import (
    conversation_column,
    reward_inputs,
    reward_write,
    rollout_write,
    times_column,
)
from meshrl.contract.types import (
    CONVERSATION,
    REWARD_INPUTS,
    REWARD_TIMES,
    ROLLOUT_TIMES,
    Batch,
    Columns,
    Json,
    Message,
    Outcome,
    Sample,
    Score,
    Task,
    Trajectory,
    Uid,
    Version,
)
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.ranks.world import World
from meshrl.trainer.trajectories.files import draft_of, file_of, logged_files
from meshrl.trainer.trajectories.log import TrajectoryLog
from meshrl.trainer.trajectories.table import schema

from . import rank_work

ROWS = rank_work.trajectories()
GROUPS = [f"t{number}" for number in range(rank_work.GROUPS)]


CALL = {"name": "add", "arguments": {"a": 1}}
SAID = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
]
NOTED = {
    ROLLOUT_TIMES: times_column(100.0, 102.5),
    REWARD_TIMES: times_column(103.0, 103.5),
    CONVERSATION: conversation_column(SAID),
}


def sample_of(row: Trajectory) -> Sample:
    return Sample(
        uid=row.uid,
        data_source="sums",
        solution=row.response_text,
        ground_truth={"answer": "β", "half": "\ud800"},
        extra_info={"level": 3},
        messages=(Message(role="user", content=f"task {row.uid.task}"),),
    )


class Stored:
    """The rows of `rank_work` as the queue gives them."""

    def __init__(self) -> None:
        self.rows: dict[Uid, Columns] = {}
        for row in ROWS:
            made = dataclasses.replace(row, replica="rollout-0", response_text="says")
            score = Score(
                uid=row.uid,
                outcome=Outcome.OK,
                score=row.reward or 0.0,
                components=row.reward_components,
                reward_hash="cafe",
            )
            self.rows[row.uid] = {
                **rollout_write(made, Outcome.OK, "stop", Version(1, 0)).columns,
                **reward_write(score).columns,
                **NOTED,
                REWARD_INPUTS: reward_inputs(sample_of(row)),
            }

    async def take(self, *_: Any, **__: Any) -> Batch:
        raise NotImplementedError

    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        return [
            {name: self.rows[uid][name] for name in columns if name in self.rows[uid]}
            for uid in uids
        ]


class Gone(Stored):
    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        raise UnavailableError("the queue is away")


async def learn(
    log: TrajectoryLog,
    model: Path,
    world: World,
    *,
    steps: int = 1,
    batches: Stored | None = None,
    **actor: object,
) -> list[Mapping[str, Json]]:
    """Train `steps` steps on the same rows; the metrics of each."""
    learner = rank_work.make(model, world, **actor)
    by_uid = {row.uid: row for row in ROWS}
    metrics = []
    for step in range(steps):
        made = learner.schedule(dataclasses.replace(rank_work.batch(ROWS), step=step))
        own = [by_uid[uid] for uid in made.uids(0)]
        async with log.step(made, 1, batches or Stored()) as observe:
            metrics.append(learner.learn(made, own, step, None, observe))
    return metrics


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(folder / name).to_pylist()
    return rows


def joined(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.concatenate([np.array(row[name]) for row in rows])


async def test_a_step_is_one_file_with_all_that_its_learner_knew(
    text_model: Path, world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "trajectories"
    log = TrajectoryLog(folder, tokenizer=text_model, keeps_inputs=True)
    _, metrics = await learn(log, text_model, world, steps=2)
    log.close()
    rows = read(folder, "step-2.parquet")
    assert [row["uid"] for row in rows] == sorted(str(row.uid) for row in ROWS)
    tokenizer = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    decoded = partial(tokenizer.decode, skip_special_tokens=False)
    for row, given in zip(rows, sorted(ROWS, key=lambda row: str(row.uid)), strict=True):
        start = given.prompt_length
        assert row["prompt_ids"] + row["response_ids"] == given.tokens.tolist()
        assert (row["prompt_length"], row["length"]) == (start, len(given.tokens) - start)
        assert row["loss_mask"] == given.loss_mask[start:].astype(bool).tolist()
        assert row["prompt"] == decoded(given.tokens[:start].tolist())
        assert row["token_texts"] == [decoded([token]) for token in row["response_ids"]]
        assert row["spans"] == [{"epoch": 1, "step": 0, "start": 0, "end": row["length"]}]
        assert row["reward"] == pytest.approx(given.reward)
        assert dict(row["reward_components"]) == given.reward_components
        parts = row["parts"]
        if given.loss_mask[start:].all():
            assert parts is None and row["turns"] == 1
        else:
            assert [part["sampled"] for part in parts] == [True, False, True]
            assert row["turns"] == 2 and (parts[1]["start"], parts[1]["end"]) == (2, 4)
            assert parts[2]["text"] == decoded(row["response_ids"][4:])
        assert row["messages"] == [{"role": "user", "content": f"task {given.uid.task}"}]
        assert json.loads(row["ground_truth"]) == {"answer": "β", "half": "?"}
        assert json.loads(row["extra_info"]) == {"level": 3}
        told = {name: row[name] for name in ("data_source", "response", "worker", "outcome")}
        assert told == {
            "data_source": "sums", "response": "says", "worker": "rollout-0", "outcome": "ok"
        }  # fmt: skip
        assert (row["step"], row["epoch"], row["split"], row["staleness"]) == (2, 1, "train", 1)
        assert row["conversation"] == [
            {"role": "assistant", "content": "", "name": None}
            | {"tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]},
            {"role": "tool", "content": "3", "name": None, "tool_calls": None},
        ]
        spent = [row[f"{name}_s"] for name in ("sampled_unix", "sample", "score_wait", "score")]
        assert spent == [100.0, 2.5, 0.5, 0.5]
        assert row["train_wait_s"] == pytest.approx(row["time_unix_s"] - 103.5)
        assert row["advantage"] == pytest.approx(
            np.mean(np.array(row["advantages"])[row["trained_mask"]]), abs=1e-6
        )
    mask = joined(rows, "loss_mask")
    gap = np.abs(joined(rows, "trainer_logprobs") - joined(rows, "rollout_logprobs"))
    assert gap[mask].mean() == pytest.approx(metrics["mismatch/logprob_abs_mean"], rel=1e-5)
    assert np.abs(joined(rows, "advantages"))[mask].mean() == pytest.approx(
        metrics["advantages/abs_mean"], rel=1e-5
    )
    assert {row["ref_logprobs"] for row in rows} == {None}
    assert (folder.stat().st_mode & 0o777, file_of(folder, "train", 1).stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


async def test_the_folder_reads_as_one_table_with_rows_of_evaluations(
    tiny_path: Path, world: World, tmp_path: Path
) -> None:
    log = TrajectoryLog(tmp_path, tokenizer=tiny_path)
    await learn(log, tiny_path, world)
    evaluate(log, [3])
    log.close()
    table = parquet.read_table(tmp_path)
    assert table.schema.equals(schema()) and table.num_rows == 2 * len(ROWS)
    held_out = read(tmp_path, "eval-3.parquet")
    assert [row["uid"] for row in held_out] == [str(row.uid) for row in ROWS]
    assert {(row["split"], row["step"], row["ground_truth"]) for row in held_out} == {
        ("eval", 3, "7")
    }
    assert {row["advantages"] for row in held_out} == {None}
    # A tokenizer that cannot be read, and a run that does not keep what judges saw.
    assert {(row["prompt"], row["token_texts"]) for row in held_out} == {(None, None)}
    assert {row["messages"] for row in read(tmp_path, "step-1.parquet")} == {None}


async def test_tokens_that_the_policy_did_not_forward_have_no_log_prob(
    tiny_path: Path, world: World, tmp_path: Path
) -> None:
    log = TrajectoryLog(tmp_path)
    learner = rank_work.make(
        tiny_path, world, algorithm={"use_pf_ppo": True}, recompute_old_log_probs=False
    )
    made = learner.schedule(rank_work.batch(ROWS))
    by_uid = {row.uid: row for row in ROWS}
    async with log.step(made, 1, Stored()) as observe:
        learner.learn(made, [by_uid[uid] for uid in made.uids(0)], 0, None, observe)
    log.close()
    rows = read(tmp_path, "step-1.parquet")
    drawn = {row["uid"] for row in rows if row["trainer_logprobs"][0] is not None}
    assert 0 < len(drawn) < len(rows)
    assert {row["uid"] for row in rows if row["mismatch"] is not None} == drawn


async def test_a_share_keeps_whole_groups_the_same_ones_in_each_step(
    tiny_path: Path, world: World, tmp_path: Path
) -> None:
    log = TrajectoryLog(tmp_path, share=0.5)
    await learn(log, tiny_path, world, steps=2)
    log.close()
    kept = [[row["uid"] for row in read(tmp_path, f"step-{step}.parquet")] for step in (1, 2)]
    assert kept[0] == kept[1] and 0 < len(kept[0]) < len(ROWS)
    assert len(kept[0]) == rank_work.GROUP_SIZE * len({uid.split("/")[1] for uid in kept[0]})
    whole = TrajectoryLog(tmp_path / "whole")
    await learn(whole, tiny_path, world)
    whole.close()
    every = {row["uid"]: row for row in read(tmp_path / "whole", "step-1.parquet")}
    for row in read(tmp_path, "step-1.parquet"):
        assert {**row, "time_unix_s": 0} == {**every[row["uid"]], "time_unix_s": 0}
    nothing = TrajectoryLog(tmp_path / "off", share=0.0)
    await learn(nothing, tiny_path, world)
    nothing.close()
    assert not (tmp_path / "off").exists()


def evaluate(log: TrajectoryLog, steps: Sequence[int]) -> None:
    tasks = {
        name: Task(run="r", task_id=name, prompt_ids=ROWS[0].tokens[:3], ground_truth=7)
        for name in GROUPS
    }
    for step in steps:
        log.evaluated(Version(1, step), tasks, ROWS[::-1])


def test_the_oldest_files_make_room_and_the_newest_stays(tmp_path: Path) -> None:
    first = TrajectoryLog(tmp_path)
    evaluate(first, [0])
    first.close()
    size = file_of(tmp_path, "eval", 0).stat().st_size
    for max_bytes, steps, left in (
        (int(size * 2.9), (1, 2, 9, 10), [9, 10]),
        (int(size * 2.9), (10, 10), [9, 10]),
        (1, (11,), [11]),
    ):
        log = TrajectoryLog(tmp_path, max_bytes=max_bytes)
        evaluate(log, steps)
        log.close()
        assert [file.step for file in logged_files(tmp_path)] == left


def test_a_resumed_run_forgets_rows_of_a_history_that_is_no_more(tmp_path: Path) -> None:
    for name in ("step-2", "step-3", "step-10", "eval-1", "eval-2", "notes"):
        (tmp_path / f"{name}.parquet").touch()
    draft_of(tmp_path / "step-4.parquet").touch()
    TrajectoryLog(tmp_path).resume_at(2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["eval-1.parquet", "notes.parquet", "step-2.parquet"]
    TrajectoryLog(tmp_path / "none").resume_at(0)


async def test_a_full_disk_costs_rows_and_one_warning_and_never_a_step(
    tiny_path: Path, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for step in (2, 3):
        draft_of(file_of(tmp_path, "train", step)).symlink_to("/dev/full")
    log = TrajectoryLog(tmp_path)
    metrics = await learn(log, tiny_path, world, steps=4)
    log.close()
    assert len(metrics) == 4
    assert [file.step for file in logged_files(tmp_path)] == [1, 4]
    assert not any(draft_of(file_of(tmp_path, "train", step)).is_symlink() for step in (2, 3))
    warning, end = [record.message for record in caplog.records if "logged" in record.message]
    assert "No space left on device" in warning
    assert end == "rows are logged again; 2 files are missing"


def test_a_disk_that_stands_still_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stalled = draft_of(file_of(tmp_path, "eval", 0))
    os.mkfifo(stalled)  # opening it waits for somebody who reads
    log = TrajectoryLog(tmp_path)
    evaluate(log, range(8))
    (warning,) = [record.message for record in caplog.records if "no rows" in record.message]
    assert "the disk is behind" in warning
    reader = os.open(stalled, os.O_RDONLY)
    log.close()
    os.close(reader)
    assert [file.step for file in logged_files(tmp_path)][1:4] == [1, 2, 3]


async def test_rows_that_the_queue_does_not_give_cost_no_step(
    tiny_path: Path, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = TrajectoryLog(tmp_path / "rows")
    assert len(await learn(log, tiny_path, world, steps=2, batches=Gone())) == 2
    log.close()
    assert caplog.text.count("no rows are logged") == 1 and not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    ("written", "share"), [("all", 1.0), ("off", 0.0), (False, 0.0), (True, 1.0), (0.25, 0.25)]
)
def test_yaml_reads_off_as_false(written: object, share: float) -> None:
    assert TrainerConfig.model_validate({"log_rows": written}).log_share == share


@pytest.mark.parametrize("written", [0, 1, 1.5, -0.5, "some"])
def test_other_shares_are_refused(written: object) -> None:
    with pytest.raises(ValueError, match="log_rows"):
        TrainerConfig.model_validate({"log_rows": written})
