"""Every built-in scorer against tables of pairs, by form: `+` is right, `-` a wrong answer that looks right.

A row is `+ truth :: response`; `⏎` stands for a new line. A line `@ {…}` gives the options of the rows that follow it
in its form. Forms have at most ten rows; each scorer has at least 200.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.errors import UserError
from meshrl.rewardd.rewards import (
    code,
    exact_match,
    format,
    geo3k,
    gsm8k,
    length,
    math,
    math_dapo,
    math_reward,
    prime_math,
    reasoning_gym,
    regex_match,
    search_qa,
    tool_use,
    verl,
    visual_format,
)
from meshrl.trainer.data.reasoning_gym import _plain

TABLES = Path(__file__).parent / "scorer_tables"
Row = tuple[str, dict[str, Any], str, str, bool]
"""Form, options, truth, response, whether it is right."""
Scorer = Callable[[dict[str, Any], str, str], bool]


def rows(*names: str) -> Iterator[Row]:
    for name in names:
        form, options = "", {}
        for line in (TABLES / f"{name}.txt").read_text().splitlines():
            if line.startswith("## "):
                form, options = f"{name}: {line[3:]}", {}
            elif line.startswith("@ "):
                options = json.loads(line[2:])
            elif line:
                truth, response = (text.replace("⏎", "\n") for text in line[2:].split(" :: ", 1))
                yield form, options, truth, response, line[0] == "+"


def by(module: Any, score: float = 1.0, **fixed: Any) -> Scorer:
    """Whether a scorer gives `score`, with the rows' options as its Config."""

    def is_right(options: dict[str, Any], truth: str, response: str) -> bool:
        config = module.Config(**fixed, **options)
        found = module.compute_score("unit", response, truth, None, config)
        return bool((found["score"] if isinstance(found, dict) else found) == score)

    return is_right


def exact(options: dict[str, Any], truth: str, response: str) -> bool:
    truths = json.loads(truth) if truth.startswith("[") else truth
    return by(exact_match)(options, truths, response)


def target(options: dict[str, Any], truth: str, response: str) -> bool:
    found = {"target": json.loads(truth) if truth.startswith("[") else truth}
    return bool(search_qa.compute_score("", response, found) == 1.0)


def call(options: dict[str, Any], truth: str, response: str) -> bool:
    thought = "<think>a</think><tool_call>\n{}\n</tool_call>"
    found = tool_use.compute_score("", thought.format(response), thought.format(truth))
    return found["accuracy_score"] == 3.0


def tool_form(options: dict[str, Any], truth: str, response: str) -> bool:
    wanted = '<think>a</think><tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>'
    return tool_use.compute_score("", response, wanted)["format_score"] == 1.0


def penalty(options: dict[str, Any], truth: str, response: str) -> bool:
    config = length.Config(**options)
    tokens = {} if config.unit == "characters" else {"response_length": int(response)}
    found = length.compute_score("", response, None, tokens, config)["score"]
    return found == pytest.approx(float(truth), abs=1e-6)


def program(options: dict[str, Any], truth: str, response: str) -> bool:
    response = response.replace("\n", "\r\n") if options else response
    return code.program_of(response).strip("\n") == truth.strip("\n")


def result(options: dict[str, Any], truth: str, response: str) -> bool:
    return code.same_result(response, code._result(truth), **options)


def by_source(options: dict[str, Any], truth: str, response: str) -> bool:
    source = options.get("source", "lighteval/MATH")
    wanted = {"target": truth} if source.startswith("search") else truth
    config = verl.Config(conventions=options.get("conventions", "meshrl"))
    found = verl.compute_score(source, response, wanted, config=config)
    return bool((found["score"] if isinstance(found, dict) else found) == 1.0)


GYM = ("spell_backward", "chain_sum", "letter_counting", "base_conversion", "number_sorting")
GYM += ("gcd", "lcm", "caesar_cipher", "simple_equations", "prime_factorization")


@functools.cache
def entries(task: str) -> list[Any]:
    return list(pytest.importorskip("reasoning_gym.factory").create_dataset(task, seed=7, size=5))


def by_task(options: dict[str, Any], truth: str, response: str) -> bool:
    """`truth` names the row of a task; {answer} stands for the right answer in the response."""
    right = []
    for task in GYM:
        entry = entries(task)["abcde".index(truth)]
        info = {"metadata": repr(_plain(entry["metadata"]))}
        said = response.replace("{answer}", entry["answer"])
        right.append(reasoning_gym.compute_score(task, said, entry["answer"], info)["score"] == 1.0)
    assert len(set(right)) == 1, dict(zip(GYM, right, strict=True))
    return right[0]


def boxed(truth: str, answer: str) -> str:
    return f"I add it up: $\\boxed{{{answer}}}$."


MATHS = ("equality", "boxes")
SCORERS: dict[str, dict[str, Scorer]] = {
    "math": dict.fromkeys((*MATHS, "announced"), by(math)),
    "prime_math": dict.fromkeys((*MATHS, "announced"), by(prime_math)),
    "math_reward": dict.fromkeys(MATHS, by(math_reward)),
    "math_dapo": dict.fromkeys((*MATHS, "dapo_lines"), by(math_dapo)),
    "geo3k": dict.fromkeys(MATHS, by(geo3k, format_score=0.0)),
    "gsm8k": {"gsm8k": by(gsm8k), "gsm8k_flexible": by(gsm8k, method="flexible")},
    "search_qa": {"search_qa": target},
    "exact_match": {"exact_match": exact},
    "regex_match": {"regex_match": by(regex_match)},
    "format": {"format": by(format)},
    "visual_format": {"visual_format": by(visual_format)},
    "tool_use": {"tool_use": call, "tool_forms": tool_form},
    "length": {"length": penalty},
    "code": {
        "code_programs": program,
        "code_outputs": lambda options, truth, response: code.same_output(response, truth),
        "code_results": result,
    },
    "verl": dict.fromkeys(("verl", "verl_conventions", "equality"), by_source),
    "reasoning_gym": {"gym": by_task},
}


def wrong_of(tables: dict[str, Scorer]) -> list[str]:
    found = []
    for table, is_right in tables.items():
        for form, options, truth, response, right in rows(table):
            shown = boxed(truth, response) if table == "equality" else response
            if is_right(dict(options), truth, shown) is not right:
                found.append(
                    f"{form}: {truth!r} :: {response!r} is {'right' if right else 'wrong'}"
                )
    return found


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_scorer_judges_its_table(scorer: str) -> None:
    assert not wrong_of(SCORERS[scorer])


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_table_has_many_forms_and_as_many_wrong_answers_as_right_ones(scorer: str) -> None:
    found = [row for table in SCORERS[scorer] for row in rows(table)]
    forms = Counter(form for form, *_ in found)
    pairs = len(found) * (len(GYM) if scorer == "reasoning_gym" else 1)
    assert pairs >= 200 and max(forms.values()) <= 10
    assert 0.45 <= sum(not right for *_, right in found) / len(found) <= 0.75
    assert len({str(row) for row in found}) == len(found), "a row stands twice"


NO_ANSWERS = (None, float("nan"), "", "  ", "NaN", "nan", "null")
OF_ANSWERS = (exact_match, geo3k, gsm8k, math, math_dapo, math_reward, prime_math, regex_match)


@pytest.mark.parametrize("truth", NO_ANSWERS)
def test_an_empty_cell_is_no_ground_truth(truth: Any) -> None:
    for module in OF_ANSWERS:
        with pytest.raises(UserError, match=r"the ground truth .* is not an answer"):
            module.compute_score("", f"\\boxed{{{truth}}} #### {truth}", truth)
    for target in (truth, [truth], ["x", truth], []):
        with pytest.raises(UserError, match="ground truth"):
            search_qa.compute_score("", "<answer>nan</answer>", {"target": target})
    with pytest.raises(UserError, match="ground truth"):
        tool_use.compute_score("", "", truth)
    with pytest.raises(UserError, match="ground truth"):
        exact_match.compute_score("", "x", ["x", truth])


def test_a_number_is_a_ground_truth_as_its_text_is() -> None:
    assert exact_match.compute_score("", "6", 6) == 1.0


def test_a_ground_truth_that_is_no_number_is_no_answer_to_gsm8k() -> None:
    for truth in ("three", "4 or 5", "1/0", "x"):
        with pytest.raises(UserError, match="is not a number"):
            gsm8k.compute_score("", "#### 3", truth)


TALL = [
    "10^99!", "factorial(99999999)", "((((9^99)^99)^99)^99)", "Pow(9,99999999)",
    "Integer(9)^Integer(99999999)", "Rational(1,3)^Integer(99999999)", "factorial(factorial(12))",
    "9^9^9^9^9", "9**9**9**9", "((9!)!)!", "(10^9)!", "2^(2^(2^(2^99)))", "exp(exp(exp(99)))",
    "9^(9^99)", "9^-9^-9^9", "Mul(9,Pow(9,99999999))", "Function(x)(9)^99999999",
    "Float(9)^Integer(99999999)", "Symbol(x)^Pow(9,9999999)", "(9^99)^(9^99)", "(9^9^9)/(9^9^9)",
    "99999999999999999999!", "sqrt(9^(9^(9^9)))", "log(9^(9^(9^9)))", "sin(9^(9^9))",
    "tan(factorial(9999999))", "(x+1)^99999999", "(((x^99)^99)^99)^99", "Add(Pow(9,9999999),1)",
    "1e99999999", "factorial(1e9)", "abs(9^(9^(9^9)))",
]  # fmt: skip


@pytest.mark.parametrize("conventions", ["meshrl", "verl"])
def test_no_answer_is_computed_without_end(conventions: Any) -> None:
    for module, answer in itertools.product(
        (geo3k, math, math_dapo, math_reward, prime_math), TALL
    ):
        config = module.Config(conventions=conventions)
        for response, truth in ((f"\\boxed{{{answer}}}", "5"), (f"Answer: {answer}", "x^2")):
            found = module.compute_score("", response, truth, None, config)
            assert (found["score"] if isinstance(found, dict) else found) <= 0.0, (module, answer)
    for method, answer in itertools.product(("strict", "flexible"), TALL):
        config = gsm8k.Config(method=method, conventions=conventions)
        assert gsm8k.compute_score("", f"#### {answer}", "5", None, config) == 0.0
