"""The reward of reasoning-gym: right answers to every task, wrong ones, and rules that evaluate answers."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from typing import Any

import pytest

from meshrl.contract.errors import UserError
from meshrl.rewardd.rewards.reasoning_gym import EVALUATED, Config, compute_score
from meshrl.sandbox import confinement
from meshrl.trainer.data.reasoning_gym import UNSCORABLE, _plain

pytestmark = pytest.mark.filterwarnings("ignore")  # the package's own, of open files and odd input
SLOW = {"knight_swap", "intermediate_integration", "zebra_puzzles", "futoshiki"}
WHOLE = Config(answer_tag=None)
CALLS = {"eval", "exec", "parse_expr", "sympify"}


@functools.cache
def factory() -> Any:
    """Seconds of imports, which those who only collect tests are spared."""
    return pytest.importorskip("reasoning_gym.factory")


def row(task: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """An answer and the `extra_info` beside it, as they come out of the queue."""
    entry = factory().create_dataset(task, **{"seed": 5, "size": 2, **options})[1]
    return entry["answer"], json.loads(json.dumps({"metadata": repr(_plain(entry["metadata"]))}))


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "level", "strict")


@pytest.mark.usefixtures("strict")
def test_the_right_answer_to_every_task_scores_1() -> None:
    for task in factory().DATASETS.keys() - UNSCORABLE - SLOW - {"composite"}:
        answer, extra_info = row(task)
        said = f"So be it.<answer>wrong</answer> No: <answer>\n{answer}\n</answer>"
        if answer == answer.strip():  # some answers begin with a space, which a tag does not keep
            right = {"score": 1.0, "answered": 1.0}
            assert compute_score(task, said, answer, extra_info) == right, task


def test_a_response_without_the_tag_scores_0_unless_all_of_it_is_the_answer() -> None:
    answer, extra_info = row("chain_sum")
    assert compute_score("chain_sum", answer, answer, extra_info) == {"score": 0.0, "answered": 0.0}
    assert compute_score("chain_sum", answer, answer, extra_info, WHOLE)["score"] == 1.0
    assert compute_score("chain_sum", "<answer>1", answer, extra_info)["answered"] == 0.0


def test_a_rule_that_fails_at_an_answer_gives_0() -> None:
    answer, extra_info = row("prime_factorization")
    found = compute_score("prime_factorization", "no number", answer, extra_info, WHOLE)
    assert found == {"score": 0.0, "answered": 1.0, "outcome": "policy_fault"}


def test_answers_are_evaluated_in_a_strict_sandbox_only() -> None:
    answer, extra_info = row("n_queens")
    with pytest.raises(UserError, match=r"set reward\.recipe_sandbox: strict"):
        compute_score("n_queens", answer, answer, extra_info, WHOLE)


def test_the_tasks_that_evaluate_answers_are_those_that_are_named() -> None:
    def calls(source: str) -> set[str]:
        nodes = (
            node.func
            for node in ast.walk(ast.parse(inspect.cleandoc("\n" + source)))
            if isinstance(node, ast.Call)
        )
        return {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}

    found = {
        task
        for task in factory().DATASETS.keys() - UNSCORABLE - {"composite"}
        if calls(inspect.getsource(factory().DATASETS[task][0].score_answer)) & CALLS
    }
    found -= {"number_sorting"}  # which evaluates the right answer, not the policy's
    assert found <= set(EVALUATED), sorted(found - set(EVALUATED))
    assert set(EVALUATED) <= factory().DATASETS.keys()


def test_a_row_of_another_source_says_what_is_missing() -> None:
    with pytest.raises(UserError, match="gsm8k' is not a task of reasoning-gym"):
        compute_score("gsm8k", "4", "4", {"metadata": "{}"}, WHOLE)
    with pytest.raises(UserError, match=r"a row of gcd has no extra_info\.metadata"):
        compute_score("gcd", "4", "4", {}, WHOLE)
