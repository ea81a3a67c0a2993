"""Question answering with search (Search-R1, https://arxiv.org/abs/2503.09516): exact match of the last `<answer>`.

Compared in lower case, without accents of composition, punctuation and articles before a word; signs, points and
commas that belong to a number stay, and so do symbols such as + and #. Under `conventions: verl` it is normalised as
in SQuAD (https://arxiv.org/abs/1606.05250): no punctuation at all, so that 1.5 is 15, and no articles.
"""

from __future__ import annotations

import functools
import re
import string
import unicodedata

from meshrl.common import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards._answers import Conventions, blocks, said, wanted

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLE = re.compile(r"(?<!\S)(?:a|an|the)\s+(?=\S)")
GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
MARKS = re.compile(
    r"(?<=\d)[.,:/'\"-](?=\d)|(?<![\w.])(?:-(?=\.?\d)|\.(?=\w))|[+#%°$€£@&*=<>^~]|(.)", re.DOTALL
)
"""A mark that stays, or one character."""
EMPHASIS = re.compile(r"(\*{1,3}|_{1,3})(?=[^\s*_])((?:(?!\1).)+)(?<=[^\s*_])\1")
"""Around a whole answer: `**Paris**`, but not `M*A*S*H`."""


class Config(config.Config):
    """Scores, and how many answers are too many."""

    score: float = 1.0
    """Score of a match."""
    format_score: float = 0.0
    """Score of an answer that does not match."""
    conventions: Conventions = "meshrl"
    """`verl`: verl's numbers, its mistakes included."""
    max_tags: int = 10
    """Most opening or closing tags for a full score; beyond it a match scores a quarter, against guessing."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """The score of the last answer against `ground_truth["target"]`, a string or a list of them.

    Raises:
        UserError: there is no target, or an empty one.
    """
    if not isinstance(ground_truth, dict) or "target" not in ground_truth:
        raise UserError(
            f"search_qa needs ground_truth {{'target': …}}, got {str(ground_truth)[:80]!r}"
        )
    target = ground_truth["target"]
    targets = target if isinstance(target, list | tuple) else [target]
    if not targets:
        raise UserError("search_qa: the ground truth has no target")
    texts = [wanted(each, "search_qa") for each in targets]
    is_verl = config.conventions == "verl"
    answers = list(blocks(solution_str if is_verl else said(solution_str), "<answer>", "</answer>"))
    if not answers:
        return 0.0
    if is_verl:
        right = normal(answers[-1]) in {normal(text) for text in texts}
    else:
        right = bool(spellings(answers[-1]) & {s for text in texts for s in spellings(text)})
    if not right:
        return config.format_score
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return config.score / 4 if tags > config.max_tags else config.score


def normal(text: str) -> str:
    """Lower case without punctuation, articles and repeated white space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def spellings(text: str) -> set[str]:
    """The text in lower case without articles and punctuation; a hyphen in a word is nothing, or a space."""
    text = (
        unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-").replace("\u2013", "-")
    )
    if emphasised := EMPHASIS.fullmatch(text.strip().rstrip(".")):
        text = emphasised[2]
    text = GROUPS.sub(lambda match: match[0].replace(",", ""), text)
    found = set()
    for hyphen in ("", " "):
        kept = MARKS.sub(functools.partial(_kept, hyphen=hyphen), text)
        found.add(" ".join(ARTICLE.sub("", " ".join(kept.split())).split()))
    return found - {""}


def _kept(match: re.Match[str], hyphen: str) -> str:
    if match[1] is None or match[1].isalnum() or match[1].isspace():
        return match[0]
    if unicodedata.category(match[1]).startswith("M"):
        return match[0]
    return hyphen if match[1] in "-_/" else ""
