"""The response has the wanted form: a regular expression, or tags in order, each once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field, model_validator

from meshrl.common import config
from meshrl.contract.types import Json


class Config(config.Config):
    """The wanted form: `pattern`, or without one `tags`."""

    pattern: str | None = None
    """A regular expression for the whole response (`.` matches newlines)."""
    tags: list[str] = Field(default_factory=lambda: ["think", "answer"])
    """`<tag>…</tag>` blocks that follow one another, nothing but white space between and around them."""
    score: float = 1.0
    """Score of the wanted form."""
    penalty: float = 0.0
    """Score of any other form, usually 0 or negative."""

    @model_validator(mode="after")
    def _compiles(self) -> Config:
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern is not a regular expression: {error}") from error
        return self


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """`score` for the wanted form, else `penalty`."""
    if config.pattern is not None:
        formed = re.fullmatch(config.pattern, solution_str, re.DOTALL) is not None
    else:
        formed = tagged(solution_str, config.tags)
    return config.score if formed else config.penalty


def tagged(text: str, tags: Sequence[str]) -> bool:
    """Whether `text` is the blocks `tags`, each once and in order, with nothing but white space around them."""
    rest = text
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        rest = rest.lstrip()
        if not rest.startswith(opening) or closing not in rest:
            return False
        rest = rest.partition(closing)[2]
    return not rest.strip()
