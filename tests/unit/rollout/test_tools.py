"""Tools: how calls are written, which schema a function has, what becomes of errors, time and long results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from mcp.client import stdio
from mcp_types import CallToolResult

from meshrl.common.config import read_options
from meshrl.contract.errors import ConfigError, InfraError, UserError
from meshrl.contract.types import Uid
from meshrl.rollout.tools.formats import hermes, llama3_json, python_fence
from meshrl.rollout.tools.functions import FunctionTool, as_text
from meshrl.rollout.tools.mcp_servers import text_of
from meshrl.rollout.tools.ports import ToolCall, ToolCaller, ToolConfig, ToolsConfig
from meshrl.rollout.tools.toolbox import GAP, Cut, TaskTools, ToolBuilder
from tests.doubles.scripted import task

from . import some_tools
from .chats import chat_tokenizer

HERE = "tests.unit.rollout.some_tools"
TOKENIZER = chat_tokenizer()
UID = Uid("run", "t0", 0)


def caller(**extra_info: Any) -> ToolCaller:
    return ToolCaller(task=task(TOKENIZER, extra_info=extra_info), uid=UID)


async def tools_of(
    *tools: Any, extra_info: Mapping[str, Any] | None = None, **options: Any
) -> TaskTools:
    given = [each if isinstance(each, dict) else f"{HERE}.{each}" for each in tools]
    for each in given:
        if isinstance(each, dict):
            each["function"] = f"{HERE}.{each['function']}"
    config = read_options(ToolsConfig, {"tools": given} | options, where="o")
    return (await ToolBuilder(config).toolbox()).of(task(TOKENIZER, extra_info=extra_info or {}))


async def said(tools: TaskTools, name: str, **arguments: Any) -> str:
    return await tools.call(ToolCall(name=name, arguments=arguments), caller(), TOKENIZER)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 42.", []),
        (
            'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>',
            [ToolCall(name="add", arguments={"a": 1})],
        ),
        (
            '<tool_call>{"name": "a"}</tool_call> <tool_call>{"name": "b", "arguments": "{\\"x\\": 2}"}</tool_call>',
            [ToolCall(name="a"), ToolCall(name="b", arguments={"x": 2})],
        ),
        ('<tool_call>{"name": "add", "arguments": {}}', [ToolCall(name="add")]),
    ],
)
def test_hermes_calls_are_found(text: str, calls: list[ToolCall]) -> None:
    assert hermes.parse(text) == calls


@pytest.mark.parametrize("written", ["null", '""', '" "', "{}", '"{}"'])
def test_no_arguments_may_be_written_in_several_ways(written: str) -> None:
    call = f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'
    assert hermes.parse(call) == [ToolCall(name="now")]
    assert llama3_json.parse(f'{{"name": "now", "parameters": {written}}}') == [
        ToolCall(name="now")
    ]


def test_a_call_in_the_form_of_openai_is_the_one_in_it() -> None:
    wrapped = '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}'
    assert hermes.parse(f"<tool_call>{wrapped}</tool_call>") == [
        ToolCall(name="add", arguments={"a": 1})
    ]
    assert llama3_json.parse(wrapped) == [ToolCall(name="add", arguments={"a": 1})]
    assert llama3_json.parse('{"function": {"x": 1}}') == []  # an answer that is JSON


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "[[NaN]]"])
def test_numbers_that_json_has_not_make_a_call_invalid(number: str) -> None:
    for written in (f'{{"x": {number}}}', f'"{{\\"x\\": {number}}}"'):
        (call,) = hermes.parse(f'<tool_call>{{"name": "a", "arguments": {written}}}</tool_call>')
        assert (call.name, call.arguments) == ("a", {})
        assert "which JSON has not" in call.problem


def test_half_a_surrogate_pair_in_a_call_is_replaced() -> None:
    text = '{"name": "a\\ud83d", "arguments": {"\\udce9": ["\\ud83d\\ude00 \\ud83d"]}}'
    assert hermes.parse(f"<tool_call>{text}</tool_call>") == [
        ToolCall(name="a\ufffd", arguments={"\ufffd": ["\U0001f600 \ufffd"]})
    ]


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ('{"name": "add", ', "not JSON"),
        ('["add"]', "an object with `name`"),
        ('{"arguments": {}}', "an object with `name`"),
        ('{"name": 3}', "an object with `name`"),
        ('{"name": "add", "arguments": [1]}', "must be an object"),
        ('{"name": "add", "arguments": "{"}', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_invalid_call_says_why(inside: str, problem: str) -> None:
    (call,) = hermes.parse(f"<tool_call>{inside}</tool_call>")
    assert problem in call.problem


def test_llama_calls_are_the_whole_turn() -> None:
    both = '<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}<|eom_id|>'
    assert llama3_json.parse(both) == [
        ToolCall(name="a", arguments={"x": 1}),
        ToolCall(name="b"),
    ]
    assert llama3_json.parse('It is {"name": "a"}') == []
    assert llama3_json.parse('{"answer": 42}') == []
    (broken,) = llama3_json.parse('{"name": "a", "parameters": {')
    assert "not JSON" in broken.problem


def test_fenced_python_is_a_call() -> None:
    text = "First:\n```python\nprint(1)\n```\nthen\n```py\nprint(2)\n```\nand ```python\nno end"
    codes = [call.arguments["code"] for call in python_fence.parse(text)]
    assert codes == ["print(1)\n", "print(2)\n"]


def test_a_function_describes_itself() -> None:
    tool = FunctionTool(some_tools.add)
    assert (tool.name, tool.description) == ("add", "Add two numbers. They may be negative.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "default": 1, "description": "The second, if there is one."},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


async def test_parameter_names_that_pydantic_reserves_work() -> None:
    tool = FunctionTool(some_tools.odd)
    found = await tool.call({"json": "{}", "model_config": "y", "_hidden": 2}, caller())
    assert found == '{"json": "{}", "model_config": "y", "_hidden": 2}'
    assert set(tool.parameters["properties"]) == {"json", "model_config", "_hidden"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("untyped", "a has no type hint"),
        ("many", "has no schema; want named parameters"),
        ("strange", "no schema for its parameters"),
    ],
)
def test_a_function_without_a_schema_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"tool {name}: .*{problem}"):
        FunctionTool(getattr(some_tools, name))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": []}, "at least 1 item"),
        (
            {"tools": [{"name": "x"}]},
            "exactly one of function, command, url, python and search, got none of them",
        ),
        ({"tools": [{"url": "http://x", "command": ["y"]}]}, "got command and url"),
        ({"tools": ["a.b"], "max_turn": 3}, "did you mean 'max_turns'"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_options(ToolsConfig, options, where="rollout.program_options")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere.add", "cannot import 'nowhere.add'"),
        (f"{HERE}.subtract", "'subtract' is not there in tests.unit"),
        (f"{HERE}.not_a_function", "'not_a_function' is not a function in tests.unit"),
        (
            "add",
            "'add' names no function; want package.module.function or path/to/file.py:function",
        ),
        ("nowhere.py:add", "cannot import 'nowhere.py:add': FileNotFoundError: no such file"),
    ],
)
def test_a_function_that_is_not_there_is_named_with_its_key(path: str, problem: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^rollout.program_options.tools.0.function: .*{problem}"
    ):
        ToolBuilder(ToolsConfig(tools=[ToolConfig(function=path)]))


async def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        await tools_of("add", {"function": "slow_add", "name": "add"})


async def test_a_result_is_text() -> None:
    tools = await tools_of("add", "slow_add")
    assert await said(tools, "add", a=1) == "2"
    assert await said(tools, "slow_add", a=1, b=3) == "4"
    assert [as_text(each) for each in ("é", None, ["é"], {1})] == ["é", "", '["é"]', "{1}"]


@pytest.mark.parametrize(
    ("name", "arguments", "observation"),
    [
        ("add", {"a": "many"}, "Error: add: argument a: Input should be a valid integer"),
        ("add", {}, "Error: add: argument a: Field required"),
        ("add", {"a": 1, "c": 2}, "Error: add: argument c: Extra inputs are not permitted"),
        ("subtract", {}, "Error: no tool 'subtract'; there are add, fail"),
        ("fail", {"how": "badly"}, "Error: ValueError: badly"),
        ("fail", {"how": "exit"}, "Error: RuntimeError: SystemExit: 3"),
        ("fail", {"how": "stop"}, "Error: RuntimeError: StopIteration"),
        ("fail", {"how": "timeout"}, "Error: the other side is slow"),
    ],
)
async def test_what_the_policy_or_the_tool_does_wrong_is_an_observation(
    name: str, arguments: dict[str, Any], observation: str
) -> None:
    tools = await tools_of("add", "fail")
    assert (await said(tools, name, **arguments)).startswith(observation)


async def test_a_hanging_call_is_observed_and_too_many_of_them_break_the_tool() -> None:
    some_tools.hanging.clear()
    quick = {"function": "wait", "timeout_s": 0.01, "concurrency": 2}
    tools = await tools_of(quick, {"function": "wait_for_ever", "timeout_s": 0.01})
    late = "Error: wait timed out after 0.01 s"
    assert [await said(tools, "wait") for _ in range(2)] == [late, late]
    with pytest.raises(InfraError, match="tool wait: 2 calls never returned"):
        await said(tools, "wait")
    assert "timed out" in await said(tools, "wait_for_ever")
    some_tools.hanging.set()  # they come back after all, and the tool is a tool again
    async with asyncio.timeout(120):
        while True:
            try:
                found = await said(tools, "wait")
            except InfraError:
                await asyncio.sleep(0.01)
            else:
                break
    assert found == "at last" or "timed out" in found


async def test_no_more_calls_at_once_than_a_tool_allows() -> None:
    running = most = 0

    async def busy() -> str:
        """Count."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return "done"

    some_tools.busy = busy  # type: ignore[attr-defined]
    tools = await tools_of({"function": "busy", "concurrency": 3})
    assert await asyncio.gather(*(said(tools, "busy") for _ in range(10))) == ["done"] * 10
    assert most == 3


async def test_a_task_selects_tools_and_adds_hidden_arguments() -> None:
    kwargs = {"who": {"execute_kwargs": {"secret": "x"}}}
    extra = {"tool_selection": ["who"], "tools_kwargs": kwargs}
    tools = await tools_of("add", "who", extra_info=extra)
    (schema,) = tools.schemas()
    assert schema["type"] == "function" and schema["function"]["name"] == "who"
    assert list(schema["function"]["parameters"]["properties"]) == ["guess"]
    assert await said(tools, "who", guess="x") == "run/t0/0.0 t0 True"
    assert await said(tools, "who", guess="x", secret="y") == "run/t0/0.0 t0 True"
    assert "no tool 'add'" in await said(tools, "add", a=1)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"tool_selection": ["divide"]}, "task t0: no tool 'divide' \\(known: add\\)"),
        ({"tools_kwargs": {"divide": {}}}, "task t0: no tool 'divide'"),
        ({"tools_kwargs": {"add": 3}}, "tools_kwargs.add is 3, want an object"),
    ],
)
async def test_a_task_with_unknown_tools_is_named(extra: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        await tools_of("add", extra_info=extra)


@pytest.mark.parametrize("side", ["left", "middle", "right"])
@pytest.mark.parametrize("length", [1, 39, 40, 41, 500, 3_000_000])
def test_a_long_result_is_cut_to_its_budget(side: Any, length: int) -> None:
    text = ("0123456789" * (length // 10 + 1))[:length]
    found = Cut(tokens=40, side=side)(text, TOKENIZER)
    assert len(TOKENIZER.encode(found)) <= 40
    if length <= 40:
        assert found == text
        return
    before, gap, after = found.partition(GAP)
    assert gap and text.startswith(before) and text.endswith(after)
    assert (bool(before), bool(after)) == {
        "left": (False, True),
        "middle": (True, True),
        "right": (True, False),
    }[side]
    assert len(before + after) >= 20


def test_a_budget_smaller_than_the_mark_gives_an_empty_result() -> None:
    assert Cut(tokens=3)("0123456789", TOKENIZER) == ""


async def test_results_and_errors_are_cut_alike() -> None:
    tools = await tools_of("long", "fail", max_result_tokens=30)
    assert GAP in await said(tools, "long", n=100_000)
    assert GAP in await said(tools, "fail", how="x" * 1000)
    assert GAP in await said(tools, "y" * 1000)


@pytest.mark.parametrize("name", ["scraped", "listed", "written", "raised"])
async def test_half_a_surrogate_pair_in_what_a_tool_returns_is_replaced(name: str) -> None:
    text = await said(await tools_of(name), name, x="a")
    assert "\ufffd" in text
    text.encode()


async def test_a_description_with_half_a_surrogate_pair_can_be_shown() -> None:
    ids = TOKENIZER.encode("a \ud835 b")
    assert ids == TOKENIZER.encode("a \ufffd b")


FILE = {"uri": "file:///a.txt", "mimeType": "text/plain"}


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": ""}], ""),
        ([{"type": "resource", "resource": {**FILE, "text": "of the file"}}], "of the file"),
        ([{"type": "resource", "resource": {**FILE, "text": ""}}], ""),
        ([{"type": "resource", "resource": {**FILE, "blob": "aGk="}}], "[resource file:///a.txt]"),
        (
            [{"type": "resource_link", "uri": "file:///a.txt", "name": "a"}],
            "[resource_link a: file:///a.txt]",
        ),
        ([{"type": "image", "data": "aGk=", "mimeType": "image/png"}], "[image]"),
        ([{"type": "audio", "data": "aGk=", "mimeType": "audio/wav"}], "[audio]"),
        ([], ""),
    ],
)
def test_a_result_is_the_texts_in_it(parts: list[dict[str, Any]], text: str) -> None:
    assert text_of(CallToolResult.model_validate({"content": parts})) == text


def test_structured_content_is_shown_where_there_is_nothing_else() -> None:
    result = {"content": [], "structuredContent": {"answer": 42}}
    assert text_of(CallToolResult.model_validate(result)) == '{"answer": 42}'


def test_noise_on_stdout_of_a_server_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(stdio._parse_line("Server started on stdio"), Exception)
    (record,) = caplog.records
    assert record.exc_info is None
    assert "\n" not in record.getMessage() and "Server started on stdio" in record.getMessage()
