"""Programs that the policy wrote, run against unit tests: HumanEval, MBPP, APPS, CodeContests, TACO, Codeforces.

The program is the last fenced block of the response, or all of it. The ground truth is one of

    {"test": "def check(candidate): …", "entry_point": "f", "prompt": "…"}   HumanEval: the prompt's code goes before
    {"asserts": ["assert f(1) == 2", …]}                                      one test each
    {"inputs": [...], "outputs": [...]}                                       standard input and output
    {"inputs": [...], "outputs": [...], "fn_name": "f"}                       arguments and result

or JSON text of one. Each test runs in an interpreter of its own that gets its input and not the answer (except in the
first two forms, whose tests are code), without files, network or other processes. It needs a sandbox
(`reward.recipe_sandbox: strict`). A program that fails, loops or crashes is a bad answer: a policy fault, whose score
counts. So are tests for which `reward.deadline_s` leaves no time. The score is the share of the first `max_tests`
that pass, or with `all_or_nothing` 1 when all do.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import PositiveFloat, PositiveInt

from meshrl.contract import config
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json, Outcome
from meshrl.sandbox import confinement

SHARE_OF_DEADLINE = 0.8
"""Of the sample's deadline, for all its tests: a program that loops in each is a bad answer, which has a score."""
NEEDS_SANDBOX = "strict"
"""The `reward.recipe_sandbox` without which it refuses to run; `config check` reads it."""
FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


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
    """Raises ConfigError outside a sandbox: nobody vouches for these programs."""
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
    program, tests = _program(solution_str), list(_tests(ground_truth))[: config.max_tests]
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


def _program(text: str) -> str:
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


def _tests(truth: Json) -> Iterator[Test]:
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise UserError(f"code: the ground truth is not JSON: {error}") from error
    if not isinstance(truth, dict):
        raise UserError(f"code wants an object of tests as ground truth, got {str(truth)[:80]!r}")
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
        for given, wanted in zip(truth["inputs"], truth["outputs"], strict=True):
            yield (
                _call_test(truth["fn_name"], given, wanted)
                if truth.get("fn_name")
                else _text_test(given, wanted)
            )
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
    return Test({"stdin": text}, lambda output: _same_lines(output, target))


def _call_test(name: str, given: Json, wanted: Json) -> Test:
    arguments = (
        [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    )
    expected = json.loads(wanted) if isinstance(wanted, str) else wanted

    def passes(output: str) -> bool:
        try:
            got = json.loads(output.rstrip().rpartition("\n")[2])
        except (ValueError, RecursionError):
            return False
        # Data sets write a result as itself, or as a list that holds it alone.
        return bool(got == expected or (isinstance(expected, list) and expected == [got]))

    return Test({"call": name, "arguments": arguments}, passes)


def _same_lines(output: str, wanted: str) -> bool:
    """Equal but for white space at the ends of lines and empty lines at the end; numbers may differ by 1e-6."""
    some = [line.split() for line in output.strip().splitlines()]
    others = [line.split() for line in wanted.strip().splitlines()]
    if some == others:
        return True
    return len(some) == len(others) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(some, others, strict=True)
    )


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    try:
        return "." in a + b and abs(float(a) - float(b)) <= 1e-6 * max(1.0, abs(float(b)))
    except ValueError:
        return False


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
