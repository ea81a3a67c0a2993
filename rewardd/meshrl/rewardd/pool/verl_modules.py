"""Modules by verl's names, for reward files that import verl's scorers: its signatures over the scorers of ours.

They can be imported in a scoring process only, and only where verl itself is not installed: `from
verl.utils.reward_score import math_dapo` then gives a module whose functions answer as verl 0.9's do (`conventions:
verl`). Everything else of verl is an import error that says so.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from meshrl.rewardd.rewards import (
    _answers,
    code,
    geo3k,
    gsm8k,
    math,
    math_dapo,
    math_reward,
    prime_math,
    search_qa,
    verl,
)
from meshrl.rewardd.rewards._answers import blocks

SCORES = "verl.utils.reward_score"
INVALID = "[INVALID]"
BOX = "\\boxed{"
VERL_MATH = math_reward.Config(conventions="verl")
ANSWER_LINE = r"(?i)Answer\s*:\s*([^\n]+)"


class Gsm8k:
    """`gsm8k`."""

    @staticmethod
    def extract_solution(solution_str: str, method: str = "strict") -> str | None:
        """The answer that is read from a solution."""
        tail = solution_str[-gsm8k.TAIL :]
        pattern = gsm8k.MARKED if method == "strict" else gsm8k.NUMBER
        found: list[str] = pattern.findall(tail)
        if method == "strict":
            return found[-1].replace(",", "") if found else None
        numbers = (number for number in reversed(found) if number != ".")
        return next(numbers, found[0] if found else None)

    @staticmethod
    def compute_score(
        solution_str: str,
        ground_truth: Any,
        method: str = "strict",
        format_score: float = 0.0,
        score: float = 1.0,
    ) -> float:
        """`score`, `format_score` or 0."""
        answer = Gsm8k.extract_solution(solution_str, method)
        if answer is None:
            return 0
        return score if answer == ground_truth else format_score


class MathReward:
    """`math_reward`, once `math`."""

    @staticmethod
    def last_boxed_only_string(string: str) -> str | None:
        r"""The last `\boxed{…}` (or `\fbox`) with its command; None if none closes."""
        if "\\boxed " in string:
            return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
        start = max(string.rfind("\\boxed"), -1)
        start = start if start >= 0 else string.rfind("\\fbox")
        end = _answers.closing(string, start) if start >= 0 else -1
        return string[start : end + 1] if end >= 0 else None

    @staticmethod
    def remove_boxed(s: str) -> str:
        """The text in the box; AssertionError for anything else."""
        if "\\boxed " in s:
            assert s.startswith("\\boxed ")
            return s.removeprefix("\\boxed ")
        assert s.startswith(BOX) and s.endswith("}"), f"no box: {s}"
        return s[len(BOX) : -1]

    @staticmethod
    def strip_string(string: str) -> str:
        """The one spelling of an answer."""
        return math_reward.normal(string)

    @staticmethod
    def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
        """Equal in their one spelling; None equals None."""
        if str1 is None or str2 is None:
            return str1 is str2
        return math_reward.equal(str1, str2)

    @staticmethod
    def compute_score(solution_str: str, ground_truth: Any) -> float:
        """1 or 0."""
        return math_reward.compute_score("", solution_str, ground_truth, None, VERL_MATH)


class MathBatch:
    """`math_batch`."""

    @staticmethod
    def compute_score_batched(
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Any],
    ) -> list[float]:
        """`math_reward` of each."""
        pairs = zip(solution_strs, ground_truths, strict=True)
        return [MathReward.compute_score(solution, truth) for solution, truth in pairs]


class MathDapo:
    """`math_dapo`."""

    remove_boxed = staticmethod(MathReward.remove_boxed)
    normalize_final_answer = staticmethod(math_dapo.normal)

    @staticmethod
    def last_boxed_only_string(string: str) -> str | None:
        r"""The last `\boxed{…}` with its command; None if there is none or it does not close."""
        found = _answers.last_boxed(string, (BOX,))
        return None if found is None else f"{BOX}{found}}}"

    @staticmethod
    def is_correct_minerva(
        solution_str: str,
        gt: str,
        gt_need_extract: bool = False,
        answer_pattern: str = ANSWER_LINE,
    ) -> tuple[bool, str]:
        """Whether the last answer line is right, and what it says."""
        found = re.findall(answer_pattern, solution_str)
        prediction = math_dapo.normal(found[-1] if found else INVALID)
        truth = _answers.last_boxed(gt, (BOX,)) or "" if gt_need_extract else gt
        return prediction == math_dapo.normal(truth), prediction

    @staticmethod
    def is_correct_strict_box(
        pred: str, gt: str, pause_tokens_index: Sequence[int] | None = None
    ) -> tuple[int, str | None]:
        """1 or -1, and the content of the last box."""
        start = -100 if pause_tokens_index is None else pause_tokens_index[-1] - 100
        found = _answers.last_boxed(pred[start:], (BOX,))
        return (1 if found == gt else -1), found

    @staticmethod
    def verify(
        solution_str: str,
        answer: str,
        strict_box_verify: bool = False,
        pause_tokens_index: Sequence[int] | None = None,
    ) -> tuple[bool, str | None]:
        """Whether it is right, and what was read: the answer line, else the box."""
        right, line = MathDapo.is_correct_minerva(solution_str, answer)
        if not strict_box_verify and line != INVALID:
            return right, line
        points, box = MathDapo.is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return (right, line) if box is None and not strict_box_verify else (points == 1, box)

    @staticmethod
    def compute_score(
        solution_str: str,
        ground_truth: str,
        strict_box_verify: bool = False,
        pause_tokens_index: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """`score` of 1 or -1, `acc`, `pred`."""
        tail = solution_str[-math_dapo.TAIL :]
        right, read = MathDapo.verify(tail, ground_truth, strict_box_verify, pause_tokens_index)
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": read}


class MathVerify:
    """`math_verify`: needs the package math-verify."""

    @staticmethod
    def compute_score(
        model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0
    ) -> float:
        """1 or 0; the deadline of a sample is the pool's."""
        config = math.Config(conventions="verl")
        return math.compute_score("", model_output, ground_truth, None, config)


class PrimeMath:
    """`prime_math`."""

    grade_answer = staticmethod(prime_math.simple_equal)

    @staticmethod
    def compute_score(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
        """Whether it is right, whether it could be read, and the answer."""
        config = prime_math.Config(conventions="verl")
        right = bool(prime_math.compute_score("", model_output, ground_truth, None, config))
        return right, True, prime_math.stated(model_output)


class SearchQa:
    """`search_r1_like_qa_em`."""

    normalize_answer = staticmethod(search_qa.normal)

    @staticmethod
    def em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
        """1 for an exact match after normalisation."""
        golden = [golden_answers] if isinstance(golden_answers, str) else golden_answers
        return int(search_qa.normal(prediction) in {search_qa.normal(one) for one in golden})

    @staticmethod
    def subem_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
        """1 where the prediction contains an answer."""
        golden = [golden_answers] if isinstance(golden_answers, str) else golden_answers
        return int(any(search_qa.normal(one) in search_qa.normal(prediction) for one in golden))

    @staticmethod
    def extract_solution(solution_str: str) -> str | None:
        """The last answer."""
        found = list(blocks(solution_str, "<answer>", "</answer>"))
        return found[-1].strip() if found else None

    @staticmethod
    def compute_score(
        solution_str: str,
        ground_truth: Any,
        method: str = "strict",
        format_score: float = 0.0,
        score: float = 1.0,
    ) -> float:
        """`score`, `format_score` or 0."""
        config = search_qa.Config(format_score=format_score, score=score, conventions="verl")
        return search_qa.compute_score("", solution_str, ground_truth, None, config)


class Geo3k:
    """`geo3k`."""

    @staticmethod
    def format_reward(predict_str: str) -> float:
        """1 for a thought and a box."""
        return float(geo3k.is_formed(predict_str))

    @staticmethod
    def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
        """1 for the right answer."""
        answer = _answers.last_boxed(predict_str) if use_boxed else predict_str
        return float(answer is not None and prime_math.simple_equal(answer, ground_truth))

    @staticmethod
    def compute_score(
        predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
    ) -> float:
        """Both, weighted."""
        right = Geo3k.acc_reward(predict_str, ground_truth, use_boxed)
        return (1 - format_score) * right + format_score * Geo3k.format_reward(predict_str)


class PrimeCode:
    """`prime_code`: in the strict sandbox only."""

    @staticmethod
    def compute_score(
        completion: str, test_cases: Any, continuous: bool = False
    ) -> tuple[float, list[dict[str, Any]]]:
        """The share of tests that pass (1 or 0 unless `continuous`), and what is known of them."""
        found = code.compute_score("", completion, test_cases)
        share = float(found["score"])
        return (share if continuous else float(share == 1.0)), [dict(found)]


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """The scorer of `data_source`. Raises NotImplementedError where verl has none."""
    if data_source not in verl.SCORERS and not data_source.startswith("aime"):
        raise NotImplementedError(f"no scorer for data_source {data_source!r}")
    config = verl.Config(conventions="verl")
    return verl.compute_score(data_source, solution_str, ground_truth, extra_info, config)


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running loop, or a new one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.new_event_loop()


def _scores() -> dict[str, Any]:
    return {
        "default_compute_score": default_compute_score,
        "_default_compute_score": default_compute_score,
        "get_default_compute_score": lambda reward_name=None: default_compute_score,
    }


def _of(scorer: type) -> Callable[[], dict[str, Any]]:
    names = [name for name in vars(scorer) if not name.startswith("_")]
    return lambda: {name: getattr(scorer, name) for name in names}


MODULES: dict[str, Callable[[], dict[str, Any]]] = {
    "verl": dict,
    "verl.utils": dict,
    "verl.utils.ray_utils": lambda: {"get_event_loop": get_event_loop},
    SCORES: _scores,
    f"{SCORES}.gsm8k": _of(Gsm8k),
    f"{SCORES}.math": _of(MathReward),
    f"{SCORES}.math_reward": _of(MathReward),
    f"{SCORES}.math_batch": _of(MathBatch),
    f"{SCORES}.math_dapo": _of(MathDapo),
    f"{SCORES}.math_verify": _of(MathVerify),
    f"{SCORES}.prime_math": _of(PrimeMath),
    f"{SCORES}.prime_code": _of(PrimeCode),
    f"{SCORES}.geo3k": _of(Geo3k),
    f"{SCORES}.search_r1_like_qa_em": _of(SearchQa),
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in MODULES:
            is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
            return importlib.machinery.ModuleSpec(
                fullname, self, origin="meshrl", is_package=is_package
            )
        if fullname.startswith("verl."):
            raise ModuleNotFoundError(
                f"{fullname} is a part of verl, which is not installed here (there is {SCORES})",
                name=fullname,
            )
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(MODULES[module.__name__]())


def offer() -> None:
    """Let the modules be imported from now on, after everything that is installed; idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
