"""A run of three steps in this process, its files as a run leaves them, and `meshrl replay` of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch

from meshrl.cli import main
from meshrl.config.loading import load_recipe, save_recipe
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook
from meshrl.launcher.learner import build_learner
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.metrics.log import MetricsLog
from meshrl.trainer.ranks.world import World
from meshrl.trainer.trajectories.files import FOLDER, file_of
from meshrl.trainer.trajectories.log import TrajectoryLog

from . import rank_work
from .test_trajectories import Stored

STEPS, SAVED = 3, 1
Command = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture(scope="module")
def trained(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved after the first step. Several updates a step, so that each figure depends on all weights."""
    directory = tmp_path_factory.mktemp("runs") / "r"
    directory.mkdir()
    asyncio.run(train(text_model, directory))
    return directory


async def train(text_model: Path, directory: Path) -> None:
    (directory / "recipe.in.yaml").write_text(
        f"""
        run: {{name: r, dir: {directory}}}
        model: {{path: {text_model}}}
        data: {{max_response_length: 40, train_batch_size: 5}}
        actor: {{ppo_max_token_len_per_gpu: 64, ppo_mini_batch_size: 2, optim: {{lr: 0.01}}}}
        rollout: {{n: 2}}
        trainer: {{total_training_steps: 3}}
        """
    )
    recipe = load_recipe(directory / "recipe.in.yaml", check=False)
    save_recipe(recipe, directory / "recipe.yaml")
    book = AddressBook(run="r", recipe=directory / "recipe.yaml", services={})
    book.save(directory / ADDRESS_BOOK_NAME)
    torch.set_num_threads(1)
    world = World.start("cpu")
    learner = build_learner(recipe, STEPS, world)
    log = TrajectoryLog(directory / FOLDER, tokenizer=text_model)
    metrics = MetricsLog(directory / "metrics.jsonl")
    for step in range(STEPS):
        rows = {row.uid: row for row in rank_work.trajectories()}
        manifest = [
            rank_work.manifest_row(uid, rank_work.GROUP_SIZE, len(row.tokens), rank_work.PROMPT)
            for uid, row in rows.items()
        ]
        schedule = learner.schedule(dataclasses.replace(rank_work.batch_of(manifest), step=step))
        own = [rows[uid] for uid in schedule.uids(0)]
        async with log.step(schedule, 1, Stored()) as observe:
            metrics.write(step + 1, learner.learn(schedule, own, step, None, observe))
        if step + 1 == SAVED:
            state = TrainerState(
                run="r", step=SAVED, epoch=1, seed=0, world_size=1, kl_coef=learner.kl_coef
            )
            checkpoint.save(
                recipe.checkpoint_dir, learner.policy, learner.optimizers, state, world, keep=9
            )
    log.close()
    metrics.close()
    world.close()


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy, elsewhere."""
    return Path(shutil.copytree(trained, tmp_path / "moved"))


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str | Path) -> tuple[int, list[str], list[str]]:
        with pytest.raises(SystemExit) as ended:
            main(["replay", *map(str, arguments)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out.splitlines(), said.err.splitlines()

    return run


def change(run_dir: Path, step: int, at: int, name: str, value: Callable[[Any], Any]) -> str:
    """Another value in a logged row; its uid."""
    path = file_of(run_dir / FOLDER, "train", step)
    table = parquet.read_table(path)
    rows = table.to_pylist()
    rows[at][name] = value(rows[at][name])
    parquet.write_table(arrow.Table.from_pylist(rows, schema=table.schema), path)
    return str(rows[at]["uid"])


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_comes_out_as_it_was_logged(run_dir: Path, replay: Command, step: int) -> None:
    code, out, err = replay(run_dir, "--step", step, "--json")
    made = [json.loads(line) for line in out]
    assert code == 0
    assert [one["step"] for one in made] == ([1] if step == 1 else [2, 3])
    for one in made:
        assert one["first"] is None and one["rows"] == len(rank_work.trajectories())
        assert set(one["largest"]) >= {
            "actor/loss",
            "actor/grad_norm",
            "advantages",
            "trainer_logprobs",
        }
        assert max(one["largest"].values()) == 0.0
    start = "text" if step == 1 else str(run_dir / "checkpoints")
    assert start in err[-1]


def test_a_run_without_its_checkpoint_is_replayed_from_the_start(
    run_dir: Path, replay: Command
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    code, out, _ = replay(run_dir, "--step", "3")
    assert code == 0 and [line[:7] for line in out] == ["step 1:", "step 2:", "step 3:"]


def test_the_first_row_that_differs_is_named(run_dir: Path, replay: Command) -> None:
    uid = change(run_dir, 2, 3, "trainer_logprobs", lambda values: [v * 1.001 for v in values])
    code, out, _ = replay(run_dir, "--step", "3")
    assert code == 1
    assert f"row {uid}: trainer_logprobs of response token" in out[-1]
    assert not any(line.startswith("step 3") for line in out)


def test_a_changed_token_shows_in_its_row(run_dir: Path, replay: Command) -> None:
    uid = change(run_dir, 3, 4, "response_ids", lambda ids: [(ids[0] + 1) % 30, *ids[1:]])
    code, out, _ = replay(run_dir, "--step", "3")
    assert code == 1 and f"row {uid}: trainer_logprobs" in out[-1]


def test_a_changed_reward_shows_in_its_row(run_dir: Path, replay: Command) -> None:
    uid = change(run_dir, 2, 6, "reward", lambda reward: reward + 1)
    code, out, _ = replay(run_dir, "--step", "2")
    assert code == 1 and f"row {uid}: token_rewards" in out[-1]


def test_another_gradient_norm_is_told_where_all_rows_are_the_same(
    run_dir: Path, replay: Command
) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines[2]["actor/grad_norm"] *= 1 + 1e-5
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = replay(run_dir, "--step", "3")
    assert code == 1 and "step 3 differs: actor/grad_norm was logged as" in out[-1]
    assert replay(run_dir, "--step", "3", "--tolerance", "1e-4")[0] == 0


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("trajectories/step-2.parquet", "step-2.parquet is missing"),
        ("trajectories/step-3.parquet", "--step 3: no rows are logged of it; there are 2 steps"),
        ("metrics.jsonl", "metrics.jsonl cannot be read"),
        ("mesh.json", "mesh.json"),
    ],
)
def test_a_missing_file_is_one_line(run_dir: Path, replay: Command, gone: str, said: str) -> None:
    (run_dir / gone).unlink()
    code, out, err = replay(run_dir, "--step", "3")
    assert code != 0 and out == []
    assert said in err[-1] and err[-1].startswith("error: ")


def test_a_share_of_the_rows_is_not_enough(run_dir: Path, replay: Command) -> None:
    path = file_of(run_dir / FOLDER, "train", 2)
    parquet.write_table(parquet.read_table(path).slice(0, 4), path)
    code, _, err = replay(run_dir, "--step", "3")
    assert code == 2 and "has 4 rows, and step 2 was made from 10" in err[-1]


def test_a_damaged_checkpoint_is_said_to_be_damaged(run_dir: Path, replay: Command) -> None:
    next((run_dir / "checkpoints").rglob("*.distcp")).write_bytes(b"torn")
    code, _, err = replay(run_dir, "--step", "3")
    assert code == 1 and "differs from what state.json says" in err[-1]
    assert replay(run_dir, "--step", "1")[0] == 0  # needs none


def test_a_run_whose_steps_an_older_meshrl_counted_from_0_is_refused(
    run_dir: Path, replay: Command
) -> None:
    file_of(run_dir / FOLDER, "train", 1).rename(file_of(run_dir / FOLDER, "train", 0))
    code, _, err = replay(run_dir, "--step", "2")
    assert code == 2 and "an older meshrl counted the steps of this run from 0" in err[-1]
