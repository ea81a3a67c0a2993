r"""Splits an answer in mathematics, LaTeX or plain, into tokens: numbers, symbols, functions, texts, operators."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Any

MOST_DIGITS = 400
"""Digits of one number."""

FUNCTIONS = [
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "arcsin",
    "arccos",
    "arctan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "log",
    "ln",
    "lg",
    "exp",
    "sqrt",
    "abs",
]
GREEK = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "varepsilon",
    "zeta",
    "eta",
    "theta",
    "vartheta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "rho",
    "sigma",
    "tau",
    "upsilon",
    "phi",
    "varphi",
    "chi",
    "psi",
    "omega",
    "Gamma",
    "Delta",
    "Theta",
    "Lambda",
    "Xi",
    "Sigma",
    "Upsilon",
    "Phi",
    "Psi",
    "Omega",
    "ell",
    "hbar",
    "aleph",
]
DROPPED = [
    "left",
    "right",
    "big",
    "Big",
    "bigg",
    "Bigg",
    "bigl",
    "bigr",
    "Bigl",
    "Bigr",
    "biggl",
    "biggr",
    "Biggl",
    "Biggr",
    "displaystyle",
    "textstyle",
    "limits",
    "quad",
    "qquad",
    "space",
    ",",
    "!",
    ";",
    ":",
    "thinspace",
    "hfill",
]
COMMANDS: dict[str, tuple[str, str]] = {
    **{name: ("function", name) for name in FUNCTIONS if name != "sqrt"},
    **{name: ("symbol", name) for name in GREEK},
    **dict.fromkeys(("frac", "dfrac", "tfrac", "cfrac"), ("operator", "frac")),
    **dict.fromkeys(("binom", "dbinom", "tbinom"), ("operator", "binom")),
    **dict.fromkeys(("cdot", "times", "ast", "bullet"), ("operator", "*")),
    **dict.fromkeys(("div", "slash"), ("operator", "/")),
    **dict.fromkeys(("le", "leq", "leqslant"), ("operator", "<=")),
    **dict.fromkeys(("ge", "geq", "geqslant"), ("operator", ">=")),
    **dict.fromkeys(("ne", "neq"), ("operator", "!=")),
    **dict.fromkeys(("approx", "simeq", "doteq"), ("operator", "~")),
    **dict.fromkeys(("lt", "less"), ("operator", "<")),
    **dict.fromkeys(("gt", "greater"), ("operator", ">")),
    **dict.fromkeys(("{", "lbrace"), ("operator", "{set")),
    **dict.fromkeys(("}", "rbrace"), ("operator", "}set")),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), ("operator", "|")),
    **dict.fromkeys(("ldots", "dots", "cdots", "dotsc"), ("symbol", "...")),
    **dict.fromkeys(("circ", "degree"), ("operator", "degree")),
    **dict.fromkeys(
        ("overline", "vec", "hat", "bar", "overrightarrow", "angle", "triangle"),
        ("operator", "overline"),
    ),
    **{name: ("operator", name) for name in ("cup", "cap", "setminus", "in", "sqrt")},
    "pi": ("symbol", "pi"),
    "infty": ("infinity", ""),
    "colon": ("operator", ":"),
    "%": ("operator", "%"),
    "_": ("operator", "_"),
    "\\": ("operator", "row"),
    "lparen": ("operator", "("),
    "rparen": ("operator", ")"),
    "langle": ("operator", "<("),
    "rangle": ("operator", ">)"),
    "lfloor": ("operator", "floor("),
    "rfloor": ("operator", "floor)"),
    "lceil": ("operator", "ceil("),
    "rceil": ("operator", "ceil)"),
}
"""The kind and the value of each command's token."""
CHARACTERS = str.maketrans(
    {
        **{c: "-" for c in "−–‐‑‒﹣"},
        **{c: "*" for c in "×·⋅∙∗"},
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "√": "\\sqrt ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "<=",
        "≥": ">=",
        "≠": "!=",
        "≈": "~",
        "∈": "\\in ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∅": "\\{\\}",
        "±": "\\pm ",
        "∓": "\\mp ",
        "°": "\\degree ",
        "′": "'",
        "’": "'",
        "∀": "\\forall ",
        "$": "",
        "~": " ",
        "\u200b": "",
        "₀": "_0", "₁": "_1", "₂": "_2", "₃": "_3", "₄": "_4", "₅": "_5", "₆": "_6", "₇": "_7", "₈": "_8", "₉": "_9",
    }
)  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
RAISED = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
WORDED = re.compile(
    r"\\(text|textbf|textit|textrm|texttt|textsf|mbox|mathrm|mathbf|mathit|mathsf|mathbb|mathcal|operatorname|rm|bf|it)"
    r"\*?(?![a-zA-Z])\s*(?:\{([^{}]*)\})?"
)
COLOURED = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
ANNOUNCED = re.compile(r'^\s*"[^"]*(?:[:=]|\bis)\s*"\s*(?=\S)')
GUESS = re.compile(
    r"\b(?:and|or|not|about|approx\w*|roughly|maybe|perhaps|possibly)\b", re.IGNORECASE
)
"""Words that are no unit."""
MONEY = re.compile(r"(\\\$|€|£)\s*(-?[\d.,]*\d)")
DEGREE = re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})")
BLANK = re.compile(r"(?<!\\)\\(?=\s|$)")
SPEED = re.compile(r"(?<=\d)\s+(k?m/h|m/s(?:\^2)?)\s*$")
THIN = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|[\u00a0\u2009\u202f]|,\\!\s*)+(?=\d{3}(?!\d))")
SPACED = re.compile(r"(?<![\d.,/^_\\])\b[1-9]\d{0,2}(?: \d{3}){1,6}(?![\d/.,]|\s*/| \d)")
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|dot|bar)\s*(?:\{(\d+)\}|(\d))")
TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+(?![\w.]))?|\.\d+)|(?P<word>[a-zA-Z]+)"
    r"|(?P<command>\\(?:[a-zA-Z]+|.))|(?P<pair><=|>=|!=|==|\*\*)|(?P<other>.)",
    re.DOTALL,
)
GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,])")
RELATIONS = {"=", "<", ">", "<=", ">=", "!=", "in", "~", ":"}
UNITS: dict[str, str] = {
    name: names.split()[0]
    for names in (
        "degree deg degrees°",
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre",
        "in inch inche",
        "ft foot feet",
        "yd yard",
        "mi mile",
        "mph",
        "kph kmh",
        "g gram",
        "kg kilogram",
        "lb pound",
        "oz ounce",
        "l liter litre L",
        "ml milliliter mL",
        "s sec second",
        "min minute",
        "h hr hour",
        "day",
        "week",
        "month",
        "year yr",
        "dollar USD usd",
        "cent",
        "euro EUR",
        "unit",
        "people",
        "person",
        "student",
        "apple",
        "way",
        "point",
        "edge",
        "digit",
        "time",
        "am a.m. a.m",
        "pm p.m. p.m",
    )
    for name in names.split()
}
"""Word to unit, plurals taken away."""


class UnreadableError(Exception):
    """A text that is no formula."""


def unwrapped(text: str) -> str:
    r"""The text with characters in one spelling, without `$`; `\text{…}` becomes its content in quotes."""
    text = "".join(
        _vulgar(c) if unicodedata.category(c) == "No" and c not in "⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉" else c
        for c in text
    )
    text = RAISED.sub(lambda match: "^{" + match[0].translate(SUPERSCRIPTS) + "}", text)
    text = MONEY.sub(_money, text).replace("\\$", "")
    text = text.replace("\\(", "").replace("\\)", "").replace("\\[", "").replace("\\]", "")
    if text.lstrip().startswith("~"):
        text = text.replace("~", "\\approx ", 1)
    text = SPEED.sub(r' "\1"', BLANK.sub(" ", THIN.sub("", text))).translate(CHARACTERS)
    text = unicodedata.normalize("NFKC", text).replace("…", "\\ldots ").replace("...", "\\ldots ")
    text = COLOURED.sub("", text)
    for _ in range(3):
        text = WORDED.sub(_quoted, text)
    return ANNOUNCED.sub("", text)


def _money(match: re.Match[str]) -> str:
    name = {"€": "euro", "£": "pound sterling"}.get(match[1], "dollar")
    return f"{match[2]}\\text{{{name}}}"


def _vulgar(c: str) -> str:
    value = Fraction(unicodedata.numeric(c, 0.0)).limit_denominator(100)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _quoted(match: re.Match[str]) -> str:
    command, content = match[1], (match[2] or "").replace('"', "").strip()
    if not content:
        return " "
    is_symbol = len(content) == 1 and (command.startswith(("math", "rm")) or content == "e")
    if is_symbol or not re.search(r"[a-zA-Z]", content):
        return f" {content} "
    return f' "{content}" '


def tokens_of(text: str, *, grouped: bool) -> list[tuple[str, Any]]:
    """Kind and value of each token of an answer; of a set that a condition describes, those of the condition.

    Raises:
        UnreadableError: a character that no formula has.
    """
    text = DEGREE.sub(r"\\degree ", text)
    text = SPACED.sub(lambda match: match[0].replace(" ", ""), text)
    text = REPEATING.sub(_repeating, text)
    return _conditions(_tokens(text, grouped))


def unit_of(text: str) -> str:
    """One spelling of a unit: singular, abbreviated if it is a common one."""
    text = re.sub(r"\b(?:square|sq\.?) (\w+)", r"\1^2", text.strip(" .,"))
    text = re.sub(r"\b(?:cubic|cu\.?) (\w+)", r"\1^3", text).replace(" per ", " / ")
    words = []
    for word in text.split():
        name, mark, power = word.partition("^")
        single = name if name in UNITS else name.casefold().rstrip(".")
        if single not in UNITS and single.endswith("s"):
            single = single[:-1]
        words.append(UNITS.get(single, single) + mark + power)
    return " ".join(words)


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, again = match[1] or "0", match[2], match[3] or match[4]
    if len(whole + fixed + again) > 40:
        return match[0]
    under = 10 ** len(fixed) * (10 ** len(again) - 1)
    over = int(whole + fixed + again) - int(whole + fixed)
    return f"(\\frac{{{over}}}{{{under}}})"


def _tokens(text: str, grouped: bool) -> list[tuple[str, Any]]:
    """Kind and value of each token: number (value, decimals), symbol, function, text, infinity, operator."""
    found: list[tuple[str, Any]] = []
    at, depth = 0, 0
    while at < len(text):
        if text[at] == '"':
            end = text.index('"', at + 1) if '"' in text[at + 1 :] else -1
            if end < 0:
                raise UnreadableError("a quotation mark")
            _add_text(found, text[at + 1 : end])
            at = end + 1
            continue
        if grouped and depth == 0 and (match := GROUPED.match(text, at)):
            found.append(("number", _number(match[0].replace(",", ""))))
            at = match.end()
            continue
        match = TOKEN.match(text, at)
        assert match is not None
        kind, token = str(match.lastgroup), match[0]
        at = match.end()
        if kind == "number":
            if len(token) > MOST_DIGITS:
                raise UnreadableError("a long number")
            found.append(("number", _number(token)))
        elif kind == "word":
            _add_word(found, token)
        elif kind == "command":
            at = _add_command(found, token[1:], text, at)
        elif kind != "space":
            depth += (token in "([") - (token in ")]")
            token = {"==": "=", ";": ",", "\\": "row"}.get(token, token)
            found.append(("operator", token))
    return found


def _conditions(tokens: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The condition on the members of a set: `0 < x < 1` of `{x | 0 < x < 1}`, or of `{x ∈ R | 0 < x < 1}`."""
    kinds = [value if kind == "operator" else kind for kind, value in tokens]
    if kinds[:2] not in (["{set", "symbol"], ["{", "symbol"]) or kinds.count(kinds[0]) > 1:
        return tokens
    at = 4 if kinds[2:3] == ["in"] and tokens[3:4] == [("symbol", "R")] else 2
    is_whole = kinds[at : at + 1] in (["|"], [":"]) and kinds[-1] == kinds[0].replace("{", "}")
    return tokens[at + 1 : -1] if is_whole and RELATIONS & set(kinds[at + 1 :]) else tokens


def _number(token: str) -> tuple[Fraction, int]:
    """The value, and how many decimals are written; 0 of them for a power of ten."""
    mantissa, _, power = token.lower().partition("e")
    if power and abs(int(power)) > MOST_DIGITS:
        raise UnreadableError(token)
    return Fraction(token), 0 if power else len(mantissa.partition(".")[2])


def _add_text(found: list[tuple[str, Any]], content: str) -> None:
    for part in re.split(r"(,|;|\band\b|\bor\b)", content):
        part = part.strip()
        if part in {",", ";", "and", "or"}:
            found.append(("operator", ","))
        elif match := re.fullmatch(r"([\d.,]*\d)\s*([a-zA-Z].*)", part):
            found += [*_tokens(match[1], True), ("text", match[2])]
        elif choice := re.fullmatch(r"\(?([A-H])\)?", part):
            found.append(("symbol", choice[1]))
        elif part:
            found.append(("text", part))


def _add_word(found: list[tuple[str, Any]], word: str) -> None:
    if word in {"and", "or"}:
        found.append(("operator", ","))
    elif word in FUNCTIONS:
        found.append(("function", word))
    elif word in {"pi", "Pi"}:
        found.append(("symbol", "pi"))
    elif word in {"inf", "infinity", "infty", "oo"}:
        found.append(("infinity", ""))
    elif word == "U" and found and found[-1] in {("operator", ")"), ("operator", "]")}:
        found.append(("operator", "cup"))
    elif len(word) > 3 or (len(word) > 1 and unit_of(word) in UNITS.values()):
        found.append(("text", word))
    else:
        found.extend(("symbol", letter) for letter in word)


def _add_command(found: list[tuple[str, Any]], name: str, text: str, at: int) -> int:
    """Read one command; returns where the text continues."""
    if name in DROPPED:
        return at + (text[at : at + 1] == "." and name in {"left", "right"})
    if name in {"begin", "end"}:
        match = re.compile(r"\s*\{(\w+)\*?\}(?:\{[lcr|]*\})?").match(text, at)
        if match is None or "matrix" not in match[1] + "matrix" * (match[1] in {"array", "cases"}):
            raise UnreadableError("an environment")
        found.append(("operator", "matrix" if name == "begin" else "end"))
        return match.end()
    if name in {"emptyset", "varnothing"}:
        found += [("operator", "{set"), ("operator", "}set")]
    elif name in COMMANDS:
        found.append(COMMANDS[name])
    elif not name.isspace():
        raise UnreadableError(name)
    return at
