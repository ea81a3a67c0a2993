"""The one tool: arithmetic on whole numbers."""

from __future__ import annotations

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> int:
    """Compute a sum, difference or product.

    Args:
        expression: Whole numbers with +, - and *, for example 12*34.
    """
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            found: int = OPERATIONS[type(op)](_value(left), _value(right))
            return found
    raise ValueError("only whole numbers with +, - and *")
