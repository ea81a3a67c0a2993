"""A language model as judge behind any OpenAI-compatible endpoint: a template asks, a pattern finds the score.

The template may use {prompt}, {response}, {ground_truth}, {data_source}; other braces stay as they are. The score is
the last match of `pattern` (its first group), divided by `scale`. After `attempts` answers without
a score the result is an infrastructure fault: the judge has failed, not the policy.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from meshrl.contract.config import RegularExpression
from meshrl.contract.errors import CorruptError, InfraError, UserError
from meshrl.contract.types import Json, Sample
from meshrl.contract.words import counted
from meshrl.rewardd.judges._remote import RemoteJudge, RemoteJudgeConfig

TEMPLATE = """Grade the response to the question.

Question:
{prompt}

Reference answer:
{ground_truth}

Response:
{response}

Think briefly, then end with a line "Score: N", N from 0 (wrong) to 10 (right and complete)."""
FIELD = re.compile(r"\{(prompt|response|ground_truth|data_source)\}")


class Config(RemoteJudgeConfig):
    """`url` is the API's root, usually ending in /v1."""

    model: str
    """The judge's model."""
    template: str = TEMPLATE
    """The user's message."""
    system: str = ""
    """The system message; empty: none."""
    pattern: RegularExpression = r"(?i)score\s*:\s*\**\s*(-?\d+(?:\.\d+)?)"
    """The first group of its last match is the score."""
    scale: PositiveFloat = 10.0
    """The score is divided by this."""
    low: float = 0.0
    """A lower score (after scaling) is rejected."""
    high: float = 1.0
    """A higher score (after scaling) is rejected."""
    temperature: NonNegativeFloat = 0.0
    max_tokens: PositiveInt = 512
    attempts: PositiveInt = 2
    """Most answers requested until one has a score."""

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, value: str) -> str:
        if re.compile(value).groups < 1:
            raise ValueError("it has no group that would be the score")
        return value


class GenerativeJudge(RemoteJudge):
    """Implements the Judge port."""

    def __init__(self, config: Config) -> None:
        super().__init__("generative", config)
        self._config = config
        self._pattern = re.compile(config.pattern)

    async def _ask(self, sample: Sample) -> Json:
        config, answer = self._config, ""
        system = [{"role": "system", "content": config.system}] if config.system else []
        question = {"role": "user", "content": filled(config.template, sample)}
        for number in range(config.attempts):
            body = {
                "model": config.model,
                "messages": [*system, question],
                "max_tokens": config.max_tokens,
                # At temperature 0 the same question gets the same answer, so a further try needs a higher one.
                "temperature": config.temperature if number == 0 else max(config.temperature, 0.7),
            }
            answer = _content(await self.post("/chat/completions", body))
            if (score := self._parsed(answer)) is not None:
                return {"score": score, "answer": answer}
        raise InfraError(
            f"the generative judge gave no score in {counted(config.attempts, 'answer')}; the"
            f" last ends with {answer[-120:]!r}"
        )

    def _parsed(self, answer: str) -> float | None:
        matches = self._pattern.findall(answer)
        try:
            first = matches[-1] if isinstance(matches[-1], str) else matches[-1][0]
            score = float(first) / self._config.scale
        except (IndexError, ValueError):
            return None
        return score if self._config.low <= score <= self._config.high else None


def filled(template: str, sample: Sample) -> str:
    """The template with the sample's fields filled in; braces inside a response stay text.

    Raises:
        UserError: it asks for the prompt, and the sample has none.
    """
    if not sample.messages and "{prompt}" in template:
        raise UserError(
            "the generative judge's template asks for {prompt}, and the sample has no messages"
        )
    values = {
        "prompt": "\n\n".join(message.content for message in sample.messages),
        "response": sample.solution,
        "ground_truth": str(sample.ground_truth),
        "data_source": sample.data_source,
    }
    return FIELD.sub(lambda match: values[match.group(1)], template)


def _content(answer: Any) -> str:
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise CorruptError(
            f"the generative judge: no choices[0].message.content in {str(answer)[:200]}"
        ) from error


def build(config: Config) -> GenerativeJudge:
    """The judge, not connected yet."""
    return GenerativeJudge(config)
