r"""The ground truth of a sample, and the text of a response that is its answer: for all scorers.

The last box counts. Boxes that `or`, `and` or a comma join are one answer of several parts, so that a hedge is no
answer to a question that has one. A box after `not` is none. If the last box does not end, the answer was cut off.
The work grows with the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json

Conventions = Literal["meshrl", "verl"]
"""`meshrl`: strict, and right as far as we know; `verl`: verl's numbers, its mistakes included."""
NOTHING = {"", "nan", "null"}
"""Texts that stand for an empty cell."""
MOST_FLOAT = 1e300
NOISE = 1e-12
"""The largest difference from a wanted 0.0, where there is a tolerance."""
THOUGHT = re.compile(r"^[ \t]*<think>|</think>", re.MULTILINE)


def wanted(ground_truth: Json, scorer: str) -> str:
    """The ground truth as text.

    Raises:
        UserError: it is no answer: null, NaN or empty.
    """
    missing = ground_truth is None or (isinstance(ground_truth, float) and math.isnan(ground_truth))
    if missing or (text := str(ground_truth)).strip().casefold() in NOTHING:
        shown = str(ground_truth)[:80]
        raise UserError(f"{scorer}: the ground truth {shown!r} is not an answer; fix or drop it")
    return text


def same(given: Json, wanted: Json, tolerance: float = 0.0) -> bool:
    """Equal as JSON: true is not 1, and a number may differ by `tolerance` times a wanted float."""
    if isinstance(wanted, bool) or isinstance(given, bool):
        return given is wanted
    if isinstance(wanted, int | float) and isinstance(given, int | float):
        if given == wanted or (given != given and wanted != wanted):
            return True
        if isinstance(wanted, int) or not math.isfinite(wanted) or abs(given) > MOST_FLOAT:
            return False
        return abs(given - wanted) <= max(tolerance * abs(wanted), NOISE * (tolerance > 0))
    if isinstance(wanted, list) and isinstance(given, list):
        alike = zip(given, wanted, strict=False)
        return len(given) == len(wanted) and all(same(a, b, tolerance) for a, b in alike)
    if isinstance(wanted, dict) and isinstance(given, dict):
        return given.keys() == wanted.keys() and all(
            same(given[key], value, tolerance) for key, value in wanted.items()
        )
    return bool(type(given) is type(wanted) and given == wanted)


def said(response: str) -> str:
    """The response without its `<think>` blocks; one that does not end hides all that follows it."""
    kept, at, thinking = [], 0, False
    for mark in THOUGHT.finditer(response):
        if mark[0] != "</think>":
            if not thinking:
                kept.append(response[at : mark.start()])
            thinking = True
        else:
            if not thinking and not kept:
                kept.append("")  # the prompt has opened the thought
            elif not thinking:
                continue
            thinking = False
            at = mark.end()
    if not thinking:
        kept.append(response[at:])
    return "\n".join(kept)


BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
UNBRACED = re.compile(r"[^\s${}]*")
NEGATION = re.compile(
    r"(?:\bnot|n't|\brather than|\binstead of|\bno longer|≠|\\neq?|!=)(?:\s+(?:equal to|the|a))?[\s$(\\*]*",
    re.IGNORECASE,
)
GAP = re.compile(r"[a-zA-Z]\w?\s*=|[a-zA-Z]+|[^\s\w]")
CONNECTORS = {"or", "and", ",", ";", "&", "/", "maybe", "perhaps", "possibly", "alternatively"}
FILLERS = {"either", "text", "quad", "qquad", "mbox", *"{}()[]$\\*"}
MOST_CHARACTERS = 2000
"""Longest line that is searched for an answer."""
LONGEST_GAP = 48
"""Characters between two boxes of one answer."""
ANSWER_IS = re.compile(
    r"answers?(?: to [^.:\n]{1,60})?\s*(?:\bis\b|\bare\b|\bwas\b|\bto be\b|=|:|：)\s*(?:simply |just |then )?[:：]?",
    re.IGNORECASE,
)
IS_ANSWER = re.compile(r"\s(?:is|are) (?:the|my|our) (?:final |correct )?answers?\b", re.IGNORECASE)
ANNOUNCING = re.compile(
    r"(?:\b(?:is|are|be|get|obtain|gives|equals|equal to|have|leaves)\b|[:≈])\s*", re.IGNORECASE
)
DENIED = re.compile(r"(?:\b(?:not|never|cannot)|n't)(?:\s+\w{1,12}){1,2}\s*$", re.IGNORECASE)
"""Ends in announcing words of what is not the answer."""
SENTENCE = re.compile(r"[.!](?=\s|$)")
REMARK = re.compile(
    r"\s+\((?![^()]*\b(?:or|maybe|perhaps|possibly)\b)[^()]*[a-zA-Z]{3}[^()]*\)\s*$"
)
ASIDE = re.compile(
    r",?\s+(?:because|since|as|which|so|where|for|when|after|by|in total|altogether|I hope)\b",
    re.IGNORECASE,
)
NUMBER = re.compile(r"[$€£]?-?[\d.,/]*\d%?")
WORD = re.compile(r"(?<!\\)\b[a-zA-Z]{4,}")
CONCLUDING = re.compile(
    r"^[\s*_]*(?:so|thus|hence|therefore|then|and|finally|now)\b,?\s*", re.IGNORECASE
)
HEDGE = re.compile(
    r"\d|n't\b|\b(?:or|not|never|cannot|maybe|perhaps|possibly)\b"
    r"|\b(?:at (?:least|most)|(?:less|more|greater|fewer) than)\b",
    re.IGNORECASE,
)


def boxed(text: str) -> str | None:
    """The content of the last box, or of several that are joined; None without one, and where it was cut off."""
    found = list(_boxes(text))
    if not found or found[-1][2] is None:
        return None
    kept = [box for box in found if box[2] is not None and not _is_negated(text, box[0])]
    if not kept:
        return None
    parts: dict[str, None] = {}
    for before, box in zip([None, *kept[:-1]], kept, strict=True):
        if before is not None and not _joins(text[before[1] : box[0]][: LONGEST_GAP + 1]):
            parts.clear()
        parts[str(box[2]).strip()] = None
    return ", ".join(parts)


def _boxes(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Start, end and content of each box that is in no other; None for one that does not end."""
    partners: dict[int, int] = {}
    opened: list[int] = []
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            partners[opened.pop()] = match.start()
    at = 0
    for match in BOX.finditer(text):
        start, opening = match.start(), match.end()
        if start < at:
            continue
        if text[opening : opening + 1] == "{":
            end = partners.get(opening)
            if end is None:
                yield start, len(text), None
                continue
            yield start, end + 1, BOX.sub("", text[opening + 1 : end])
            at = end + 1
        elif content := UNBRACED.match(text, opening):
            at = content.end()
            yield start, at, content[0].rstrip(".,;:") or None


def _is_negated(text: str, at: int) -> bool:
    before = text[max(at - 32, 0) : at]
    return any(match.end() == len(before) for match in NEGATION.finditer(before))


def _joins(gap: str) -> bool:
    if len(gap) > LONGEST_GAP:
        return False
    words = [word.casefold() for word in GAP.findall(gap)]
    known = all(word in CONNECTORS or word in FILLERS or word.endswith("=") for word in words)
    return known and any(word in CONNECTORS for word in words)


def boxed_or_announced(response: str) -> str | None:
    """The content of the last box; without any box, the answer that the response announces."""
    answer = boxed(response)
    return announced(response) if answer is None and "\\boxed" not in response else answer


def announced(text: str) -> str | None:
    """The answer that `the answer is` announces, else the end of the last line; None for an empty text."""
    if places := [match.end() for match in ANSWER_IS.finditer(text)]:
        return sentence(text[places[-1] :])
    if places := [match.start() for match in IS_ANSWER.finditer(text)]:
        before = text[: places[-1]].rpartition("\n")[2][-MOST_CHARACTERS:]
        return plain(SENTENCE.split(before)[-1])
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    last = SENTENCE.split(lines[-1].strip(" .*"))[-1][-MOST_CHARACTERS:]
    if formula := _formula(last):
        return formula
    places = [match.end() for match in ANNOUNCING.finditer(last)]
    if places and DENIED.search(last[max(places[-1] - 48, 0) : places[-1]]):
        return None
    last = last[places[-1] :] if places else last
    left, _, right = last.rpartition("=")
    return plain(
        right if WORD.search(left) else last
    )  # "3x = 12" is compared whole, "the total = 12" not


def sentence(text: str) -> str:
    """The answer at the beginning of `text`: up to the end of its line, of its sentence, or an aside."""
    line = text.lstrip(" \t\r\n*").partition("\n")[0][:MOST_CHARACTERS]
    line = REMARK.sub("", SENTENCE.split(line, maxsplit=1)[0])
    if formula := _formula(line):
        return formula
    line = plain(ASIDE.split(line, maxsplit=1)[0])
    number = NUMBER.match(line)
    rest = line[number.end() :] if number else ""
    if number and re.match(r"\s+[a-zA-Z]{3,}", rest) and not HEDGE.search(rest):
        return number[0]
    return line


def _formula(line: str) -> str | None:
    r"""The formula of a line that has one between dollar signs, or in `\(…\)`."""
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        parts = line.replace("$$", "$").replace("\\$", "\0").split(opening)
        if opening == closing and len(parts) == 3 and parts[1].strip():
            outside = parts[0] + parts[2]
        elif opening != closing and len(parts) == 2 and closing in parts[1]:
            inside, _, after = parts[1].partition(closing)
            parts, outside = ["", inside], parts[0] + after
        else:
            continue
        return None if HEDGE.search(outside) else parts[1].replace("\0", "\\$").strip()
    return None


def plain(text: str) -> str:
    """The answer without emphasis, full stop and words that begin a conclusion."""
    text = CONCLUDING.sub("", text)
    return text.strip().strip("*_` ").rstrip(".").strip()


def closing(text: str, start: int) -> int:
    """The index of the brace that closes the first one at or after `start`; -1 if none does."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
            if depth < 0:
                return -1
    return -1


def last_boxed(text: str, commands: tuple[str, ...] = ("\\boxed",)) -> str | None:
    r"""The content of the last `\boxed{…}` (the first of `commands` that occurs), or None."""
    for command in commands:
        start = text.rfind(command)
        if start >= 0:
            end = closing(text, start)
            opening = text.find("{", start)
            return text[opening + 1 : end] if end >= 0 else None
    return None


def blocks(text: str, opening: str, closing: str) -> Iterator[str]:
    """The texts between each `opening` and the next `closing`, from left to right.

    As `re.findall` of `opening(.*?)closing`, which looks to the end of the text again for each mark that nothing
    closes: a policy that only ever opens would take it the square of its length.
    """
    at = 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            return
        yield text[start:end]
        at = end + len(closing)
