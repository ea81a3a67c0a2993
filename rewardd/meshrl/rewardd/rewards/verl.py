"""verl's table from data_source to scorer: scores a data set prepared for verl without any configuration."""

from __future__ import annotations

import difflib
from typing import Any

from meshrl.common import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards import (
    code,
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    prime_math,
    search_qa,
)
from meshrl.rewardd.rewards._answers import Conventions

REQUIRES = ("sympy", "mpmath")

SCORERS: dict[str, Any] = {
    "openai/gsm8k": gsm8k,
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        math_reward,
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), math_dapo),
    **dict.fromkeys(
        (
            "numina_aops_forum",
            "numina_synthetic_math",
            "numina_amc_aime",
            "numina_synthetic_amc",
            "numina_cn_k12",
            "numina_olympiads",
        ),
        prime_math,
    ),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), code),
    "hiyouga/geometry3k": geo3k,
    **{
        f"searchR1_{name}": search_qa
        for name in [
            "nq",
            "triviaqa",
            "popqa",
            "hotpotqa",
            "2wikimultihopqa",
            "musique",
            "bamboogle",
        ]
    },
}
"""data_source to reward module. Names that begin with `aime` go to math_dapo, programs to code (needs a sandbox)."""


NO_SOURCE = "the row has no data_source, by which the reward verl finds its scorer"


class Config(config.Config):
    """The data_source decides; this says how."""

    conventions: Conventions = "meshrl"
    """`meshrl`: strict, and right as far as we know; `verl`: verl's numbers, its mistakes included."""


def scorer_of(data_source: str) -> Any:
    """The reward module of a data_source. Raises UserError where there is none."""
    scorer = math_dapo if data_source.startswith("aime") else SCORERS.get(data_source)
    if scorer is None:
        within = [known for known in SCORERS if data_source.lower() in known.lower()]
        near = within[:1] or difflib.get_close_matches(data_source, SCORERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        found = f"no scorer for data_source {data_source!r}{hint}" if data_source else NO_SOURCE
        raise UserError(
            f"{found} (known: {', '.join(SCORERS)}, aime*); "
            "name one in reward.functions or reward.custom_reward_function"
        )
    return scorer


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float | dict[str, Json]:
    """The score of the scorer of `data_source`.

    Raises:
        UserError: no scorer is known for it.
    """
    scorer = scorer_of(data_source)
    options = {} if scorer is code else {"conventions": config.conventions}
    result: float | dict[str, Json] = scorer.compute_score(
        data_source, solution_str, ground_truth, extra_info, scorer.Config(**options)
    )
    return result
