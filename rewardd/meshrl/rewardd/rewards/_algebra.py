"""Small, safe algebra for graders: plain arithmetic, and sympy's parser with input that cannot execute code.

A response is written by a model that is rewarded for finding holes. sympy's parser ends in `eval`, so it gets only
strings of digits, letters, operators and brackets, a namespace of a few mathematical names, and no tall powers.
"""

from __future__ import annotations

import ast
import functools
import importlib
import keyword
import operator
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from meshrl.contract.errors import ConfigError

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


def equal(left: str, right: str) -> bool:
    """True if the difference of two expressions simplifies to 0."""
    difference = parse(f"({left})-({right})")
    if difference is None:
        return False
    try:
        return bool(sympy().simplify(difference) == 0)
    except Exception:
        # As above: if sympy cannot simplify it, equality is not shown.
        return False
