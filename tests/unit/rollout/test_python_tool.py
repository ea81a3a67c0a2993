"""The tool `python`: what code may do, what the policy observes, and what becomes of rows when its sandbox ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from meshrl.common.config import read_options
from meshrl.contract.errors import ConfigError, InfraError
from meshrl.contract.types import Outcome, Uid
from meshrl.rollout.programs import tools as program
from meshrl.rollout.tools import python_sandbox
from meshrl.rollout.tools.ports import ToolCall, ToolCaller, ToolsConfig
from meshrl.rollout.tools.toolbox import TaskTools, ToolBuilder
from meshrl.sandbox.interpreters import MAX_OUTPUT, BoundedOutput
from meshrl.sandbox.sandbox import no_bubblewrap
from tests.adversarial import python_tool
from tests.doubles.scripted import END, Scripted, task

from ...waiting import until
from .chats import chat_tokenizer

TOKENIZER = chat_tokenizer()
UIDS = [Uid("run", f"t{index}", 0) for index in range(3)]
needs_bubblewrap = pytest.mark.skipif(no_bubblewrap() is not None, reason=str(no_bubblewrap()))

RUNS = [
    ("x = 6*7\nprint('once')\nx", "once\n42\n"),
    ("x % 5", "2\n"),  # the variables are still there
    ("None", ""),
    ("def f():\n  return 1/0\nf()", "line 2: ZeroDivisionError: division by zero\n"),
    ("(", "SyntaxError: '(' was never closed\n"),
    ("'\\ud800'", "'\\ud800'\n"),
    ("print('\\ud800')", "?\n"),
    ("import sys; sys.exit()", ""),
    ("raise KeyboardInterrupt", "line 1: KeyboardInterrupt\n"),
    ("input()", "EOFError: EOF when reading a line\n"),
    ("print('a' * 10**6)", "...(truncated)...aaa"),
    ("bytearray(1 << 30)", "MemoryError"),
    ("open('/tmp/left', 'w')", "PermissionError"),
    ("import socket; socket.socket()", "PermissionError"),
    ("import subprocess; subprocess.run(['ls'])", "PermissionError"),
    ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    ("import os; os.kill(1, 9)", "PermissionError"),
    ("x", "42\n"),
    (
        "import os; os._exit(3)",
        "Error: the interpreter ended (exit code 3); its variables are lost",
    ),
    ("x", "NameError: name 'x' is not defined\n"),
    ("while True: pass", "Error: timed out after 1 s; its variables are lost"),
    ("import os; os.write(3, b'a\\n')", "Error: it wrote into the pipe of its interpreter"),
    ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
]


def config(*, timeout_s: float = 1, **python: Any) -> ToolsConfig:
    tool = {"python": python, "timeout_s": timeout_s}
    options = {"tools": [tool], "max_result_tokens": 10_000, "cut": "left"}
    return read_options(ToolsConfig, options, where="o")


async def say(tools: TaskTools, uid: Uid, code: Any, name: str = "python") -> str:
    caller = ToolCaller(task=task(TOKENIZER), uid=uid)
    return await tools.call(ToolCall(name=name, arguments={"code": code}), caller, TOKENIZER)


@needs_bubblewrap
async def test_the_policy_observes_what_its_code_does_and_nobody_else_does() -> None:
    builder = ToolBuilder(config())
    tools = (await builder.toolbox()).of(task(TOKENIZER))
    assert tools.stateful
    for code, wanted in RUNS:
        observed = await say(tools, UIDS[0], code)
        assert wanted in observed, code
    assert "want one argument, code" in await say(tools, UIDS[0], 3)
    # Rows run beside each other, each with variables of its own: a late one holds nobody up.
    late = asyncio.create_task(say(tools, UIDS[1], "while True: pass"))
    assert await say(tools, UIDS[2], "y = 1; y") == "1\n"
    assert not late.done() and "timed out" in await late
    # A row that is done leaves nothing.
    builder.release(UIDS[2])
    assert "NameError" in await say(tools, UIDS[2], "y")
    await builder.close()


MEMORY = """
import ctypes
shifted = [text.encode() for text in {shifted!r}]
table = bytes((byte + 1) % 256 for byte in range(256))
found, seen = set(), 0
for line in open("/proc/self/maps"):
    span, rights = line.split()[:2]
    start, end = (int(part, 16) for part in span.split("-"))
    if rights.startswith("rw") and "[v" not in line:
        data = ctypes.string_at(start, end - start).translate(table)
        seen += len(data)
        found.update(text for text in shifted if text in data)
len(found), seen > 1_000_000
"""
"""Looks through all memory that its process can write for texts whose letters are given one letter further on."""


@needs_bubblewrap
async def test_a_row_finds_nothing_of_another_one_in_its_memory() -> None:
    """Whatever interpreters are forked from has never seen a request: it would be a way to copy answers."""
    builder = ToolBuilder(config(timeout_s=60))
    tools = (await builder.toolbox()).of(task(TOKENIZER))
    code, output = "the-code-of-another-row", "the-output-of-another-row"
    told = await say(tools, UIDS[0], f"kept = {code!r}; print('{output[:9]}' + '{output[9:]}')")
    assert told == f"{output}\n"

    def looking_for(*texts: str) -> str:
        shifted = ["".join(chr(ord(letter) + 1) for letter in text) for text in texts]
        return MEMORY.format(shifted=shifted)

    look = looking_for(code, output, str(UIDS[0]), '"episode"')
    assert await say(tools, UIDS[1], look) == "(0, True)\n"
    assert await say(tools, UIDS[0], looking_for(code)) == "(1, True)\n", "it would find it"
    await builder.close()


@needs_bubblewrap
async def test_a_row_that_leaves_its_pipe_and_goes_on_holds_nobody_up() -> None:
    builder = ToolBuilder(config())
    tools = (await builder.toolbox()).of(task(TOKENIZER))
    told = await say(tools, UIDS[0], "import os\nos.close(3)\nwhile True: pass")
    assert "its variables are lost" in told
    assert await say(tools, UIDS[1], "1") == "1\n"
    await builder.close()


@needs_bubblewrap
async def test_a_sandbox_that_ends_fails_the_rows_that_have_variables_in_it_and_is_replaced() -> (
    None
):
    builder = ToolBuilder(config())
    tools = (await builder.toolbox()).of(task(TOKENIZER))
    (sandbox,) = builder._sandboxes
    await say(tools, UIDS[0], "x = 1")
    running = asyncio.create_task(say(tools, UIDS[1], "import time; time.sleep(60)"))
    await until(lambda: sandbox._answers)
    assert sandbox._process is not None
    os.killpg(sandbox._process.pid, signal.SIGKILL)
    with pytest.raises(InfraError, match="ended with exit code"):
        await running
    assert await say(tools, UIDS[2], "1") == "1\n"  # in a new one
    with pytest.raises(InfraError, match="variables ended"):
        await say(tools, UIDS[0], "x")
    builder.release(UIDS[0])  # it is delivered again
    assert await say(tools, UIDS[0], "2") == "2\n"
    # One that has stopped answers nothing: it is ended.
    (offer,) = tools._offers.values()
    with pytest.raises(InfraError, match="did not answer"):
        await offer.tool.check(ToolCaller(task=task(TOKENIZER), uid=UIDS[0]))
    assert sandbox._process is None
    await builder.close()


@needs_bubblewrap
async def test_a_module_that_cannot_be_imported_is_named() -> None:
    builder = ToolBuilder(config(imports=["math", "nothing_of_this_name"]))
    tools = (await builder.toolbox()).of(task(TOKENIZER))
    with pytest.raises(ConfigError, match="No module named 'nothing_of_this_name'"):
        await say(tools, UIDS[0], "1")
    await builder.close()


async def test_without_bubblewrap_there_is_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_sandbox, "no_bubblewrap", lambda: "there is no bwrap on PATH")
    tools = (await ToolBuilder(config()).toolbox()).of(task(TOKENIZER))
    with pytest.raises(ConfigError, match="needs bubblewrap: there is no bwrap"):
        await say(tools, UIDS[0], "1")


@needs_bubblewrap
@pytest.mark.parametrize("only", ["kills", "closes every file", "answers for", "environment"])
async def test_hostile_code_harms_its_own_row_at_most(only: str) -> None:
    """`python -m tests.adversarial --level python` runs all."""
    faults = await python_tool.run(only)
    assert faults and not any(faults.values()), faults


@needs_bubblewrap
async def test_results_are_not_trained_on_and_end_in_the_row() -> None:
    turns: Sequence[str] = [f"```python\nx = 6*7\nx\n```{END}", f"```python\nx % 5\n```{END}"]
    policy = Scripted(TOKENIZER, [*turns, f"#2{END}"])
    built = program.build({"tools": [{"python": {}}], "format": "python_fence"})
    rollout = await built(task(TOKENIZER), UIDS[0], policy, TOKENIZER)
    await built.aclose()
    row = rollout.trajectory
    assert policy.text(row.tokens[row.loss_mask.astype(bool)]) == "".join([*turns, f"#2{END}"])
    assert [each["content"] for each in rollout.messages if each["role"] == "tool"] == [
        "42\n",
        "2\n",
    ]
    assert rollout.outcome is Outcome.OK


def test_long_output_keeps_its_ends_however_it_is_printed() -> None:
    for size in (1000, MAX_OUTPUT, 10 * MAX_OUTPUT):
        output, text = BoundedOutput(), "".join(map(str, range(MAX_OUTPUT)))
        for start in range(0, len(text), size):
            assert output.write(text[start : start + size]) == len(text[start : start + size])
        head, mark, tail = output.text().split("\n")
        assert head == text[: MAX_OUTPUT // 2] and tail == text[-MAX_OUTPUT // 2 :]
        assert mark == f"... {len(text) - MAX_OUTPUT} characters ..."
