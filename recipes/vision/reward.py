"""1 for the colour that the picture shows, 0 for any other answer."""

from __future__ import annotations


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]
) -> float:
    """The first word counts."""
    words = solution_str.split()
    return float(bool(words) and words[0] == ground_truth)
