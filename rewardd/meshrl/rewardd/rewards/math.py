"""Mathematical equality through the math-verify package: LaTeX, fractions, sets, intervals, equations.

https://github.com/huggingface/Math-Verify. The reward for new mathematics runs; the data_source table
of `verl` keeps the older string scorers for parity.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from meshrl.contract import config
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards._latex import last_boxed

REQUIRES = ("math-verify", "latex2sympy2_extended", "sympy")
"""Packages whose version is part of the reward hash."""


class Config(config.Config):
    """Where the answer may stand."""

    boxed_only: bool = False
    r"""True: an answer outside `\boxed{}` scores 0."""


def prepare() -> None:
    """Import the package before the first sample. Raises ConfigError when it is not installed."""
    _package()


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
        UserError: the ground truth cannot be read; a reward of 0 would blame the policy for it.
    """
    package = _package()
    truth = str(ground_truth)
    gold = package.parse(
        truth if "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None
    )
    if not gold:
        raise UserError(f"math-verify cannot read the ground truth {truth[:80]!r}")
    if config.boxed_only:
        boxed = last_boxed(solution_str)
        if boxed is None:
            return 0.0
        solution_str = f"\\boxed{{{boxed}}}"
    answer = package.parse(solution_str, parsing_timeout=None)
    return float(package.verify(gold, answer, timeout_seconds=None))
