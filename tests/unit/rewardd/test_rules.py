"""The `reward:` section of a recipe: what is allowed, the errors otherwise, and what the hash covers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Outcome, Sample, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.pool.rule import read_rule

GOOD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1\n"
)


def custom(path: Path, **fields: Any) -> RewardConfig:
    return RewardConfig.model_validate({"custom_reward_function": {"path": path, **fields}})


def functions(*entries: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"functions": entries})


def hash_of(config: RewardConfig) -> str:
    return read_rule(config).reward_hash


def test_by_default_the_data_source_decides() -> None:
    assert [f.name for f in RewardConfig().scorers] == ["verl"]


def test_a_missing_file_is_named_with_its_nearest_neighbour(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(GOOD)
    with pytest.raises(ConfigError) as error:
        build_judge(custom(tmp_path / "rewards.py"))
    assert str(error.value) == (
        f"no reward file {tmp_path / 'rewards.py'}; did you mean {tmp_path / 'reward.py'}?"
    )


def test_a_missing_function_is_reported_with_the_wanted_one(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(GOOD)
    with pytest.raises(ConfigError) as error:
        build_judge(custom(tmp_path / "reward.py", name="compute_scores"))
    assert str(tmp_path / "reward.py") in str(error.value)
    assert "did you mean 'compute_score'?" in str(error.value)
    assert "(data_source, solution_str, ground_truth, extra_info=None" in str(error.value)


def test_a_syntax_error_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("x = 1\ndef compute_score(:\n")
    with pytest.raises(ConfigError, match=r"reward\.py, line 2"):
        build_judge(custom(tmp_path / "reward.py"))


def test_a_folder_is_no_reward_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        build_judge(custom(tmp_path))


def test_an_unknown_built_in_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no reward named 'gsm8'; did you mean 'gsm8k'\?"):
        build_judge(functions({"name": "gsm8"}))


def test_an_unknown_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no reward module 'nowhere\.rewards'"):
        build_judge(functions({"name": "nowhere.rewards"}))


def test_two_components_of_one_name_are_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="give one a `label`"):
        functions({"name": "format"}, {"name": "format"})


def test_reading_a_rule_runs_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(f"raise SystemExit\n{GOOD}")
    assert read_rule(custom(tmp_path / "reward.py")).functions[0].name == "compute_score"


def test_the_hash_depends_on_source_name_kwargs_and_weight_but_not_on_the_path(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "a.py", tmp_path / "b.py"
    here.write_text(GOOD)
    there.write_text(GOOD)
    same = hash_of(custom(here))
    assert hash_of(custom(there)) == same
    assert hash_of(custom(here, reward_kwargs={"bonus": 1})) != same
    there.write_text(GOOD.replace("1", "2"))
    assert hash_of(custom(there)) != same
    assert hash_of(functions({"name": "gsm8k"})) != hash_of(
        functions({"name": "gsm8k", "weight": 2})
    )


def test_the_hash_of_a_built_in_covers_the_helpers_that_it_imports() -> None:
    from meshrl.rewardd.pool import rule
    from meshrl.rewardd.rewards import _answers, math_dapo, verl

    def digests(module: Any) -> list[str]:
        return list(rule._module_sources(str(module.__file__), set()))

    helper = Path(str(_answers.__file__)).read_text()
    assert helper in digests(math_dapo)
    assert helper in digests(verl)
    assert any(text.startswith("sympy==") for text in digests(verl))


def test_importing_rewardd_imports_neither_torch_nor_sympy() -> None:
    program = (
        "import sys, meshrl.rewardd.judge, meshrl.rewardd.reward_stage, meshrl.rewardd.rewards.verl\n"
        "import meshrl.rewardd.rewards.math\n"
        "print([m for m in ('torch', 'sympy', 'math_verify', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"name": "gsm8k", "kwargs": {"methd": "strict"}}, "it takes: method, format_score, score"),
        ({"name": "format", "kwargs": {"pattern": "("}}, "not a regular expression"),
        ({"name": "length", "kwargs": {"max_length": 5, "buffer": 9}}, "exceeds max_length"),
    ],
)
async def test_wrong_arguments_of_a_built_in_are_refused_at_start(
    entry: dict[str, Any], expected: str
) -> None:
    judge = build_judge(functions(entry))
    with pytest.raises(ConfigError) as error:
        await judge.start()
    assert expected in str(error.value)
    assert f"kwargs of reward {entry['name']!r}" in str(error.value)


async def test_the_reward_is_the_weighted_sum_and_the_parts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD.replace("return 1", "return {'score': len(solution_str), 'acc': 1}"))
    config = functions(
        {"name": "exact_match", "kwargs": {"after": "#"}},
        {"name": "format", "weight": 0.5, "kwargs": {"pattern": ".*#.*"}},
        {"name": "compute_score", "path": str(path), "weight": -0.1, "label": "wordy"},
    )
    judge = build_judge(config)
    sample = Sample(
        uid=Uid("run", "t", 0), data_source="", solution="a#7", ground_truth=7, extra_info={}
    )
    (score,) = await judge.score([sample])
    await judge.close()
    assert score.outcome is Outcome.OK
    assert score.score == pytest.approx(1 + 0.5 - 0.3)
    assert score.components == {"exact_match": 1.0, "format": 1.0, "wordy": 3.0, "wordy.acc": 1.0}


async def test_a_module_of_ones_own_is_named_with_dots_and_has_its_options_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_package_of_mine").mkdir()
    (tmp_path / "reward_package_of_mine" / "short.py").write_text(
        "from meshrl.common import config\n"
        "class Config(config.Config):\n    limit: int = 100\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, config=Config()):\n"
        "    return float(len(solution_str) <= config.limit)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sample = Sample(
        uid=Uid("r", "t", 0), data_source="", solution="ab", ground_truth=None, extra_info={}
    )
    for limit, reward in ((1, 0.0), (2, 1.0)):
        config = functions({"name": "reward_package_of_mine.short", "kwargs": {"limit": limit}})
        judge = build_judge(config)
        (score,) = await judge.score([sample])
        await judge.close()
        assert (score.outcome, score.score) == (Outcome.OK, reward)
    judge = build_judge(functions({"name": "reward_package_of_mine.short", "kwargs": {"limt": 1}}))
    with pytest.raises(ConfigError, match="it takes: limit"):
        await judge.start()
