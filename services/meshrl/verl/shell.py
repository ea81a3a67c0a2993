"""From a pasted script to the words of its verl command: what launch scripts use of bash, and nothing is run.

Understood: comments, continued lines, quotes, `NAME=value`, `export`, arrays, `$NAME`, `${NAME:-default}`,
`"${NAME[@]}"` and `$((a * b))`. Whatever would need a shell to know (`$(command)`, `if`) is an error that names its
line.
"""

from __future__ import annotations

import ast
import operator as operators
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshrl.contract.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_BRACED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[@*#?!$0-9])(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_BRANCHES = frozenset({"if", "for", "while", "until", "case", "function", "select"})
_QUIET = frozenset({"set", "cd", "source", "unset", "echo", "mkdir", "ulimit", "shopt"})
_DECLARING = frozenset({"export", "readonly", "local", "declare"})

_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operators.add,
    ast.Sub: operators.sub,
    ast.Mult: operators.mul,
    ast.Div: operators.floordiv,
    ast.Mod: operators.mod,
}

Value = str | list[str]


def commands(script: str, environment: Mapping[str, str]) -> list[list[str]]:
    """The statements of `script` that are no assignments, each a list of words.

    Args:
        script: What somebody pasted.
        environment: Variables that the script does not set itself, such as HOME.

    Raises:
        ConfigError: it cannot be read without running it; says where.
    """
    return _WordReader(script, dict(environment)).read()


@dataclass
class _WordReader:
    """A scan from left to right; assignments take effect as they are met."""

    text: str
    variables: dict[str, Value]
    at: int = 0
    words: list[str] = field(default_factory=list)
    word: str | None = None

    def read(self) -> list[list[str]]:
        """The statements that are no assignments, each a list of words."""
        statements: list[list[str]] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "\n;|&":
                self._end_word()
                if self._is_command():
                    statements.append(self.words)
                self.words = []
                self.at += 1
            elif character in "<>":
                self._redirect()
            elif self.word is None and self._assign():
                pass
            else:
                self._step(character)
        self._end_word()
        if self._is_command():
            statements.append(self.words)
        return statements

    def _is_command(self) -> bool:
        words = self.words
        if words and words[0] in _BRANCHES:
            raise self._error(
                f"`{words[0]}`: paste the command itself, with its variables set above it"
            )
        return bool(words) and words[0] not in _QUIET | _DECLARING

    def _step(self, character: str) -> None:
        """One character, quote or variable of a word."""
        if character.isspace():
            self._end_word()
            self.at += 1
        elif character == "#" and self.word is None:
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif character == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            if self.text.startswith("\r\n", self.at + 1):
                self.at += 1
            elif following != "\n":
                self._add(following)
            self.at += 2
            if following == "\n":
                self._skip_comment_lines()
        elif character == "'":
            end = self._find("'", self.at + 1)
            self._add(self.text[self.at + 1 : end])
            self.at = end + 1
        elif character == '"':
            self._double_quoted()
        elif character == "$":
            self._expand(quoted=False)
        elif character == "`":
            raise self._error("a command in backquotes: put its output here instead")
        else:
            self._add(character)
            self.at += 1

    def _skip_comment_lines(self) -> None:
        """Scripts comment arguments out between continued lines; bash would end the command there."""
        while found := re.compile(r"[ \t]*#[^\n]*\n").match(self.text, self.at):
            self.at = found.end()

    def _double_quoted(self) -> None:
        self._add("")
        self.at += 1
        while (character := self._here()) != '"':
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in (
                '"',
                "\\",
                "$",
                "`",
                "\n",
            ):
                following = self.text[self.at + 1]
                self._add("" if following == "\n" else following)
                self.at += 2
            elif character == "$":
                self._expand(quoted=True)
            elif character == "`":
                raise self._error("a command in backquotes: put its output here instead")
            else:
                self._add(character)
                self.at += 1
        self.at += 1

    def _expand(self, *, quoted: bool) -> None:
        """A variable, an array or arithmetic, from `$` on."""
        rest = self.text[self.at :]
        if rest.startswith("$(("):
            end = self._closing(self.at + 1, "()")
            self._add(str(self._arithmetic(self.text[self.at + 3 : end - 1])))
            self.at = end + 1
            return
        if rest.startswith("$("):
            raise self._error("$(...): put the command's output here instead")
        if rest.startswith("${"):
            end = self._closing(self.at + 1, "{}")
            inside = self.text[self.at + 2 : end]
            if "." in inside.split(":")[0] or inside.startswith("oc."):
                # Hydra's own `${a.b}`; a shell would have asked for quotes around it.
                self._add(self.text[self.at : end + 1])
                self.at = end + 1
                return
            found = _BRACED.fullmatch(inside)
            if found is None:
                raise self._error(f"${{{inside}}}: put its value here instead")
            self.at = end + 1
            self._insert(self._value(found[1], found[3], found[4]), quoted=quoted)
            return
        name = _NAME.match(rest, 1)
        if name is not None:
            self.at += name.end()
            self._insert(self._value(name[0], None, None), quoted=quoted)
        elif rest[1:2] and rest[1] in "@*#?!$0123456789":
            self.at += 2
            self._insert([], quoted=quoted)
        else:
            self._add("$")
            self.at += 1

    def _value(self, name: str, operator: str | None, default: str | None) -> Value:
        if not _NAME.fullmatch(name):  # the arguments of a script that has none here
            return [] if operator is None else default or ""
        value = self.variables.get(name)
        missing = value is None or (not value and bool(operator and operator.startswith(":")))
        if not missing:
            assert value is not None
            return value
        if operator is None:
            raise self._error(
                f"${name} is not set; set it above the command, or give it with --env"
            )
        bare = (default or "").replace('"', "").replace("'", "")
        inner = _WordReader(f'"{bare}"', self.variables).read()
        return inner[0][0] if inner else ""

    def _arithmetic(self, expression: str) -> int:
        def known(found: re.Match[str]) -> str:
            value = self._value(found[0], None, None)
            return value if isinstance(value, str) else " ".join(value)

        plain = _NAME.sub(known, expression.replace("$", "").replace("{", "").replace("}", ""))
        try:
            return _integer(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ArithmeticError, KeyError) as error:
            raise self._error(f"$(({expression})): put its value here instead") from error

    def _insert(self, value: Value, *, quoted: bool) -> None:
        """Add an expansion to the words; unquoted text falls apart at its blanks, an array always."""
        if isinstance(value, str):
            parts = [value] if quoted else value.split()
            leading, trailing = value[:1].isspace(), value[-1:].isspace()
        else:
            parts, leading, trailing = value, False, False
            if quoted and not parts and self.word == "":
                self.word = None
        if leading and not quoted:
            self._end_word()
        for number, part in enumerate(parts):
            if number:
                self._end_word()
            self._add(part)
        if trailing and not quoted:
            self._end_word()

    def _assign(self) -> bool:
        """`NAME=value`, `NAME=(…)` where a word may begin; True when one was read."""
        found = _ASSIGNMENT.match(self.text, self.at)
        before = [
            word for word in self.words if word not in _DECLARING and not word.startswith("-")
        ]
        if found is None or before:
            return False
        self.at = found.end()
        declaring, self.words = self.words, []
        if self._here(None) == "(":
            self.at += 1
            value: Value = self._array()
            if found[2] and isinstance(old := self.variables.get(found[1]), list):
                value = [*old, *value]
        else:
            self.word = ""
            while self.at < len(self.text) and self.text[self.at] not in "\n;|& \t":
                quiet = self.text[self.at]
                self._step(quiet)
            self._end_word()
            text = " ".join(self.words)
            value = str(self.variables.get(found[1], "")) + text if found[2] else text
        self.variables[found[1]] = value
        self.words = declaring
        return True

    def _array(self) -> list[str]:
        while self._here() != ")":
            if self.text[self.at] in "\n;|&":
                self._end_word()
                self.at += 1
            else:
                self._step(self.text[self.at])
        self.at += 1
        self._end_word()
        return self.words

    def _redirect(self) -> None:
        """`> file`, `2>&1`: not for us."""
        if self.word is not None and self.word.isdigit():
            self.word = None
        found = re.compile(r"[<>&]+\s*[^\s;|&]*").match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def _add(self, text: str) -> None:
        self.word = (self.word or "") + text

    def _end_word(self) -> None:
        if self.word is not None:
            self.words.append(self.word)
            self.word = None

    def _here(self, missing: str | None = "a closing quote or bracket") -> str:
        if self.at < len(self.text):
            return self.text[self.at]
        if missing is None:
            return ""
        raise self._error(f"the text ends before {missing}")

    def _closing(self, opening: int, pair: str) -> int:
        """Index at which the bracket that opens at `opening` closes."""
        depth = 0
        for at in range(opening, len(self.text)):
            depth += {pair[0]: 1, pair[1]: -1}.get(self.text[at], 0)
            if depth == 0:
                return at
        raise self._error(f"the text ends before a closing {pair[1]}")

    def _find(self, what: str, start: int) -> int:
        end = self.text.find(what, start)
        if end < 0:
            raise self._error(f"the text ends before a closing {what}")
        return end

    def _error(self, said: str) -> ConfigError:
        return ConfigError(
            f"line {self.text.count(chr(10), 0, self.at) + 1} of the command: {said}"
        )


def _integer(node: ast.expr) -> int:
    """The value of `a + b * (c - 1)`. Raises KeyError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_integer(node.left), _integer(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand)
    raise KeyError(ast.dump(node))
