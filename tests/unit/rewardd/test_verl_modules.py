"""Reward files that import verl's scorers load in a scoring process, and get the answers that verl 0.9 gives."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.rewardd.pool.verl_modules import (
    Geo3k,
    Gsm8k,
    MathBatch,
    MathDapo,
    MathReward,
    PrimeMath,
    SearchQa,
    default_compute_score,
)
from meshrl.rewardd.rewards import verl

LOAD = """
import sys
from pathlib import Path
from meshrl.contract.errors import ConfigError
from meshrl.rewardd.pool.functions import load
from meshrl.rewardd.pool.rule import FunctionSpec

path = sys.argv[1]
spec = FunctionSpec(name="compute_score", path=path, source=Path(path).read_text(), component="c",
                    weight=1.0, kwargs={}, digest="0" * 64)
try:
    scorer = load(spec)
    sample = {"data_source": "s", "solution_str": "so Answer: 4", "ground_truth": "4", "extra_info": None}
    print(scorer.spec.kind.value, scorer.start(sample))
except ConfigError as error:
    print("refused:", error)
"""
SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


def loaded(tmp_path: Path, source: str) -> str:
    file = tmp_path / "reward.py"
    file.write_text(source)
    command = [sys.executable, "-c", LOAD, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_file_that_imports_verls_scorers_runs_unchanged(tmp_path: Path) -> None:
    source = (
        "from verl.utils.reward_score import default_compute_score, math_dapo\n"
        "from verl.utils.reward_score.math_dapo import last_boxed_only_string, remove_boxed\n"
        "import verl.utils.reward_score.gsm8k as gsm8k\n"
        f"{SIGNATURE}    assert gsm8k.extract_solution('#### 4') == '4'\n"
        "    assert remove_boxed(last_boxed_only_string(r'x \\boxed{4}')) == '4'\n"
        "    return math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=False)\n"
    )
    assert loaded(tmp_path, source) == "compute_score {'score': 1.0, 'acc': True, 'pred': '4'}\n"


def test_a_function_of_verls_batch_manager_is_known_by_its_parameters(tmp_path: Path) -> None:
    columns = "data_sources, solution_strs, ground_truths, extra_infos, **more"
    source = f"def compute_score({columns}):\n    return [len(one) for one in solution_strs]\n"
    assert loaded(tmp_path, source) == "batch 12\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from verl.protocol import DataProto", "verl.protocol is a part of verl, which is not installed"),
        ("from verl import DataProto", "cannot import name 'DataProto' from 'verl'"),
        ("import a_package_of_theirs", "No module named 'a_package_of_theirs'"),
    ],
)  # fmt: skip
def test_what_is_not_here_is_named(line: str, said: str, tmp_path: Path) -> None:
    told = loaded(tmp_path, f"{line}\n{SIGNATURE}    return 1.0\n")
    assert told.startswith("refused:") and said in told and "reward.py:1" in told


def test_no_other_process_can_import_the_stand_ins() -> None:
    assert importlib.util.find_spec("verl") is None


BOXES = r"a \boxed{1} b \boxed{\frac12} c"


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (lambda: Gsm8k.extract_solution("#### 1,200 #### -3"), "-3"),
        (lambda: Gsm8k.extract_solution("nothing"), None),
        (lambda: Gsm8k.extract_solution("1 or 2 .", "flexible"), "2"),
        (lambda: Gsm8k.compute_score("#### 3", "4", format_score=0.1), 0.1),
        (lambda: MathReward.last_boxed_only_string(BOXES), r"\boxed{\frac12}"),
        (lambda: MathReward.last_boxed_only_string(r"\boxed 7$ x"), r"\boxed 7"),
        (lambda: MathReward.last_boxed_only_string(r"\fbox{7}"), r"\fbox{7}"),
        (lambda: MathReward.last_boxed_only_string(r"\boxed{7"), None),
        (lambda: MathReward.is_equiv(r"\frac12", r"\frac{1}{2}"), True),
        (lambda: MathReward.is_equiv(None, None), True),
        (lambda: MathBatch.compute_score_batched(["", ""], [BOXES, "x"], [r"\frac{1}{2}"] * 2, []), [1.0, 0.0]),
        (lambda: MathDapo.last_boxed_only_string(r"\fbox{7}"), None),
        # a box is compared as it is, an answer line in its normal spelling
        (lambda: MathDapo.verify(BOXES, r"\frac{1}{2}"), (False, r"\frac12")),
        (lambda: MathDapo.verify(r"Answer: \frac12", r"\frac{1}{2}"), (True, r"\frac{1}{2}")),
        (lambda: MathDapo.verify("none", "4"), (False, "[INVALID]")),
        (lambda: MathDapo.verify("Answer: 4", "4", True), (False, None)),
        (lambda: MathDapo.is_correct_minerva("Answer: 4", r"\boxed{4}", True), (True, "4")),
        (lambda: PrimeMath.compute_score(r"\boxed{4}", "4")[0], True),
        (lambda: SearchQa.em_check("The Cat!", ["cat"]), 1),
        (lambda: SearchQa.subem_check("a black cat", "cat"), 1),
        (lambda: SearchQa.compute_score("<answer> cat </answer>", {"target": ["The cat"]}), 1.0),
        (lambda: Geo3k.compute_score(r"<think>t</think> \boxed{4}", "4"), 1.0),
        (lambda: default_compute_score("openai/gsm8k", "#### 4", "4"), 1.0),
    ],
)  # fmt: skip
def test_the_functions_answer_as_verls_do(found: Any, wanted: Any) -> None:
    assert found() == wanted


def test_a_source_without_a_scorer_raises_as_verl_does() -> None:
    with pytest.raises(NotImplementedError, match="mine"):
        default_compute_score("mine", "x", "y")


@pytest.mark.parametrize("options", [verl.Config(), verl.Config(conventions="verl")])
@pytest.mark.parametrize(
    ("solution", "right", "prediction"),
    [("so Answer: 7", True, "7"), ("Answer: 8", False, "8"), ("none", False, "[INVALID]")],
)
def test_dapo_tells_what_it_read(
    solution: str, right: bool, prediction: str, options: verl.Config
) -> None:
    wanted = {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}
    assert verl.compute_score("math_dapo", solution, "7", config=options) == wanted
