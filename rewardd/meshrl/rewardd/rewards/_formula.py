r"""Reads an answer in mathematics, LaTeX or plain, into a tree. Nothing is evaluated here.

    answer   = relation {, relation}          a bare list; `and` and `or` are commas, too
    relation = union {(= < > ≤ ≥ ≠ ∈ : …) union}
    union    = sum {(∪ ∩ \) sum}
    sum      = [±] product {± product}
    product  = factor {[· /] factor}          a word behind a number is its unit
    factor   = atom {^ _ ! % °}

A node is a tuple that begins with its kind. The text is read once from left to right, to a bounded depth.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from meshrl.rewardd.rewards._formula_tokens import (
    GUESS,
    RELATIONS,
    UnreadableError,
    tokens_of,
    unit_of,
)

Node = tuple[Any, ...]
MOST_DEPTH = 40
"""Levels of brackets, exponents and functions."""
MOST_POSTFIXES = 4
"""Postfixes of one factor, as in `x!^2%`."""
ANGULAR = {"sin", "cos", "tan", "cot", "sec", "csc"}


class Reader:
    """Reads one text."""

    def __init__(self, text: str, *, grouped: bool) -> None:
        """Split the text; if `grouped`, `1,234` outside of brackets is one number, else two.

        Raises:
            UnreadableError: a character that no formula has.
        """
        self._tokens = tokens_of(text, grouped=grouped)
        self._at = 0
        self._depth = 0
        self._in_bars = 0

    def answer(self) -> list[Node]:
        """The items of the answer. Raises UnreadableError."""
        items = self._items(())
        if self._at < len(self._tokens):
            raise UnreadableError(self._tokens[self._at])
        return items

    def _peek(self) -> tuple[str, Any]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _is(self, *operators: str) -> bool:
        kind, value = self._peek()
        return kind == "operator" and value in operators

    def _take(self, *operators: str) -> str:
        if not self._is(*operators):
            raise UnreadableError(f"{self._peek()} where {operators} is wanted")
        self._at += 1
        return str(self._tokens[self._at - 1][1])

    def _items(self, closing: tuple[str, ...]) -> list[Node]:
        items: list[Node] = []
        while not self._is(*closing) and self._peek()[0] != "end":
            items.append(self._relation())
            if not self._is(","):
                break
            while self._is(","):
                self._at += 1
        return items

    def _relation(self) -> Node:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise UnreadableError("too deep")
        leading = self._is("~")
        if leading:
            self._at += 1
        parts, operators = [self._union()], []
        while self._peek()[0] == "operator" and self._peek()[1] in RELATIONS:
            operators.append(self._take(*RELATIONS))
            parts.append(self._union())
        self._depth -= 1
        if not operators:
            return ("about", parts[0]) if leading else parts[0]
        if set(operators) == {":"}:
            return ("ratio", *parts)
        return ("relation", tuple(operators), *parts)

    def _union(self) -> Node:
        parts, operators = [self._sum()], []
        while self._is("cup", "cap", "setminus"):
            operators.append(self._take("cup", "cap", "setminus"))
            parts.append(self._sum())
        if not operators:
            return parts[0]
        if len(set(operators)) > 1:
            raise UnreadableError("unions and cuts in one")
        return (operators[0], *parts)

    def _sum(self) -> Node:
        terms: list[Node] = []
        while True:
            sign = 1
            signed = False
            while self._is("+", "-"):
                sign = -sign if self._take("+", "-") == "-" else sign
                signed = True
            if terms and not signed:
                break
            term = self._product()
            terms.append(term if sign > 0 else negative(term))
            if not self._is("+", "-"):
                break
        return terms[0] if len(terms) == 1 else ("sum", *terms)

    def _product(self) -> Node:
        factors = [self._factor()]
        while True:
            if self._is("*", "**"):
                if self._take("*", "**") == "**":
                    raise UnreadableError("**")
                factors.append(self._signed_factor())
            elif self._is("/"):
                self._at += 1
                factors.append(("inverse", self._signed_factor()))
            elif self._peek()[0] == "text":
                if not self._is_unit():
                    break
                value = factors[0] if len(factors) == 1 else ("product", *factors)
                return ("unit", value, self._unit())
            elif self._is_mixed(factors):
                factors[-1] = ("sum", factors[-1], self._mixed())
            elif self._begins_factor():
                factors.append(self._factor())
            else:
                break
        return factors[0] if len(factors) == 1 else ("product", *factors)

    def _is_unit(self) -> bool:
        return bool(re.match(r"[a-zA-Z°]", self._peek()[1])) and not GUESS.search(self._peek()[1])

    def _unit(self) -> str:
        words: list[str] = []
        while self._peek()[0] == "text" and self._is_unit():
            words.append(self._peek()[1])
            self._at += 1
            if self._is("^"):
                self._at += 1
                power = self._exponent()
                if power[0] != "number":
                    raise UnreadableError("the power of a unit")
                words[-1] += f"^{power[1]}"
            if self._is("/"):
                self._at += 1
                words.append("/")
        return unit_of(" ".join(words))

    def _is_mixed(self, factors: list[Node]) -> bool:
        r"""Whether a proper fraction of whole numbers follows one: `7\frac{3}{4}`, `7 3/4`."""
        last = factors[-1]
        if len(factors) > 1 or last[0] != "number" or last[1].denominator != 1 or last[2]:
            return False
        rest = self._tokens[self._at : self._at + 7]
        if [kind for kind, _ in rest[:3]] == ["number", "operator", "number"]:
            return bool(rest[1][1] == "/")
        return bool(rest) and rest[0] == ("operator", "frac") and _whole_fraction(rest[1:])

    def _mixed(self) -> Node:
        if self._is("frac"):
            return self._atom()
        over = self._atom()
        self._take("/")
        return ("product", over, ("inverse", self._atom()))

    def _begins_factor(self) -> bool:
        kind, value = self._peek()
        if kind == "operator":
            opening = {"(", "{", "frac", "sqrt", "binom", "floor(", "ceil(", "matrix", "overline"}
            return value in opening or (value == "|" and not self._in_bars)
        return kind in {"symbol", "function", "infinity"}

    def _signed_factor(self) -> Node:
        sign = 1
        while self._is("-", "+"):
            sign = -sign if self._take("-", "+") == "-" else sign
        factor = self._factor()
        return factor if sign > 0 else negative(factor)

    def _factor(self) -> Node:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise UnreadableError("too deep")
        kind, _ = self._peek()
        node = self._function() if kind == "function" else self._atom()
        for _ in range(MOST_POSTFIXES):
            if self._is("^", "**"):
                self._at += 1
                node = ("power", node, self._exponent())
            elif self._is("_"):
                self._at += 1
                node = self._subscripted(node)
            elif self._is("!"):
                self._at += 1
                node = ("factorial", node)
            elif self._is("%"):
                self._at += 1
                node = ("percent", node)
            elif self._is("degree"):
                self._at += 1
                node = ("unit", node, "degree")
            elif self._is("'") and node[0] == "symbol":
                self._at += 1
                node = ("symbol", node[1] + "'")
            else:
                break
        self._depth -= 1
        return node

    def _exponent(self) -> Node:
        if self._is("{"):
            return self._group()
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise UnreadableError("too deep")
        if self._is("-", "+"):
            sign = self._take("-", "+")
            node = self._exponent()
            node = negative(node) if sign == "-" else node
        elif self._peek()[0] == "function":
            node = self._function()
        else:
            node = self._atom()
            if self._is("^", "**"):
                self._at += 1
                node = ("power", node, self._exponent())
        self._depth -= 1
        return node

    def _subscripted(self, node: Node) -> Node:
        below = self._group() if self._is("{") else self._atom()
        if node[0] == "number" and below[0] == "number" and not node[2]:
            if below[1] == 10:
                return node
            return ("based", str(node[1]), below[1])
        if node[0] != "symbol":
            raise UnreadableError("a subscript")
        return ("symbol", f"{node[1]}_{name_of(below)}")

    def _function(self) -> Node:
        name = str(self._peek()[1])
        self._at += 1
        base = power = None
        for _ in range(2):
            if self._is("_"):
                self._at += 1
                base = self._group() if self._is("{") else self._atom()
            elif self._is("^", "**"):
                self._at += 1
                power = self._exponent()
        if self._is("(", "{", "|"):
            argument = self._atom()
        else:
            sign = 1
            while self._is("-"):
                self._at += 1
                sign = -sign
            factors = [self._factor()]
            while self._begins_factor() and self._peek()[0] != "function":
                factors.append(self._factor())
            argument = factors[0] if len(factors) == 1 else ("product", *factors)
            argument = argument if sign > 0 else negative(argument)
        if name in ANGULAR:
            argument = in_radians(argument)
        if name == "log" and base is not None:
            node: Node = ("log", base, argument)
        elif base is not None:
            raise UnreadableError("a subscript of a function")
        elif name == "sqrt":
            node = ("root", ("number", Fraction(2), 0), argument)
        elif name == "abs":
            node = ("abs", argument)
        elif power == negative(("number", Fraction(1), 0)) and name in {"sin", "cos", "tan"}:
            return ("function", f"a{name}", argument)
        else:
            node = ("function", name.replace("arc", "a"), argument)
        return node if power is None else ("power", node, power)

    def _group(self) -> Node:
        self._take("{")
        if self._is("}"):
            raise UnreadableError("an empty group")
        items = self._items(("}",))
        self._take("}")
        if len(items) != 1:
            raise UnreadableError("a list in a group")
        return items[0]

    def _atom(self) -> Node:
        kind, value = self._peek()
        self._at += 1
        if kind == "number":
            return ("number", *value)
        if kind == "symbol":
            if value in {"f", "g", "h", "F", "G", "P"} and self._is("("):
                inner = self._tokens[self._at + 1 : self._at + 3]
                if len(inner) == 2 and inner[0][0] in {"symbol", "number"} and inner[1][1] == ")":
                    self._at += 3
                    return ("symbol", f"{value}({name_of((inner[0][0], inner[0][1]))})")
            return ("symbol", value)
        if kind == "infinity":
            return ("infinity",)
        if kind == "text":
            return ("text", value.casefold())
        if kind != "operator":
            raise UnreadableError("the end")
        if value == "{":
            items = self._items(("}",))
            self._take("}")
            return items[0] if len(items) == 1 else ("set", *items)
        if value in "([":
            return self._bracketed(value)
        if value == "{set":
            items = self._items(("}set",))
            self._take("}set")
            return ("set", *items)
        if value == "<(":
            items = self._items((">)",))
            self._take(">)")
            return ("sequence", "<", ">", *items)
        if value == "|":
            self._in_bars += 1
            inside = self._sum()
            self._take("|")
            self._in_bars -= 1
            return ("abs", inside)
        if value in ("floor(", "ceil("):
            inside = self._sum()
            self._take(value.replace("(", ")"))
            return (value[:-1], inside)
        if value in ("frac", "binom"):
            over, under = self._argument(), self._argument()
            return (
                ("product", over, ("inverse", under))
                if value == "frac"
                else ("binomial", over, under)
            )
        if value == "sqrt":
            degree: Node = ("number", Fraction(2), 0)
            if self._is("["):
                self._at += 1
                degree = self._sum()
                self._take("]")
            return ("root", degree, self._argument())
        if value == "matrix":
            return self._matrix()
        if value == "overline":
            return ("symbol", f"overline {name_of(self._argument())}")
        raise UnreadableError(value)

    def _bracketed(self, opening: str) -> Node:
        bars, self._in_bars = self._in_bars, 0
        items = self._items((")", "]"))
        closing = self._take(")", "]")
        self._in_bars = bars
        if len(items) == 1 and (opening, closing) == ("(", ")"):
            return items[0]
        if not items:
            raise UnreadableError("empty brackets")
        return ("sequence", opening, closing, *items)

    def _argument(self) -> Node:
        """A group, or one character: the digits of a number are taken one by one."""
        kind, value = self._peek()
        if kind == "number" and value[1] == 0 and value[0].denominator == 1 and value[0] > 9:
            digits = str(value[0])
            rest = Fraction(int(digits[1:]))
            if digits[1] == "0" and len(digits) > 2:
                raise UnreadableError(digits)
            self._tokens[self._at] = ("number", (rest, 0))
            return ("number", Fraction(int(digits[0])), 0)
        return self._atom()

    def _matrix(self) -> Node:
        rows: list[tuple[Node, ...]] = []
        while not self._is("end"):
            cells = [self._relation()]
            while self._is("&"):
                self._at += 1
                cells.append(self._relation())
            rows.append(tuple(cells))
            if not self._is("row"):
                break
            self._at += 1
        self._take("end")
        return ("matrix", *rows)


def negative(node: Node) -> Node:
    """Minus `node`; of a number with a unit or a percent sign, the number is negated."""
    if node[0] == "number":
        return ("number", -node[1], node[2])
    if node[0] in {"unit", "percent"}:
        return (node[0], negative(node[1]), *node[2:])
    return ("product", ("number", Fraction(-1), 0), node)


def in_radians(node: Node) -> Node:
    """An angle with the degrees in it as numbers: 60° is 60·π/180."""
    parts = [in_radians(part) if isinstance(part, tuple) else part for part in node]
    if node[0] == "unit" and node[2] == "degree":
        return ("product", parts[1], ("symbol", "pi"), ("number", Fraction(1, 180), 0))
    return tuple(parts)


def name_of(node: Node) -> str:
    """One spelling of a subscript or of an argument."""
    return str(node[1]) if node[0] in {"symbol", "number", "text"} else repr(node)


def _whole_fraction(tokens: list[tuple[str, Any]]) -> bool:
    r"""Whether `{a}{b}`, `ab` or a mixture follows, of whole numbers."""
    kinds = [value if kind == "operator" else kind for kind, value in tokens]
    if kinds[:6] == ["{", "number", "}", "{", "number", "}"]:
        return bool(tokens[1][1][0] < tokens[4][1][0])
    return kinds[:1] == ["number"]
