"""Programs that the policy wrote, run against unit tests: HumanEval, MBPP, APPS, CodeContests, TACO, Codeforces.

The program is the last fenced block of the response that is named Python, else the last without a name, else all of
it. The ground truth is one of

    {"test": "def check(candidate): …", "entry_point": "f", "prompt": "…"}   HumanEval: the prompt's code goes before
    {"asserts": ["assert f(1) == 2", …]}                                      one test each
    {"inputs": [...], "outputs": [...]}                                       standard input and output
    {"inputs": [...], "outputs": [...], "fn_name": "f"}                       arguments and result

or JSON text of one. Each test runs in an interpreter of its own that gets its input and not the answer (except in the
first two forms, whose tests are code), without files, network or other processes. It needs a sandbox
(`reward.recipe_sandbox: strict`). A program that fails, loops or crashes is a bad answer: a policy fault, whose score
counts. So are tests for which `reward.deadline_s` leaves no time. The score is the share of the first `max_tests`
that pass, or with `all_or_nothing` 1 when all do.

Printed text must be the wanted one, but for white space at the ends of lines and empty lines at the end; a result
must be the wanted one as JSON. Where the wanted number is a float, the program's may differ by a millionth of it.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import secrets
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import PositiveFloat, PositiveInt

from meshrl.common import config
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json, Outcome
from meshrl.rewardd.rewards._answers import said, same
from meshrl.sandbox import confinement

SHARE_OF_DEADLINE = 0.8
"""Share of the sample's deadline for all its tests: a program that loops in each is a bad answer with a score."""
NEEDS_SANDBOX = "strict"
"""The `reward.recipe_sandbox` without which it refuses to run; `config check` reads it."""
FENCE = re.compile(r"[ \t]*(?:[-*+][ \t]+|\d+[.)][ \t]+)?(`{3,}|~{3,})[ \t]*([^`\n]*)")
PYTHON = re.compile(r"\{?[ .]*(?:python|py)(?:[23](?:\.\d+)*)?(?![\w.+#-])", re.IGNORECASE)
ENDS_TRIED = 8
"""Closing fences that may be in a string of the program, before one that ends it."""
TOLERANCE = 1e-6
FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


class Config(config.Config):
    """Which tests count, and how long one may take."""

    max_tests: PositiveInt = 10
    """Tests beyond these are not run."""
    all_or_nothing: bool = False
    """1 when all pass, else 0; otherwise the share that passes."""
    test_deadline_s: PositiveFloat = 4.0
    """Wall-clock seconds of one test."""
    memory_bytes: PositiveInt = 1 << 30
    """Address space of one test."""


@dataclass(frozen=True, slots=True)
class Test:
    """One run of the program: its request, and a check of its output."""

    request: Json
    passes: Callable[[str], bool]


def prepare() -> None:
    """Raises ConfigError outside a sandbox: these programs are not trusted."""
    if confinement.level != "strict":
        raise ConfigError(
            "reward 'code' runs programs that a model wrote, and does so in a sandbox only: "
            "set reward.recipe_sandbox: strict"
        )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> dict[str, Json]:
    """The share of tests that the program passes.

    Raises:
        UserError: the ground truth has none of the forms above.
        ConfigError: not in a sandbox.
    """
    prepare()
    program, tests = program_of(solution_str), list(_tests(ground_truth))[: config.max_tests]
    if not tests:
        raise UserError("code: the ground truth has no tests")
    passed = 0
    end = time.monotonic() + confinement.deadline_s * SHARE_OF_DEADLINE
    for test in tests:
        deadline_s = min(config.test_deadline_s, end - time.monotonic())
        if deadline_s > 0 and _passes(program, test, deadline_s, config.memory_bytes):
            passed += 1
        elif config.all_or_nothing:
            break
    share = passed / len(tests)
    score = float(share == 1.0) if config.all_or_nothing else share
    outcome = Outcome.OK if passed else Outcome.POLICY_FAULT
    return {"score": score, "passed": passed, "tests": len(tests), "outcome": outcome}


def program_of(response: str) -> str:
    """The program of a response; an empty text where its thought does not end."""
    text = said(response.replace("\r\n", "\n").replace("\r", "\n"))
    named, unnamed = "", ""
    for info, block in _blocks(text.split("\n")):
        if not block.strip():
            continue
        if PYTHON.match(info):
            named = block
        elif not info:
            unnamed = block
    return named or unnamed or text


def _blocks(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The info string of each opening fence, and the lines up to its closing one, or to the end.

    A fence closes a block that as many of its character, or fewer, have opened, with nothing behind it and no deeper
    within a list. The first one that leaves a complete program of Python ends a block of it, as others may stand in a
    string.
    """
    at = 0
    while at < len(lines):
        opening = FENCE.fullmatch(lines[at])
        at += 1
        if opening is None:
            continue
        marks, info, indent = opening[1], opening[2].strip(), opening.start(1)
        ends = (n for n in range(at, len(lines)) if _closes(lines[n], marks, indent))
        tried = list(itertools.islice(ends, ENDS_TRIED if PYTHON.match(info) else 1)) or [
            len(lines)
        ]
        bodies = ["\n".join(_dedented(line, indent) for line in lines[at:end]) for end in tried]
        best = next((n for n, body in enumerate(bodies) if len(bodies) > 1 and _parses(body)), 0)
        yield info, bodies[best] + "\n"
        at = tried[best] + 1


def _closes(line: str, marks: str, indent: int) -> bool:
    bare = line.strip()
    deep = len(line) - len(line.lstrip())
    return len(bare) >= len(marks) and set(bare) == {marks[0]} and deep <= indent + 3


def _dedented(line: str, indent: int) -> str:
    return line[min(indent, len(line) - len(line.lstrip())) :]


def _parses(program: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _tests(truth: Json) -> Iterator[Test]:
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise UserError(f"code: the ground truth is not JSON: {error}") from error
    if not isinstance(truth, dict):
        raise UserError(f"code needs an object of tests as ground truth, got {str(truth)[:80]!r}")
    if "test" in truth:
        entry = truth.get("entry_point", "")
        yield _code_test(truth.get("prompt", ""), f"{truth['test']}\ncheck({entry})\n")
    elif "asserts" in truth:
        for text in truth["asserts"]:
            yield _code_test("", str(text))
    elif "inputs" in truth and "outputs" in truth:
        if len(truth["inputs"]) != len(truth["outputs"]):
            raise UserError(
                f"code: {len(truth['inputs'])} inputs and {len(truth['outputs'])} outputs"
            )
        if not truth.get("fn_name"):
            yield from map(_text_test, truth["inputs"], truth["outputs"])
            return
        results = [_result(wanted) for wanted in truth["outputs"]]
        # Data sets write a result as itself, or as a list that holds it alone: then all of them do.
        alone = all(isinstance(result, list) and len(result) == 1 for result in results)
        for given, wanted in zip(truth["inputs"], results, strict=True):
            yield _call_test(truth["fn_name"], given, wanted, alone)
    else:
        raise UserError(
            f"code: the ground truth has neither test, asserts nor inputs and outputs (it has {', '.join(truth)})"
        )


def _code_test(before: str, test: str) -> Test:
    word = secrets.token_hex(16)
    return Test(
        {"before": before, "test": test, "word": word},
        lambda output: output.rstrip().endswith(word),
    )


def _text_test(given: Json, wanted: Json) -> Test:
    text = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
    target = "\n".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)
    return Test({"stdin": text}, lambda output: same_output(output, target))


def _result(wanted: Json) -> Json:
    """A wanted result: JSON text of it, or itself."""
    try:
        return json.loads(wanted) if isinstance(wanted, str) else wanted
    except ValueError:
        return wanted


def _call_test(name: str, given: Json, wanted: Json, alone: bool) -> Test:
    try:
        arguments = (
            [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
        )
    except ValueError as error:
        raise UserError(f"code: arguments that are not JSON: {given[:80]!r}: {error}") from error
    return Test(
        {"call": name, "arguments": arguments}, lambda output: same_result(output, wanted, alone)
    )


def same_result(output: str, wanted: Json, alone: bool = False) -> bool:
    """Whether the last line that was printed is the wanted result as JSON, or with `alone` its only entry."""
    try:
        got = json.loads(output.rstrip().rpartition("\n")[2])
        return same(got, wanted, TOLERANCE) or (alone and same(got, wanted[0], TOLERANCE))
    except (ValueError, RecursionError):
        return False


def same_output(output: str, wanted: str) -> bool:
    """Equal but for white space at the ends of lines, empty lines at the end and the last digits of floats."""
    some, others = _lines(output), _lines(wanted)
    if some == others:
        return True
    return len(some) == len(others) and all(map(_same_line, some, others))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]


def _same_line(line: str, wanted: str) -> bool:
    """Word for word, with the same white space between them."""
    if line == wanted:
        return True
    some, others = (re.split(r"(\s+)", text) for text in (line, wanted))
    return len(some) == len(others) and all(map(_same_word, some, others))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not FLOAT.fullmatch(wanted) or not NUMBER.fullmatch(word):
        return False
    return same(float(word), float(wanted), TOLERANCE)


def _passes(program: str, test: Test, deadline_s: float, memory_bytes: int) -> bool:
    """Run one test in an interpreter of its own."""
    request = json.dumps({"program": program, "memory_bytes": memory_bytes, **test.request})
    with tempfile.TemporaryFile() as file:  # a pipe would be read to its end, whatever its length
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "meshrl.sandbox.program"],
                input=request.encode(errors="replace"),
                stdout=file,
                stderr=subprocess.DEVNULL,
                timeout=deadline_s,
            )
        except subprocess.TimeoutExpired:
            return False
        file.seek(0)
        output = file.read().decode(errors="replace")
    return done.returncode == 0 and test.passes(output)
