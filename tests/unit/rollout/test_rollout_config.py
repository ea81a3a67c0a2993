"""The recipe's `rollout` section."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from meshrl.contract.errors import ConfigError
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.engines import build_engine


def test_defaults_sample_at_temperature_one_and_evaluate_greedily() -> None:
    config = RolloutConfig(stop=["\n"])
    training = config.sampling(max_tokens=9, seed=3)
    assert (training.temperature, training.max_tokens, training.seed) == (1.0, 9, 3)
    assert training.stop == ("\n",)
    assert config.val_sampling(max_tokens=9, seed=3).temperature == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": -2},
        {"temperature": -0.1},
        {"n": 0},
        {"on_update": "now"},
        {"stop": [""]},
        {"temprature": 1.0},
    ],
    ids=str,
)
def test_invalid_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        RolloutConfig.model_validate(wrong)


def test_rows_run_in_sync_batches_exactly_if_training_is_on_policy_by_default() -> None:
    assert RolloutConfig().is_deterministic(0)
    assert not RolloutConfig().is_deterministic(1)
    assert RolloutConfig(deterministic=True).is_deterministic(1)
    assert not RolloutConfig(deterministic=False).is_deterministic(0)


def test_an_unknown_engine_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'torhc'.*did you mean 'torch'.*echo"):
        build_engine(RolloutConfig(name="torhc"), model=tmp_path, tokenizer=None)


def test_configuration_worker_and_echo_engine_import_no_torch() -> None:
    modules = "meshrl.rollout.config, meshrl.rollout.worker, meshrl.testing.engines.echo"
    code = (
        f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
