"""A verl command line is migrated and run: its parquet and its reward file as they are, two steps on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from ..mesh import Mesh, make_mesh

# As it would stand in a verl project; verl calls it with these four keywords.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "sums" and ground_truth and extra_info["index"] >= 0
    return {"score": sum(letter.isdigit() for letter in solution_str) / 16 + bonus, "acc": 0.0}
"""
COMMAND = """
set -x
DIR={directory}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$DIR/train.parquet \\
    data.val_files=$DIR/train.parquet \\
    data.train_batch_size=4 \\
    data.max_prompt_length=64 \\
    data.max_response_length=16 \\
    actor_rollout_ref.model.path=$DIR/model \\
    actor_rollout_ref.actor.fsdp_config.dtype=fp32 \\
    actor_rollout_ref.actor.optim.lr=1e-3 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.name=hf \\
    actor_rollout_ref.rollout.n=3 \\
    custom_reward_function.path=$DIR/reward.py \\
    +custom_reward_function.reward_kwargs.bonus=0.25 \\
    trainer.logger='["console"]' \\
    trainer.experiment_name=tiny \\
    trainer.n_gpus_per_node=1 \\
    trainer.device=cpu \\
    trainer.val_before_train=False \\
    trainer.total_training_steps=2 $@
"""


@pytest.mark.slow
def test_a_verl_command_is_migrated_and_trains_with_its_files_unchanged(tmp_path: Path) -> None:
    made = make_mesh(tmp_path)  # for its model
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [
        {
            "data_source": "sums",
            "prompt": f"a={index % 10};b=a+2?",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(index % 10 + 2)},
            "extra_info": {"split": "train", "index": index},
        }
        for index in range(8)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "run.sh").write_text(COMMAND.format(directory=tmp_path))
    made.recipe.unlink()
    meshrl = [sys.executable, "-m", "meshrl.cli", "config"]
    for arguments in (["from-verl", "--strict", "--script", "run.sh", "-o"], ["check"]):
        subprocess.run(
            [*meshrl, *arguments, str(made.recipe)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )
    mesh = Mesh(directory=tmp_path, recipe=made.recipe)
    mesh.run(f"run.dir={mesh.run_dir}")
    steps = mesh.steps()
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["reward/mean"] >= 0.25 for line in steps)  # the function's own argument arrived
    assert all(line["source/sums/reward"] == pytest.approx(line["reward/mean"]) for line in steps)
    assert (mesh.export / "model.safetensors").is_file()
