"""1 for the right number after the last `#`, else 0; whether code was run is reported beside it."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict:
    """Outcome only: code that does not help earns nothing."""
    answer = solution_str.rpartition("#")[2].strip()
    return {
        "score": float(answer == str(ground_truth)),
        "ran_code": float("```python" in solution_str),
    }
