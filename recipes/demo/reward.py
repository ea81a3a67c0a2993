"""The demo's reward: 1 for the right digit after the last `#`, else 0. How it was found does not count."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    """Outcome only; whether the answer was thought through is reported beside the score."""
    thought, mark, answer = solution_str.rpartition("#")
    right = bool(mark) and answer.strip() == str(ground_truth)
    return {"score": float(right), "thinks": float(bool(thought))}
