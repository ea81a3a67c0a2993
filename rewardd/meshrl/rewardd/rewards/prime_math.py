r"""PRIME's scorer for NuminaMath: the last box, or what the response announces, compared as `math` does.

Under `conventions: verl` it is graded first by simple algebra, then by numbers and expressions. The first stage
follows the grader of PRM800K (Lightman et al. 2023, https://arxiv.org/abs/2305.20050): one spelling, then element by
element, fractions reduced, integers only against integers, the rest by sympy. The second is lenient as in ToRA (Gou
et al. 2023, https://arxiv.org/abs/2309.17452): 1e-4 relative, percentages count, π is π or 3.14.
"""

from __future__ import annotations

import ast
import functools
import importlib
import keyword
import math
import operator
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from meshrl.common import config
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards import _answers, _equality, math_reward
from meshrl.rewardd.rewards._answers import Conventions, closing, last_boxed, said, wanted

SAFE = re.compile(r"[0-9a-zA-Z+\-*/^().,\s!|]*")
ATTRIBUTE = re.compile(r"\.\s*[a-zA-Z_]|[a-zA-Z)]\s*\.")
CONSTRUCTORS = re.compile(r"(?i)(Integer|Float|Rational|Symbol|Function|Pow|Mul|Add|Tuple)")
"""Names that the parser itself writes; in an answer they would build what the operators may not."""
TALL = re.compile(
    r"\^\s*\(?[0-9]+\s*\^|\*\*.*\*\*|(\^|\*\*)\s*\(?\s*[0-9]{3,}|[0-9]{3,}\s*!|!\s*!"
    r"|[0-9.][eE][+-]?[0-9]{3,}"
)
MAX_CHARACTERS = 300
MOST_BITS = 1 << 14
"""Size of the largest number that an expression may come to."""
MOST_FACTORIAL = 1000
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def sympy() -> ModuleType:
    """The package sympy, imported on demand, because it takes a third of a second. Raises ConfigError."""
    try:
        return importlib.import_module("sympy")
    except ImportError as error:
        raise ConfigError(
            f"mathematics scorers need sympy: pip install 'meshrl[rewards]' ({error})"
        ) from error


def arithmetic(text: str) -> float | None:
    """The value of `+ - * /`, small powers and brackets over numbers; None for anything else."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(left) < 1e6 and abs(right) <= 16:
            power = left**right
            if isinstance(power, int | float):
                return power
        elif type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](left, right)
    raise ValueError("not plain arithmetic")


@functools.cache
def _names() -> dict[str, Any]:
    package = sympy()
    names = (
        "Integer Float Rational Symbol Function sqrt pi E I oo sin cos tan asin acos atan log ln exp "
        "Abs factorial Tuple Mul Pow Add"
    )
    found = {name: getattr(package, name) for name in names.split()}
    return found | {"inf": package.oo, "abs": package.Abs, "__builtins__": {}}


def parse(text: str) -> Any | None:
    """A sympy expression, or None if `text` is not plain mathematics."""
    if len(text) > MAX_CHARACTERS or not SAFE.fullmatch(text):
        return None
    if ATTRIBUTE.search(text) or TALL.search(text) or CONSTRUCTORS.search(text):
        return None
    if any(keyword.iskeyword(word) for word in re.findall(r"[a-zA-Z]+", text)):
        return None  # "it is 4" would be a comparison
    parser = importlib.import_module("sympy.parsing.sympy_parser")
    rules = (*parser.standard_transformations, parser.implicit_multiplication_application)
    written = text.replace("^", "**")
    try:
        with sympy().evaluate(False):
            tree = parser.parse_expr(written, transformations=rules, global_dict=dict(_names()))
        _bits(tree)
        return parser.parse_expr(written, transformations=rules, global_dict=dict(_names()))
    except Exception:
        # sympy raises half a dozen unrelated types for text that it cannot read; then it is not mathematics.
        return None


def _bits(tree: Any) -> int:
    """An upper bound of the size of what an unevaluated expression comes to. Raises ValueError if it is too large."""
    package, size = sympy(), 8
    if isinstance(tree, tuple | list) or not hasattr(tree, "args"):
        parts = list(tree) if isinstance(tree, tuple | list) else []
    else:
        parts = list(tree.args)
    if getattr(tree, "is_Rational", False):
        size = int(max(tree.p.bit_length(), tree.q.bit_length()))
    elif isinstance(tree, package.Pow):
        base, exponent = map(_bits, parts)
        size = base << exponent if exponent <= 14 else MOST_BITS + 1
    elif isinstance(tree, package.exp):
        size = 2 << min(_bits(parts[0]), 15)
    elif isinstance(tree, package.factorial):
        size = _bits(parts[0])
        if size > 64 or (parts[0].is_number and parts[0].doit() > MOST_FACTORIAL):
            raise ValueError("a tall factorial")
        size = 16 * int(parts[0].doit()) if parts[0].is_number else 64
    elif parts:
        size = sum(map(_bits, parts)) + len(parts)
    if size > MOST_BITS:
        raise ValueError("a tall expression")
    return size


def algebra_equal(left: str, right: str) -> bool:
    """True if the difference of two expressions simplifies to 0."""
    difference = parse(f"({left})-({right})")
    if difference is None:
        return False
    try:
        return bool(sympy().simplify(difference) == 0)
    except Exception:
        # As above: if sympy cannot simplify it, equality is not shown.
        return False


REQUIRES = ("sympy", "mpmath")
TOLERANCE = 1e-4
UNITS = tuple(
    word
    for words in (
        "degree cm centimeter meter mile second minute hour day week month",
        "year foot feet inch yard",
    )
    for word in words.split()
)
TEXT = re.compile(r"^\\text\{(.+?)\}$")
SYMBOLS = {
    "\\pi": "pi",
    "\\infty": "inf",
    "\\cdot": "*",
    "\\times": "*",
    "\\cup": "U",
    "\\le": "≤",
    "\\ge": "≥",
    "\\left": "",
    "\\right": "",
    "\\,": " ",
    "\\ ": " ",
}


ANNOUNCING = (
    "be ",
    "is ",
    "are ",
    "=",
    ": ",
    "get ",
    "be\n",
    "is\n",
    "are\n",
    ":\n",
    "get\n",
)
"""Words before an answer, in the order in which they are looked for."""


MOST_CHARACTERS = 1000
"""Most characters of an answer that is read as mathematics, beside four for each one of the truth: rewriting nested
fractions takes the square of a text's length."""


class Config(config.Config):
    """The conventions of its answers."""

    conventions: Conventions = "meshrl"
    """`verl`: verl's numbers, its mistakes included."""


prepare = _equality.prepare


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """1 if the answer that the response ends in equals the ground truth, else 0.

    Raises:
        UserError: the ground truth is no answer.
    """
    truth = wanted(ground_truth, "prime_math")
    if config.conventions == "meshrl":
        answer = _answers.boxed_or_announced(said(solution_str))
        return float(_equality.is_right(answer, truth))
    answer = stated(solution_str)
    if simple_equal(answer, truth):
        return 1.0
    if is_too_long(answer, truth):
        return 0.0
    values = (math.pi, 3.14) if "\\pi" in answer or "\\pi" in truth else (math.pi,)
    return float(any(lenient_equal(answer, truth, pi) for pi in values))


def stated(response: str) -> str:
    """The answer: the last box, or the text after the last words that announce an answer, or the whole response."""
    for words in ("answer:", "answer is", "answers are"):
        response = _split(response, words)[1]
    for words in ("is answer", "is the answer", "are answers", "are the answers"):
        response = _split(response, words)[0]
    response = last_boxed(response, ("\\boxed", "\\fbox")) or response
    response = _split(response, ". ")[0].strip()
    for words in ANNOUNCING:
        response = _split(response, words)[1]
    return response.strip()


def _split(text: str, words: str) -> tuple[str, str]:
    """The text before and after the last occurrence of `words` (ignoring case); twice the whole text without one."""
    at = text.lower().rfind(words)
    return (text[:at].strip(), text[at + len(words) :].strip()) if at >= 0 else (text, text)


def is_too_long(answer: str, truth: str) -> bool:
    """Whether an answer says far more than the truth does: it is right only if it is spelt as the truth."""
    return len(answer) > MOST_CHARACTERS + 4 * len(truth)


def simple_equal(answer: str, truth: str) -> bool:
    """Equal by spelling, or element by element by simple algebra."""
    if _spelling(answer) == _spelling(truth):
        return True
    if is_too_long(answer, truth):
        return False
    given, wanted = normal(answer), normal(truth)
    if given == wanted:
        return True
    if not given:
        return False
    given_parts, wanted_parts = elements(given), elements(wanted)
    if len(given_parts) != len(wanted_parts):
        return False
    if len(wanted_parts) > 1 and (given[0], given[-1]) != (wanted[0], wanted[-1]):
        return False
    return all(map(_element_equal, given_parts, wanted_parts))


def _spelling(text: str) -> str:
    match = TEXT.match(text.strip())
    text = match[1].strip() if match else text.strip()
    try:
        return math_reward.normal(text)
    except math_reward.NoSpellingError:
        return text


def _element_equal(given: str, wanted: str) -> bool:
    fraction = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
    if fraction.fullmatch(given) and fraction.fullmatch(wanted):
        return given == wanted  # a fraction must be reduced
    if _is_integer(given) != _is_integer(wanted):
        return False
    letters = set(re.sub("sqrt|frac", "", given + wanted)) & set("abcdefghijklmnopqrstuvwxyz")
    if len(letters) > 2:
        return False  # words, not mathematics
    return algebra_equal(wanted, given)


def _is_integer(text: str) -> bool:
    try:
        number = float(_ungrouped(text))
    except ValueError:
        return False
    return math.isfinite(number) and abs(number - round(number)) <= 1e-7


def _ungrouped(text: str) -> str:
    """Numbers without thousands separators."""
    grouped = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
    while (shorter := grouped.sub(r"\1\3\4", text)) != text:
        text = shorter
    return text


def elements(text: str) -> list[str]:
    """The parts of a tuple or an interval; a number with thousands separators is one part."""
    text = _ungrouped(text)
    if not text:
        return []
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(inner) & set("()[]"):
        return [part.strip() for part in inner.split(",")]
    return [text]


def normal(text: str) -> str:
    """Plain text in lower case: no units, no markup, no spaces."""
    if match := TEXT.match(text):
        text = match[1]
    for old, new in (("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", "")):
        text = text.replace(old, new)
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for unit in UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if len(text) > 1 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if _is_integer(text) and "," not in text:
        return str(round(float(text)))
    text = plain(text) if "\\" in text else text
    text = re.sub("- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is 7 + 3/4
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(round(float(_ungrouped(text)))) if _is_integer(text) else text


def plain(text: str) -> str:
    r"""LaTeX as plain text: `\frac{a}{b}` is a/b, `\sqrt{a}` is sqrt(a)."""
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\frac", " \\frac")
    while (start := text.find("\\frac")) >= 0:
        over, end = _argument(text, start + len("\\frac"))
        under, end = _argument(text, end)
        text = f"{text[:start]}{over}/{under}{text[end:]}"
    while (start := text.find("\\sqrt")) >= 0:
        inner, end = _argument(text, start + len("\\sqrt"))
        text = f"{text[:start]}sqrt({inner}){text[end:]}"
    for name, symbol in SYMBOLS.items():
        text = text.replace(name, symbol)
    text = re.sub(r"\\(text|mathrm|mathbf|textbf|mbox)\b", "", text)
    return re.sub(r"\\[a-zA-Z]+", "", text).strip()


def _argument(text: str, start: int) -> tuple[str, int]:
    """The argument of a command at `start` (a group, or one character) and where it ends."""
    while start < len(text) and text[start] == " ":
        start += 1
    if text[start : start + 1] == "{" and (end := closing(text, start)) >= 0:
        return text[start + 1 : end], end + 1
    return text[start : start + 1], min(start + 1, len(text))


def lenient_equal(answer: str, truth: str, pi: float) -> bool:
    """Equal as numbers up to 1e-4 (also as percentage), as tuples, equations, or expressions."""
    given, wanted = _numeric(answer, pi), _numeric(truth, pi)
    if given.strip().lower() == wanted.strip().lower():
        return True
    left, right = _number(given), _number(wanted)
    if left is not None and right is not None:
        return any(
            math.isclose(left, value, rel_tol=TOLERANCE)
            for value in (right / 100, right, right * 100)
        )
    if not given:
        return False
    return _structure_equal(given.strip(), wanted.strip(), pi)


def _structure_equal(given: str, wanted: str, pi: float) -> bool:
    same_kind = (given[:1], given[-1:]) == (wanted[:1], wanted[-1:])
    if not same_kind and _bare_equal(given, wanted):
        return True
    if same_kind and given[:1] in {"(", "["} and given[-1:] in {")", "]"} and "," in wanted:
        left, right = given[1:-1].split(","), wanted[1:-1].split(",")
        return len(left) == len(right) and all(
            lenient_equal(a.strip(), b.strip(), pi) for a, b in zip(left, right, strict=True)
        )
    if given.count("=") == 1 and wanted.count("=") == 1:
        sides = [_sides(text) for text in (given, wanted)]
        return any(algebra_equal(sides[0], other) for other in (sides[1], f"-({sides[1]})"))
    for one, other in ((given, wanted), (wanted, given)):
        name, mark, value = one.partition("=")
        if mark and "=" not in value and len(name.strip()) <= 2 and "=" not in other:
            return lenient_equal(value.strip(), other, pi)
    return _expression_equal(given, wanted)


def _bare_equal(given: str, wanted: str) -> bool:
    """Equal without brackets, if only one side has any: `[1, 2)` and `(1, 2)` are different intervals."""
    ends, other = (given[:1], given[-1:]), {"[": "(", "(": "["}
    if ends in {("[", "]"), ("(", ")")} and wanted[:1] != other[given[:1]]:
        given, wanted = given.strip("[]()"), wanted.strip("[]()")
    bare = re.compile(r"[{}()]")
    return bare.sub("", given) == bare.sub("", wanted)


def _sides(equation: str) -> str:
    left, _, right = equation.partition("=")
    return f"({_readable(left)})-({_readable(right)})"


def _readable(text: str) -> str:
    r"""LaTeX or plain text for the parser, with brackets around fractions to keep their precedence."""
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("$", "")
    while (start := text.find("\\frac")) >= 0:
        over, end = _argument(text, start + len("\\frac"))
        under, end = _argument(text, end)
        text = f"{text[:start]}(({over})/({under})){text[end:]}"
    return plain(text).replace("{", "(").replace("}", ")")


def _expression_equal(given: str, wanted: str) -> bool:
    left, right = (parse(_readable(text)) for text in (given, wanted))
    if left is None or right is None:
        return False
    try:
        if sympy().simplify(left - right) == 0:
            return True
        return math.isclose(float(left), float(right), rel_tol=TOLERANCE)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return False  # free symbols, tuples: not two numbers


def _number(text: str) -> float | None:
    """A number with thousands separators or one percent sign."""
    text, share = text.replace(",", "").strip(), 1.0
    if text.endswith("%"):
        text, share = text.removesuffix("%").removesuffix("\\"), 0.01
    try:
        number = float(text) * share
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _numeric(text: str, pi: float) -> str:
    """The number without currency or percent sign, with π as its value, evaluated if it is plain arithmetic."""
    if re.match(r"\$\d+(\.\d+)?", text):
        return text[1:]
    if re.fullmatch(r"\d+(\.\d+)?\\?%", text):
        return text.replace("\\", "").replace("%", "")
    if "\\pi" not in text:
        return text
    written = re.sub(r"(?<=\d)\s*\\pi", f"*{pi}", text)
    written = re.sub(r"\\pi", f"1*{pi}", written)
    value = arithmetic(_readable(written))
    return written if value is None else str(value)
