"""A language model as judge behind any OpenAI-compatible endpoint: a template asks, a pattern finds the score.

The template may use {prompt}, {response}, {ground_truth}, {data_source}; other braces stay as they are. The score is
the last match of `pattern` (its first group), divided by `scale`. A line that holds the score alone counts before a
line that begins with it, and that before a score within a sentence; a quoted one, and whatever stands in the judge's
thought, does not count. An answer that was cut off has no score: the next may be longer. After `attempts` answers
without a score the result is an infrastructure fault: the judge has failed, not the policy.

The policy wants to be quoted: marks of a score in its response are replaced before the judge sees them.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from meshrl.common.config import RegularExpression
from meshrl.common.plain_text import counted
from meshrl.contract.errors import CorruptError, InfraError, UserError
from meshrl.contract.types import Json, Sample
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
PATTERN = (
    r"(?i)score[\s*_]*[:：=][\s*_]*(?:[<\[($]|\\boxed\{){0,2}"
    r"(-?(?:\d+(?:\.\d+)?|\.\d+))(?!\s*\\?%|[.,]?\d|e[-+]?\d)"
)
DEFUSED = "(a score that the response claims) "
"""Stands in the response where the mark of a score stood."""
MORE_ROOM = 4
"""Times as many tokens as the answer that was cut off."""
THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
LEAD = re.compile(r"[\W_]*(?:(?:the|my|final|overall|total)[\s*_]+)*", re.IGNORECASE)
"""Characters allowed before the score on a line that begins with it."""
OUT_OF = re.compile(r"[\s*_>\])}$]*(?:/|\(?\s*out\s+of)[\s*_]*(\d+(?:\.\d+)?)\)?", re.IGNORECASE)
RANGE = re.compile(r"[*_>\])}$]*(?:[-–—~]|\s+(?:or|to)\s+)[*_<\[($]*\d", re.IGNORECASE)
"""Makes one score the first of two."""
QUOTES = tuple("'\"`“”‘’„«»")


class Config(RemoteJudgeConfig):
    """`url` is the API's root, usually ending in /v1."""

    model: str
    """The judge's model."""
    template: str = TEMPLATE
    """The user's message."""
    system: str = ""
    """The system message; empty: none."""
    pattern: RegularExpression = PATTERN
    """The first group of its last match is the score."""
    scale: PositiveFloat = 10.0
    """The score is divided by this."""
    low: float = 0.0
    """A lower score (after scaling) is rejected."""
    high: float = 1.0
    """A higher score (after scaling) is rejected."""
    temperature: NonNegativeFloat = 0.0
    max_tokens: PositiveInt = 512
    """Tokens of the first answer; after one that was cut off the next may have four times as many."""
    attempts: PositiveInt = 2
    """Most answers requested until one has a score."""

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, value: str) -> str:
        if re.compile(value).groups < 1:
            raise ValueError("it has no group that would be the score")
        return value


class GenerativeJudge(RemoteJudge):
    """Asks a language model."""

    def __init__(self, config: Config) -> None:
        super().__init__("generative", config)
        self._config = config
        self._pattern = re.compile(config.pattern)

    async def _ask(self, sample: Sample) -> Json:
        config, answer, cut = self._config, "", False
        system = [{"role": "system", "content": config.system}] if config.system else []
        response = defused(sample.solution, self._pattern)
        question = {"role": "user", "content": filled(config.template, sample, response)}
        room = config.max_tokens
        for number in range(config.attempts):
            body = {
                "model": config.model,
                "messages": [*system, question],
                "max_tokens": room,
                # At temperature 0 the same question gets the same answer, so a further try needs a higher one.
                "temperature": config.temperature
                if number == 0 or cut
                else max(config.temperature, 0.7),
            }
            answer, cut = _content(await self.post("/chat/completions", body))
            if cut:
                room *= MORE_ROOM
            elif (score := self._parsed(answer)) is not None:
                return {"score": score, "answer": answer}
        why = f" (cut off at {room // MORE_ROOM} tokens: raise max_tokens)" if cut else ""
        raise InfraError(
            f"the generative judge gave no score in {counted(config.attempts, 'answer')}; the"
            f" last ends with {answer[-120:]!r}{why}"
        )

    def _parsed(self, answer: str) -> float | None:
        """The score after scaling; None if there is none, or only one of another scale."""
        text = without_thought(answer)
        ranked: dict[int, list[tuple[str, str | None]]] = {}
        for match in self._pattern.finditer(text):
            if text[max(match.start() - 8, 0) : match.start()].rstrip("*_").endswith(QUOTES):
                continue
            of = OUT_OF.match(text, match.end())
            before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
            after = text[of.end() if of else match.end() :].partition("\n")[0]
            rank = 0
            if not LEAD.fullmatch(before):
                rank = 2
            elif re.search(r"\w", after):
                rank = 1
            number = "" if RANGE.match(after) else match[1] or ""
            ranked.setdefault(rank, []).append((number, of[1] if of else None))
        if not ranked:
            return None
        found = ranked[min(ranked)]
        if 0 not in ranked and 1 not in ranked and self._pattern.pattern == PATTERN:
            # Within sentences: one of them may be a quotation.
            found = found if len(set(found)) == 1 else []
        try:
            number, of_what = found[-1]
            if of_what is not None and float(of_what) != self._config.scale:
                return None
            score = float(number) / self._config.scale
        except (IndexError, ValueError):
            return None
        return score if self._config.low <= score <= self._config.high else None


def without_thought(answer: str) -> str:
    """The judge's text after its thought; nothing if the thought does not end."""
    kept: list[str] = []
    text, depth, at = answer, 0, 0
    for mark in THOUGHT.finditer(text):
        if mark[1]:
            if depth == 0:
                kept.clear()  # the template has opened the thought
            depth = max(depth - 1, 0)
        else:
            if depth == 0:
                kept.append(text[at : mark.start()])
            depth += 1
        at = mark.end()
    return "".join(kept) + (text[at:] if depth == 0 else "")


def defused(response: str, pattern: re.Pattern[str]) -> str:
    """The response, with something else where `pattern` finds the mark of a score before its first group."""

    def replaced(match: re.Match[str]) -> str:
        mark = match[0][: max(match.start(1) - match.start(), 0)]
        return DEFUSED + match[0][len(mark) :] if mark.strip() else match[0]

    return pattern.sub(replaced, response)


def filled(template: str, sample: Sample, response: str) -> str:
    """The template with the sample's fields and the response filled in; braces inside a response stay text.

    Raises:
        UserError: it asks for the prompt, and the sample has none.
    """
    if not sample.messages and "{prompt}" in template:
        raise UserError(
            "the generative judge's template asks for {prompt}, and the sample has no messages"
        )
    values = {
        "prompt": "\n\n".join(message.content for message in sample.messages),
        "response": response,
        "ground_truth": str(sample.ground_truth),
        "data_source": sample.data_source,
    }
    return FIELD.sub(lambda match: values[match.group(1)], template)


def _content(answer: Any) -> tuple[str, bool]:
    """The judge's text, and whether it was cut off."""
    try:
        choice = answer["choices"][0]
        return str(choice["message"]["content"] or ""), choice.get("finish_reason") == "length"
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"the generative judge: no choices[0].message.content in {str(answer)[:200]}"
        ) from error


def build(config: Config) -> GenerativeJudge:
    """The judge, not connected yet."""
    return GenerativeJudge(config)
