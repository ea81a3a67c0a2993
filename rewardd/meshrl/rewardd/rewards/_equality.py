r"""Whether two answers in mathematics are the same answer.

Rational numbers are compared exactly, other numbers at 60 and at 120 digits, expressions with symbols at random
points: no rewriting, so nothing explodes. A power or a factorial too tall to be computed is a symbol of its own,
equal to one that is spelt the same. `1,234` is a number or a list; a bare list has no order; (…), […] and {…} differ;
a percent sign, a unit or a name before `=` may be missing on one side, and must agree where both have one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from meshrl.contract.errors import ConfigError
from meshrl.rewardd.rewards import _answers
from meshrl.rewardd.rewards._formula import Node, Reader, negative
from meshrl.rewardd.rewards._formula_tokens import UnreadableError, unwrapped

REQUIRES = ("mpmath",)
MOST_CHARACTERS = 1000
"""Longest answer that is read as mathematics, beside four characters for each one of the truth."""
MOST_ITEMS = 64
"""Longest list without order."""
MOST_BITS = 10_000
"""Size of the largest number that is kept exactly."""
MOST_DOUBLINGS = 1 << 20
"""Binary logarithm of the largest power."""
MOST_FACTORIAL = 1000
TRIALS = 10
LEAST_TRIALS = 3
DIGITS = (60, 120)
TRUSTED_DECIMALS = 6
"""Significant digits from which a decimal truth is the rounded value of an endless answer."""
LABEL = re.compile(
    r"(?:(?:[oO]ption|[cC]hoice)\s+)?\(?\s*([A-H])\s*(?:\)|[.:](?!\d))(?!\s*(?:[,;&]|and\b|or\b))\s*(.*)",
    re.DOTALL,
)
LETTER = re.compile(r"(?:(?:[oO]ption|[cC]hoice)\s+)?\(?\s*([A-Z])\s*\)?\s*[.:]?")
WORDS = re.compile(r"[a-z][a-z' -]+")
UNREADABLY_TALL = re.compile(
    r"(?:\^|\*\*)[\s{(]*-?[0-9]{4,}|[0-9]{4,}[\s)}]*!|![\s)}]*!|(?:\^[^^]{1,12}){2}\^|[0-9][eE][+-]?[0-9]{3,}"
)
CONSTANTS = {"e", "i", "pi"}
MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


STRUCTURES = frozenset({"sequence", "set", "cup", "cap", "setminus", "ratio", "matrix"})
"""Kinds of nodes that are compared part by part."""


class UndefinedError(Exception):
    """A value that does not exist, such as 1/0."""


class TooTallError(Exception):
    """A value that would take too long to compute."""


@functools.cache
def _context(digits: int) -> Any:
    """A context of mpmath. Raises ConfigError when the package is not installed."""
    try:
        context = importlib.import_module("mpmath").MPContext()
    except ImportError as error:
        raise ConfigError(
            f"mathematics scorers need mpmath: pip install 'meshrl[rewards]' ({error})"
        ) from error
    context.dps = digits
    return context


def prepare() -> None:
    """Import the package before the first sample. Raises ConfigError when it is not installed."""
    _context(DIGITS[0])


def equal(answer: str, truth: str) -> bool:
    """Whether `answer` says what `truth` says."""
    if spelling(answer) == spelling(truth):
        return True
    if len(answer) > MOST_CHARACTERS + 4 * len(truth):
        return False
    given, wanted = unwrapped(answer), unwrapped(truth)
    given, wanted = _without_label(given, wanted)
    words = [_words(text) for text in (given, wanted)]
    if all(words) or any(len(word) > 3 for word in words):
        return words[0] == words[1]
    wanted_readings = list(_readings(wanted))
    return any(_same_answer(one, other) for one in _readings(given) for other in wanted_readings)


def is_right(answer: str | None, truth: str) -> bool:
    """Whether there is an answer, and it says what the ground truth says, which may be in a box."""
    return answer is not None and equal(answer, _answers.boxed(truth) or truth)


def is_tall(text: str) -> bool:
    """Whether a formula has a power or a factorial too large to be computed."""
    found: list[str] = []

    def symbol(name: str) -> Fraction:
        found.extend(name for _ in range(name.startswith("(")))
        return Fraction(3, 2)

    readings = list(_readings(unwrapped(text)))
    if not readings:
        return UNREADABLY_TALL.search(text) is not None
    for items in readings:
        for item in items:
            with contextlib.suppress(UndefinedError, ArithmeticError, ValueError, TypeError):
                _value(item, _context(DIGITS[0]), symbol)
    return bool(found)


def spelling(text: str) -> str:
    """An answer without `$`, sizes of brackets, spaces around signs and a full stop at its end."""
    text = unwrapped(text).replace('"', "").strip()
    text = re.sub(r"\\(?:left|right|displaystyle|[,;:! ])(?![a-zA-Z])", "", text)
    text = re.sub(r"\s+", " ", re.sub(r"\\[dt]frac", r"\\frac", text))
    text = re.sub(r" ?([^\w\s]) ?", r"\1", text).strip().rstrip(".")
    return text.casefold() if WORDS.fullmatch(text.casefold()) else text


def _words(text: str) -> str:
    """The text if it is words, in lower case; else empty."""
    plain = " ".join(text.replace('"', "").strip(" .").casefold().split())
    if not WORDS.fullmatch(plain) or plain in {"pi", "oo", "inf", "infinity"}:
        return ""
    if all(len(word) == 1 or word in {"and", "or"} for word in plain.split()):
        return ""  # A and C
    is_word = '"' in text or len(plain) > 3 or set(plain) & set("aeiou")
    return plain if is_word else ""


def _without_label(given: str, wanted: str) -> tuple[str, str]:
    """Both without the letter of a choice, or the letters alone where the truth is one."""
    plain_given, plain_wanted = (text.replace('"', " ").strip() for text in (given, wanted))
    label, letter = LABEL.fullmatch(plain_given), LETTER.fullmatch(plain_wanted)
    if letter:
        found = LETTER.fullmatch(plain_given) or label
        return (found[1] if found else given), letter[1]
    other = LABEL.fullmatch(plain_wanted)
    if label and other:
        return (given, wanted) if label[1] != other[1] else (label[2], other[2])
    if label and label[2]:
        return label[2], wanted
    return given, other[2] if other and other[2] else wanted


def _readings(text: str) -> Iterator[list[Node]]:
    """The text as a list of items, with `1,234` as one number and as two; none if it is no formula."""
    signs = [("+", "-"), ("-", "+")] if re.search(r"\\[pm]{2}(?![a-zA-Z])", text) else [("", "")]
    for grouped in (True, False):
        items: list[Node] = []
        try:
            for plus, minus in signs:
                one = re.sub(r"\\pm(?![a-zA-Z])", plus, text) if plus else text
                one = re.sub(r"\\mp(?![a-zA-Z])", minus, one) if plus else one
                items += Reader(one, grouped=grouped).answer()
        except (UnreadableError, ValueError, OverflowError):
            continue
        if plus:
            items = _different(items)
        if items:
            yield items
        if "," not in text:
            return


def _different(items: Sequence[Node]) -> list[Node]:
    found: list[Node] = []
    for item in items[: 4 * MOST_ITEMS]:
        if not any(_same_item(item, other) for other in found):
            found.append(item)
    return found


def _same_answer(given: list[Node], wanted: list[Node]) -> bool:
    if len(given) == len(wanted) == 1 and _same_item(given[0], wanted[0]):
        return True
    given, wanted = _as_intervals(given), _as_intervals(wanted)
    if len(given) == len(wanted) == 1:
        return _same_item(given[0], wanted[0])
    if len(wanted) == 1 or len(given) == 1:
        bare, (whole,) = (given, wanted) if len(wanted) == 1 else (wanted, given)
        if whole[0] == "relation" and whole[1] in {("=",), ("in",)}:
            whole = whole[-1]
        if whole[0] == "set":
            return _same_unordered(_values(bare), list(whole[1:]))
        is_tuple: bool = whole[0] == "sequence" and whole[1:3] == ("(", ")")
        return is_tuple and _same_ordered(_values(bare), list(whole[3:]))
    names = [[_name(item) for item in items] for items in (given, wanted)]
    if all(len(set(each)) == len(each) and None not in each for each in names):
        return _same_unordered(given, wanted)
    for each, items in zip(names, (given, wanted), strict=True):
        if None not in each and len(set(each)) == len(each):  # x = 1, y = 2 against 1, 2
            return _same_ordered(_values(given), _values(wanted)) and items is not None
    return _same_unordered(_values(given), _values(wanted))


def _name(item: Node) -> str | None:
    """The name before the only `=` of `x = 5`."""
    if item[0] == "relation" and item[1] == ("=",):
        left = item[2]
        if left[0] in {"symbol", "text"}:
            return str(left[1])
        if left[0] == "sequence" and all(each[0] == "symbol" for each in left[3:]):
            return repr(left)
    return None


def _values(items: Sequence[Node]) -> list[Node]:
    return [item[3] if _name(item) is not None else item for item in items]


def _same_ordered(given: Sequence[Node], wanted: Sequence[Node]) -> bool:
    return len(given) == len(wanted) and all(map(_same_item, given, wanted))


def _same_unordered(given: Sequence[Node], wanted: Sequence[Node]) -> bool:
    if len(given) != len(wanted):
        return False
    if len(wanted) > MOST_ITEMS:
        return _same_ordered(given, wanted)
    left = list(given)
    for item in wanted:
        at = next((n for n, other in enumerate(left) if _same_item(other, item)), None)
        if at is None:
            return False
        del left[at]
    return True


def _same_item(given: Node, wanted: Node) -> bool:
    if given == wanted:
        return True
    given, wanted = _meeting(given, wanted), _meeting(wanted, given)
    kinds = {given[0], wanted[0]}
    if kinds == {"relation"}:
        return _same_relation(given, wanted)
    if len(kinds) == 1 and given[0] in STRUCTURES:
        return _same_structure(given, wanted)
    if not all(map(_is_scalar, (given, wanted))):
        return given == wanted
    return _same_scalar(given, wanted)


def _meeting(node: Node, other: Node) -> Node:
    """The value of `x = 5` or `x ∈ S` where the other side has no relation; beside an interval, R as one."""
    node = _without_rounded(node, other)
    value: Node = node[-1]
    if node[0] == "about" or (node[0] == "relation" and node[1:3] == (("~",), node[2])):
        return value if other[0] == "number" and other[2] else node
    if node == ("symbol", "R") and other[0] == "sequence":
        return ("sequence", "(", ")", MINUS_INFINITY, ("infinity",))
    if node[0] != "relation" or other[0] == "relation":
        return node
    if _name(node) is not None or (node[1] == ("in",) and node[2][0] == "symbol"):
        return _meeting(value, other)
    if set(node[1]) == {"="}:  # x = 2 + 3 = 5, or 6·7 = 42
        parts = node[3:] if node[2][0] == "symbol" else node[2:]
        if all(_is_scalar(part) and _same_scalar(part, value) for part in parts):
            return value
        if len(parts) == 2 and _is_of_symbols(parts[0]) and not _symbols(value):
            return value  # m + n = 34
    return node


def _without_rounded(node: Node, other: Node) -> Node:
    """`1/3` of `1/3 ≈ 0.333`, unless the other side is a decimal number: the rounded value of an exact one."""
    if node[0] != "relation" or node[1][-1] != "~" or (other[0] == "number" and other[2]):
        return node
    exact, (rounded, _) = _real(node[-2]), _unit(node[-1])
    if exact is None or rounded[0] != "number":
        return node
    if abs(exact - rounded[1]) >= Fraction(1, 10 ** rounded[2]):
        return node
    left: Node = node[-2]
    return left if len(node[1]) == 1 else ("relation", node[1][:-1], *node[2:-1])


def _is_of_symbols(node: Node) -> bool:
    """Whether it is a sum or product of symbols alone."""
    if node[0] in {"sum", "product"}:
        return all(map(_is_of_symbols, node[1:]))
    return bool(node[0] == "symbol")


def _same_structure(given: Node, wanted: Node) -> bool:
    kind = given[0]
    if kind == "set":
        return _same_unordered(_different(given[1:]), _different(wanted[1:]))
    if kind in {"cup", "cap"}:
        return _same_unordered(given[1:], wanted[1:])
    if kind == "sequence":
        return given[1:3] == wanted[1:3] and _same_ordered(given[3:], wanted[3:])
    if kind == "matrix":
        rows = zip(given[1:], wanted[1:], strict=False)
        return len(given) == len(wanted) and all(_same_ordered(a, b) for a, b in rows)
    return _same_ordered(given[1:], wanted[1:])


def _same_relation(given: Node, wanted: Node) -> bool:
    names = _name(given), _name(wanted)
    if None not in names and names[0] == names[1] and _same_item(given[3], wanted[3]):
        return True
    if len(given[1]) != 1 or len(wanted[1]) != 1:
        return given[1] == wanted[1] and _same_ordered(given[2:], wanted[2:])
    (one,), (other,) = given[1], wanted[1]
    if one not in MIRRORED or other not in {one, MIRRORED[one]}:
        return one == other and _same_ordered(given[2:], wanted[2:])
    sides = (*given[2:], *wanted[2:])
    if not all(map(_is_scalar, sides)):
        return one == other and _same_ordered(given[2:], wanted[2:])
    ratio = _constant_ratio(_difference(given), _difference(wanted))
    if ratio is None or one in {"=", "!="}:
        return ratio is not None
    return bool((ratio > 0) == (one == other))


def _difference(relation: Node) -> Node:
    return ("sum", relation[2], negative(relation[3]))


def _as_intervals(items: list[Node]) -> list[Node]:
    """Inequalities of one symbol and numbers as intervals: 1 < x ≤ 2 is (1, 2]."""
    found = [_interval(item) for item in items]
    if not found or any(each is None for each in found):
        return items
    names = {each[0] for each in found if each}
    if len(names) != 1:
        return items
    parts = [each[1] for each in found if each]
    if len(parts) == 2 and len({part[3] == MINUS_INFINITY for part in parts}) == 2:
        below, above = sorted(parts, key=lambda part: part[3] != MINUS_INFINITY)
        if above[4] == ("infinity",):
            low, high = (_real(node) for node in (above[3], below[4]))
            if low is not None and high is not None and low < high:  # x > 1 and x < 2
                return [("sequence", above[1], below[2], above[3], below[4])]
    return [parts[0] if len(parts) == 1 else ("cup", *parts)]


MINUS_INFINITY = negative(("infinity",))


def _interval(item: Node) -> tuple[str, Node] | None:
    if item[0] != "relation" or not set(item[1]) <= {"<", ">", "<=", ">="}:
        return None
    operators, parts = item[1], item[2:]
    if len(parts) == 2:
        if parts[1][0] == "symbol" and parts[0][0] != "symbol":
            operators, parts = (MIRRORED[operators[0]],), (parts[1], parts[0])
        if parts[0][0] != "symbol" or _symbols(parts[1]) or not _is_scalar(parts[1]):
            return None
        closed = operators[0] in {"<=", ">="}
        if operators[0][0] == "<":
            return parts[0][1], ("sequence", "(", "]" if closed else ")", MINUS_INFINITY, parts[1])
        return parts[0][1], ("sequence", "[" if closed else "(", ")", parts[1], ("infinity",))
    if len(parts) == 3 and parts[1][0] == "symbol" and operators[0][0] == operators[1][0]:
        if operators[0][0] == ">":
            operators, parts = operators[::-1], parts[::-1]
        if _symbols(parts[0]) or _symbols(parts[2]):
            return None
        opening = "[" if "=" in operators[0] else "("
        closing = "]" if "=" in operators[1] else ")"
        return parts[1][1], ("sequence", opening, closing, parts[0], parts[2])
    return None


def _is_scalar(node: Node) -> bool:
    return node[0] not in STRUCTURES | {"relation", "based", "text", "about"}


def _same_scalar(given: Node, wanted: Node) -> bool:
    (given, given_unit), (wanted, wanted_unit) = _unit(given), _unit(wanted)
    if given_unit and wanted_unit and given_unit != wanted_unit:
        return False
    if (given[0] == "percent") != (wanted[0] == "percent"):
        share, other = (given, wanted) if given[0] == "percent" else (wanted, given)
        if _same_value(share, other):
            return True
        value = _real(other)  # 10 for 10%, but not 0.25 for 0.25%
        return _same_value(share[1], other) and (value is None or abs(value) >= 1)
    return _same_value(given, wanted) or _rounds_to(given, wanted)


def _unit(node: Node) -> tuple[Node, str]:
    return (node[1], node[2]) if node[0] == "unit" else (node, "")


def _rounds_to(given: Node, wanted: Node) -> bool:
    """Whether the truth is a long decimal number, and the answer is exact and rounds to it."""
    if wanted[0] != "number" or not wanted[2] or given[0] == "number":
        return False
    value, decimals = wanted[1], wanted[2]
    digits = str(abs(value.numerator * 10**decimals // value.denominator)).lstrip("0")
    if len(digits) < TRUSTED_DECIMALS or _symbols(given) - CONSTANTS:
        return False
    found = _real(given)
    return found is not None and abs(found - value) <= Fraction(1, 2 * 10**decimals)


def _real(node: Node) -> Fraction | None:
    """The value of a number, to 60 digits."""
    context = _context(DIGITS[0])
    try:
        value = _value(node, context, _no_symbol)
    except (UndefinedError, ArithmeticError, ValueError):
        return None
    if isinstance(value, Fraction):
        return value
    if not isinstance(value, context.mpf) or not context.isfinite(value):
        return None
    return Fraction(int(context.nint(value * 10**40)), 10**40) if abs(value) < 1e40 else None


def _no_symbol(name: str) -> Any:
    raise UndefinedError(name)


def _same_value(given: Node, wanted: Node) -> bool:
    """Equal at every point where both are defined, and at enough of them."""
    if given == wanted:
        return True
    symbols = _symbols(given) | _symbols(wanted)
    real = "i" not in symbols
    symbols -= CONSTANTS
    agreed = 0
    for trial in range(TRIALS if symbols else 1):
        values = [_at(node, trial, DIGITS[0]) for node in (given, wanted)]
        if None in values:
            continue
        if symbols and real and any(map(_is_complex, values)):
            continue  # a root of a negative number: both are defined elsewhere
        if not _agree(values, given, wanted, trial):
            return False
        agreed += 1
    return agreed >= (LEAST_TRIALS if symbols else 1)


def _is_complex(value: Any) -> bool:
    return not isinstance(value, Fraction) and abs(_context(DIGITS[0]).im(value)) > 1e-40 * abs(
        value
    )


def _agree(values: list[Any], given: Node, wanted: Node, trial: int) -> bool:
    """Whether two values are equal: exactly, or by a difference that shrinks with more computed digits."""
    one, other = values
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = (_inexact(value, _context(DIGITS[0])) for value in values)
    gap, size = abs(one - other), max(abs(one), abs(other))
    if gap == 0:
        return True
    if size > 1e-25 and gap > size * 1e-15:
        return False
    again = [_at(node, trial, DIGITS[1]) for node in (given, wanted)]
    if None in again:
        return False
    finer = [_inexact(value, _context(DIGITS[1])) for value in again]
    return bool(abs(finer[0] - finer[1]) <= gap * 1e-30)


def _constant_ratio(one: Node, other: Node) -> float | None:
    """`one / other` if that is the same number at every point; None else."""
    if not (_symbols(one) | _symbols(other)) - CONSTANTS:
        return None
    first: Any = None
    ratio, agreed = None, 0
    for trial in range(TRIALS):
        values = [_at(node, trial, DIGITS[0]) for node in (one, other)]
        if None in values or 0 in values or any(map(_is_complex, values)):
            continue
        if isinstance(values[0], Fraction) and isinstance(values[1], Fraction):
            found: Any = values[0] / values[1]
        else:
            a, b = (_inexact(value, _context(DIGITS[0])) for value in values)
            found = a / b
        if first is None:
            first, ratio = (
                found,
                float(_context(DIGITS[0]).re(_inexact(found, _context(DIGITS[0])))),
            )
        elif isinstance(found, Fraction) and isinstance(first, Fraction):
            if found != first:
                return None
        else:
            a, b = (_inexact(value, _context(DIGITS[0])) for value in (found, first))
            if abs(a - b) > 1e-30 * abs(b):
                return None
        agreed += 1
    return ratio if agreed >= LEAST_TRIALS else None


def _symbols(node: Node) -> set[str]:
    if node[0] == "symbol":
        return {node[1]}
    found: set[str] = set()
    for part in node[1:]:
        if isinstance(part, tuple):
            found |= _symbols(part)
    return found


def _at(node: Node, trial: int, digits: int) -> Any:
    """The value at one point; None where there is none. Of odd trials the symbols are positive."""

    def symbol(name: str) -> Fraction:
        draw = random.Random(f"{name} {trial}")
        value = Fraction(draw.randint(200, 3000), 997)
        return -value if trial % 2 == 0 and draw.random() < 0.7 else value

    context = _context(digits)
    try:
        value = _value(node, context, symbol)
    except (UndefinedError, ArithmeticError, ValueError, TypeError):
        return None
    if isinstance(value, Fraction):
        return value
    return value if context.isfinite(value) else None


def _inexact(value: Any, context: Any) -> Any:
    if isinstance(value, Fraction):
        return context.mpf(value.numerator) / value.denominator
    return context.convert(value)


def _value(node: Node, context: Any, symbol: Callable[[str], Any]) -> Any:
    """A Fraction, or a number of `context`. Raises UndefinedError."""
    try:
        value = _computed(node, context, symbol)
    except TooTallError:
        return symbol(repr(node))
    if (
        isinstance(value, Fraction)
        and value.numerator.bit_length() + value.denominator.bit_length() > 2 * MOST_BITS
    ):
        return _inexact(value, context)
    return value


def _computed(node: Node, context: Any, symbol: Callable[[str], Any]) -> Any:
    kind = node[0]
    if kind == "number":
        return node[1]
    if kind == "symbol":
        if node[1] in CONSTANTS:
            return {"e": context.e, "pi": context.pi, "i": context.j}[node[1]] * 1
        return symbol(node[1])
    if kind in {"infinity", "text", "based"} or not _is_scalar(node):
        raise UndefinedError(kind)
    parts = [_value(part, context, symbol) for part in node[1:] if isinstance(part, tuple)]
    if kind in {"sum", "product"}:
        add = operator.add if kind == "sum" else operator.mul
        value = parts[0]
        for part in parts[1:]:
            value = _both(add, value, part, context)
        return value
    if kind == "unit":
        return parts[0]
    if kind == "percent":
        return _both(operator.mul, parts[0], Fraction(1, 100), context)
    if kind == "inverse":
        if parts[0] == 0:
            raise UndefinedError("1/0")
        return 1 / parts[0]
    if kind == "power":
        return _power(parts[0], parts[1], context)
    if kind == "root":
        if parts[0] == 0:
            raise UndefinedError("the root of degree 0")
        return _power(parts[1], 1 / parts[0], context)
    if kind == "abs":
        return abs(parts[0])
    if kind in {"floor", "ceil"}:
        if isinstance(parts[0], Fraction):
            return Fraction(math.floor(parts[0]) if kind == "floor" else math.ceil(parts[0]))
        raise UndefinedError(kind)
    if kind == "factorial":
        (count,) = _counts(parts)
        return Fraction(math.factorial(count))
    if kind == "binomial":
        many, few = _counts(parts)
        return Fraction(math.comb(many, few))
    if kind == "log":
        return _logarithm(parts[1], context) / _logarithm(parts[0], context)
    return _applied(node[1], parts[0], context)


def _both(apply: Callable[[Any, Any], Any], one: Any, other: Any, context: Any) -> Any:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return apply(one, other)  # of bounded operands; `_value` bounds what comes of them
    return apply(_inexact(one, context), _inexact(other, context))


def _counts(parts: list[Any]) -> list[int]:
    """Whole numbers that are not too large for a factorial. Raises TooTallError, UndefinedError."""
    if not all(isinstance(part, Fraction) and part.denominator == 1 for part in parts):
        raise TooTallError("no whole number")
    if any(part < 0 for part in parts):
        raise UndefinedError("a negative factorial")
    if any(part > MOST_FACTORIAL for part in parts):
        raise TooTallError("a factorial")
    return [int(part) for part in parts]


def _power(base: Any, exponent: Any, context: Any) -> Any:
    if base == 0:
        if isinstance(exponent, Fraction) and exponent > 0:
            return Fraction(0)
        if exponent == 0:
            return Fraction(1)
        raise UndefinedError("a power of 0")
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return _whole_power(base, int(exponent), context)
        if isinstance(base, Fraction) and exponent == Fraction(1, 2) and base > 0:
            roots = math.isqrt(base.numerator), math.isqrt(base.denominator)
            if Fraction(roots[0] ** 2, roots[1] ** 2) == base:
                return Fraction(*roots)
        is_real = isinstance(base, Fraction) or not _is_complex(base)
        if exponent.denominator % 2 and is_real and _inexact(base, context).real < 0:
            size = _exponential(exponent, _inexact(-base, context).real, context)
            return -size if exponent.numerator % 2 else size
    return _exponential(exponent, _inexact(base, context), context)


def _whole_power(base: Any, exponent: int, context: Any) -> Any:
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) <= MOST_BITS:
            return base**exponent
        if abs(base) == 1:
            return base if exponent % 2 else Fraction(1)
    if abs(exponent) * abs(context.log(abs(_inexact(base, context)), 2)) > MOST_DOUBLINGS:
        raise TooTallError("a power")
    if abs(exponent) > MOST_DOUBLINGS:
        raise TooTallError("a power")
    return context.power(_inexact(base, context), exponent)


def _exponential(exponent: Any, base: Any, context: Any) -> Any:
    """`base ** exponent` by logarithms."""
    grown = _inexact(exponent, context) * context.log(base)
    if abs(grown) > MOST_DOUBLINGS:
        raise TooTallError("a power")
    return context.exp(grown)


def _logarithm(value: Any, context: Any) -> Any:
    if value == 0:
        raise UndefinedError("a logarithm of 0")
    return context.log(_inexact(value, context))


def _applied(name: str, value: Any, context: Any) -> Any:
    value = _inexact(value, context)
    if name in {"ln", "log", "lg"}:
        found = _logarithm(value, context)
        return found if name == "ln" else found / context.log(10)
    if abs(value) > MOST_DOUBLINGS:
        raise TooTallError(name)
    return getattr(context, name)(value)
