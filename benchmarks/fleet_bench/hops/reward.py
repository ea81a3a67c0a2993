"""1 for the number at the end of the chain, else 0; how many turns it took is reported beside it."""

from __future__ import annotations


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    """The policy answers with a `#` before what it has found."""
    answer = solution_str.rpartition("#")[2].strip()
    return {
        "score": float(answer == str(ground_truth)),
        "turns": float(extra_info["num_turns"]),
    }
