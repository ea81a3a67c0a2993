"""1 for the right number after the last `#`, else 0; whether a tool was asked is reported beside it."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    """Outcome only: a call that does not help earns nothing."""
    answer = solution_str.rpartition("#")[2].strip()
    return {
        "score": float(answer == str(ground_truth)),
        "called": float("calculator" in solution_str),
    }
