"""The algorithms give the numbers that were recorded from verl, gradients included."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.doubles.parity.__main__ import main
from tests.doubles.parity.cases import Case, load
from tests.doubles.parity.compare import Verdict, judge

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = tuple(load(GOLDEN))


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_recorded_case_comes_out_the_same(case: Case) -> None:
    judged = judge(case)

    assert judged.verdict is Verdict.PASSED, judged.why


@pytest.mark.parametrize("name", ["adv/opo/zerovar07", "policy/gspo/isw/long"])
def test_a_wrong_number_fails_its_case(name: str) -> None:
    case = by_name(name)
    wrong = {key: np.asarray(value) + 0.01 for key, value in case.outputs.items()}

    judged = judge(dataclasses.replace(case, outputs=wrong))

    assert judged.verdict is Verdict.FAILED
    assert "off by" in judged.why


def test_a_wrong_metric_fails_its_case() -> None:
    case = by_name("policy/gspo/isw/long")

    judged = judge(dataclasses.replace(case, metrics={"actor/ppo_kl": 1.0, "actor/none": 0.0}))

    assert judged.verdict is Verdict.FAILED
    assert "actor/ppo_kl is off" in judged.why
    assert "no metric actor/none" in judged.why


def test_a_case_that_should_raise_and_does_not_fails() -> None:
    judged = judge(dataclasses.replace(by_name("adv/opo/zerovar07"), raises="ValueError"))

    assert judged.why == "did not raise ValueError"


def test_a_function_that_is_not_offered_is_named_unsupported() -> None:
    judged = judge(dataclasses.replace(by_name("adv/opo/zerovar07"), function="verl.else.where"))

    assert judged.verdict is Verdict.UNSUPPORTED
    assert "verl.else.where" in judged.why


def test_the_runner_prints_totals_and_exits_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(GOLDEN)]) == 0

    assert (
        capsys.readouterr().out.splitlines()[-1] == f"{len(CASES)} passed, 0 failed, 0 unsupported"
    )


def test_a_directory_without_cases_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2

    assert capsys.readouterr().err.startswith("error: no index*.json")
