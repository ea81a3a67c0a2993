"""Hydra's override grammar: `key=value`, `+key=value`, `++key=value`, `~key`, with its values.

https://hydra.cc/docs/1.3/advanced/override_grammar/basic/. Sweeps and functions other than the casts are refused: a
recipe is one run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshrl.contract.errors import ConfigError

_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z0-9_$][\w$./@:{}-]*)(?:(=)(.*))?", re.DOTALL)
_INT = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
_FLOAT = re.compile(
    r"[+-]?((([0-9](_?[0-9])*)\.([0-9](_?[0-9])*)?|\.[0-9](_?[0-9])*)([eE][+-]?[0-9](_?[0-9])*)?"
    r"|[0-9](_?[0-9])*[eE][+-]?[0-9](_?[0-9])*|[iI][nN][fF]|[nN][aA][nN])"
)
_FUNCTION = re.compile(r"([A-Za-z_]\w*)\(")
_CASTS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
_ENDS = frozenset(",]})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One argument of a Hydra command line."""

    key: str
    """Dotted; a choice of a config group keeps its `/` and `@`."""
    value: Any = None
    delete: bool = False
    """`~key`"""
    text: str = ""
    """The override as it was written."""


def parse(text: str) -> Override:
    """Read one override.

    Raises:
        ConfigError: it is none, or a sweep.
    """
    found = _OVERRIDE.fullmatch(text.strip())
    if found is None or (found[3] is None and found[1] != "~"):
        raise ConfigError(f"{text!r}: want key=value, +key=value, ++key=value or ~key")
    value = _Values(text, found[4]).whole() if found[4] else ("" if found[3] else None)
    return Override(key=found[2], value=value, delete=found[1] == "~", text=text)


def scalar(text: str) -> Any:
    """An unquoted word: null, true, an integer, a number, or itself."""
    lowered = text.lower()
    if lowered == "null":
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


class _Values:
    """A recursive descent over the value of one override."""

    def __init__(self, override: str, text: str) -> None:
        self._override = override
        self._text = text
        self._at = 0

    def whole(self) -> Any:
        """The value, which must be all there is."""
        value = self._element(top=True)
        self._blanks()
        if self._peek() == ",":
            raise self._error(
                "several values are a sweep, and a recipe is one run: give one value, or [a,b] for a list"
            )
        if self._at < len(self._text):
            raise self._error(f"{self._text[self._at :]!r} follows the value")
        return value

    def _element(self, *, top: bool = False) -> Any:
        self._blanks()
        match self._peek():
            case "[":
                return self._list()
            case "{":
                return self._dict()
            case "'" | '"':
                return self._quoted()
            case _:
                return (
                    self._function() if _FUNCTION.match(self._text, self._at) else self._bare(top)
                )

    def _list(self) -> list[Any]:
        items: list[Any] = []
        self._at += 1
        self._blanks()
        while not self._take("]"):
            items.append(self._element())
            self._comma("]")
        return items

    def _dict(self) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        self._at += 1
        self._blanks()
        while not self._take("}"):
            self._blanks()
            key = self._quoted() if self._peek() in "'\"" else self._bare(False, stop=":")
            self._blanks()
            if not self._take(":"):
                raise self._error("want key: value in {...}")
            items[key] = self._element()
            self._comma("}")
        return items

    def _comma(self, end: str) -> None:
        self._blanks()
        if self._take(","):
            self._blanks()
            if self._peek() == end:
                raise self._error(f"a comma before {end}")
        elif self._peek() != end:
            raise self._error(f"want , or {end}")

    def _quoted(self) -> str:
        quote = self._text[self._at]
        self._at += 1
        made = ""
        while self._at < len(self._text):
            character = self._text[self._at]
            # Backslashes stand for themselves, except in front of a quote.
            run = re.compile(r"\\+").match(self._text, self._at)
            if run is not None:
                slashes, after = len(run[0]), self._text[run.end() : run.end() + 1]
                self._at = run.end()
                if after != quote:
                    made += run[0]
                    continue
                made += "\\" * (slashes // 2)
                if slashes % 2:
                    made += quote
                    self._at += 1
                continue
            self._at += 1
            if character == quote:
                return made
            made += character
        raise self._error(f"a closing {quote} is missing")

    def _bare(self, top: bool, stop: str = "") -> Any:
        """Up to the next comma or bracket that is not escaped."""
        made, plain = "", True
        depth = 0
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in tuple(
                "\\()[]{}:=, \t'\""
            ):
                made += self._text[self._at + 1]
                plain = False
                self._at += 2
                continue
            if self._text.startswith("${", self._at):
                depth += 1
                made += "${"
                self._at += 2
                continue
            if depth:
                depth -= character == "}"
            elif character in _ENDS or character in "[{(" or character == stop:
                break
            elif character in "'\"":
                raise self._error("a quote inside a word: quote the whole value, or escape it")
            elif character == "=" and not top:
                raise self._error("= inside a list or dictionary: quote it")
            made += character
            self._at += 1
        if not made.strip() and plain:
            raise self._error("a value is missing")
        return scalar(made.strip()) if plain else made.strip()

    def _function(self) -> Any:
        found = _FUNCTION.match(self._text, self._at)
        assert found is not None
        cast = _CASTS.get(found[1])
        if cast is None:
            raise self._error(
                f"{found[1]}(...) is a sweep or a function of Hydra: write the value itself"
            )
        self._at = found.end()
        value = self._element()
        self._blanks()
        if not self._take(")"):
            raise self._error("want )")
        try:
            return cast(value)
        except (TypeError, ValueError) as error:
            raise self._error(str(error)) from error

    def _blanks(self) -> None:
        while self._peek() in (" ", "\t", "\n"):
            self._at += 1

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, character: str) -> bool:
        if self._peek() != character:
            return False
        self._at += 1
        return True

    def _error(self, said: str) -> ConfigError:
        return ConfigError(f"{self._override!r}: {said}")
