"""Mathematical equality: LaTeX, fractions, roots, sets, intervals, matrices, equations; the reward for new runs.

The answer is the last box, else what the response announces. Under `conventions: verl` it is what the package
math-verify (https://github.com/huggingface/Math-Verify) says, which is one of verl's scorers.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from meshrl.common import config
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards import _answers, _equality
from meshrl.rewardd.rewards._answers import Conventions, last_boxed, said, wanted

REQUIRES = ("math-verify", "latex2sympy2_extended", "sympy", "mpmath")
"""Packages whose version is part of the reward hash."""


MOST_FORMULAS = 8
"""Most formulas, counted from the end, that are looked at before math-verify computes them."""


class Config(config.Config):
    """Accepted places of the answer."""

    boxed_only: bool = False
    r"""True: an answer outside `\boxed{}` scores 0."""
    conventions: Conventions = "meshrl"
    """`verl`: verl's numbers, its mistakes included."""


prepare = _equality.prepare


def _package() -> ModuleType:
    # Imported late: sympy takes a third of a second and 40 MB, and only scoring processes need it.
    try:
        package = importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError(
            f"reward 'math' needs the math-verify package: pip install 'meshrl[rewards]' ({error})"
        ) from error
    # It warns on each call that its timeouts are off and the caller needs its own: the pool has them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return package


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """1 if the response's answer equals the ground truth, else 0.

    Raises:
        UserError: the ground truth is no answer; a reward of 0 would blame the policy for it.
    """
    truth = wanted(ground_truth, "math")
    if config.conventions == "verl":
        return _verified(solution_str, truth, config.boxed_only)
    read = _answers.boxed if config.boxed_only else _answers.boxed_or_announced
    return float(_equality.is_right(read(said(solution_str)), truth))


def _verified(solution_str: str, truth: str, boxed_only: bool) -> float:
    package = _package()
    gold = package.parse(
        truth if "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None
    )
    if not gold:
        raise UserError(f"math-verify cannot read the ground truth {truth[:80]!r}")
    if boxed_only:
        boxed = last_boxed(solution_str)
        if boxed is None:
            return 0.0
        solution_str = f"\\boxed{{{boxed}}}"
    response = said(solution_str)
    formulas = [*solution_str.split("$")[1::2][-MOST_FORMULAS:], _answers.announced(response)]
    if any(_equality.is_tall(text) for text in (_answers.boxed(response), *formulas) if text):
        return 0.0
    answer = package.parse(solution_str, parsing_timeout=None)
    return float(package.verify(gold, answer, timeout_seconds=None))
