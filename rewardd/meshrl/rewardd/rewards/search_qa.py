"""Question answering with search (Search-R1, https://arxiv.org/abs/2503.09516): exact match of the last `<answer>`.

Normalised as in SQuAD (https://arxiv.org/abs/1606.05250): lower case, no punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string

from meshrl.contract import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards._blocks import blocks

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Config(config.Config):
    """Scores, and how many answers are too many."""

    score: float = 1.0
    """Score of a match."""
    format_score: float = 0.0
    """Score of an answer that does not match."""
    max_tags: int = 10
    """With more opening or closing tags than this a match scores a quarter, against guessing by many answers."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """The score of the last answer against `ground_truth["target"]`, a string or a list of them."""
    if not isinstance(ground_truth, dict) or "target" not in ground_truth:
        raise UserError(
            f"search_qa wants ground_truth {{'target': …}}, got {str(ground_truth)[:80]!r}"
        )
    answers = list(blocks(solution_str, "<answer>", "</answer>"))
    if not answers:
        return 0.0
    target = ground_truth["target"]
    targets = [target] if isinstance(target, str) else target
    if normal(answers[-1]) not in {normal(str(t)) for t in targets}:
        return config.format_score
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return config.score / 4 if tags > config.max_tags else config.score


def normal(text: str) -> str:
    """Lower case without punctuation, articles and repeated white space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())
