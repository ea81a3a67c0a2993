"""The program `tools`: turns and results in one row, and every way in which it ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshrl.common import tracing
from meshrl.contract.errors import ConfigError, InfraError
from meshrl.contract.types import Outcome, Uid
from meshrl.rollout.ports import Rollout
from meshrl.rollout.programs import tools as program
from meshrl.rollout.tokenizer import HuggingFaceTokenizer
from tests.doubles.scripted import END, Scripted, task

from .chats import PLAIN, chat_tokenizer

HERE = "tests.unit.rollout.some_tools"
UID = Uid("run", "t0", 0)
ANSWER = f"It is 3.{END}"


def call(name: str, arguments: str = "{}", end: str = END) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>{end}'


ADD = call("add", '{"a": 1, "b": 2}')


async def run(
    turns: Sequence[str | Callable[[str], str]],
    *tools: str,
    tokenizer: HuggingFaceTokenizer | None = None,
    max_tokens: int = 500,
    extra_info: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Rollout, Scripted, str]:
    """The row, the policy, and the text of the row."""
    tokenizer = tokenizer or chat_tokenizer()
    policy = Scripted(tokenizer, turns)
    names = [f"{HERE}.{name}" for name in tools or ("add",)]
    built = program.build({"tools": names} | options)
    tools_task = task(tokenizer, max_tokens=max_tokens, extra_info=extra_info or {})
    rollout = await built(tools_task, UID, policy, tokenizer)
    await built.aclose()
    return rollout, policy, policy.text(rollout.trajectory.tokens)


def sampled(rollout: Rollout, policy: Scripted) -> str:
    row = rollout.trajectory
    return policy.text(row.tokens[row.loss_mask.astype(bool)])


async def test_the_policy_calls_reads_and_answers() -> None:
    rollout, policy, text = await run([ADD, ANSWER])
    prompt = policy.text(policy.requests[0].prompt_ids)
    assert prompt.startswith("<|start|>system\n[{")
    assert '"name": "add"' in prompt and prompt.endswith("6*7?<|end|>\n<|start|>assistant\n")
    observed = "\n<|start|>tool\n3<|end|>\n<|start|>assistant\n"
    assert text == prompt + ADD + observed + ANSWER
    assert sampled(rollout, policy) == ADD + ANSWER
    row = rollout.trajectory
    assert row.response_text.endswith("tool\n3\nassistant\nIt is 3.")
    assert (row.rollout_logprobs == -0.5 * row.loss_mask).all()
    covered = [i for span in row.spans for i in range(span.start, span.end)]
    assert covered == row.loss_mask.nonzero()[0].tolist()
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.OK, "stop")
    assert len({request.request_id for request in policy.requests}) == 2
    asked, observation, answer = rollout.messages
    assert (asked["role"], asked["tool_calls"][0]["name"]) == ("assistant", "add")
    assert observation == {"role": "tool", "name": "add", "content": "3"}
    assert answer == {"role": "assistant", "content": "It is 3."}


async def test_the_trace_of_a_row_has_its_turns_and_its_tool_calls(tmp_path: Path) -> None:
    tracing.start(tmp_path, "rollout-0", 1.0)
    with tracing.row_span("rollout", UID):
        await run([ADD, ANSWER])
    tracing.stop()
    lines = (tmp_path / "rollout-0.jsonl").read_text().splitlines()
    *inner, row = map(json.loads, lines)
    assert [one["name"] for one in inner] == ["generate", "tool", "generate"]
    assert {one["parent"] for one in inner} == {row["span"]}
    first, tool, last = (one["attributes"] for one in inner)
    assert (first["turn"], last["turn"], last["finish_reason"]) == (0, 1, "stop")
    assert tool["tool"].endswith("add") and last["tokens"] > 0


async def test_an_answer_without_a_call_is_a_row_of_one_turn() -> None:
    rollout, policy, text = await run([ANSWER])
    assert text.endswith(ANSWER) and len(policy.requests) == 1
    assert rollout.outcome is Outcome.OK


async def test_a_prompt_that_came_as_text_is_not_changed() -> None:
    from dataclasses import replace

    tokenizer = chat_tokenizer(PLAIN)
    policy = Scripted(tokenizer, [ADD, ANSWER])
    tools_task = replace(task(tokenizer), messages=())
    built = program.build({"tools": [f"{HERE}.add"]})
    rollout = await built(tools_task, UID, policy, tokenizer)
    assert (
        rollout.trajectory.tokens[: len(tools_task.prompt_ids)].tolist()
        == tools_task.prompt_ids.tolist()
    )
    assert policy.text(rollout.trajectory.tokens).endswith(f"{ADD}\ntool: 3\nassistant: {ANSWER}")


async def test_a_template_that_does_not_show_tools_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        await run([ADD, ANSWER], tokenizer=chat_tokenizer(PLAIN))
        await run([ADD, ANSWER])
    assert [record.message for record in caplog.records] == [
        "the chat template does not show the policy its tools"
    ]


async def test_wrong_calls_are_observed_and_may_be_corrected() -> None:
    turns = [
        call("subtract"),
        "<tool_call>{</tool_call>" + END,
        call("add", '{"a": []}'),
        ADD,
        ANSWER,
    ]
    rollout, _, text = await run(turns)
    for problem in ("no tool 'subtract'", "not JSON", "a valid integer", "tool\n3<"):
        assert problem in text
    assert rollout.outcome is Outcome.OK


async def test_several_calls_of_one_turn_are_answered_in_order() -> None:
    both = (
        call("add", '{"a": 1}', "")
        + call("slow_add", '{"a": 2, "b": 3}', "")
        + call("add", '{"a": 7}')
    )
    _, _, text = await run([both, ANSWER], "add", "slow_add", max_calls=2)
    want = "tool\n2<|end|>\n<|start|>tool\n5<|end|>\n<|start|>tool\nError: more than 2 calls in one turn"
    assert want in text


async def test_a_stop_string_ends_a_turn_that_the_policy_does_not_end() -> None:
    bare = call("add", '{"a": 1}', "")
    _, policy, text = await run([bare, ANSWER], stop=["</tool_call>"])
    assert policy.requests[0].sampling.stop == ("</tool_call>",)
    assert bare + "<|end|>\n<|start|>tool\n2" in text


@pytest.mark.parametrize(
    ("options", "turns", "reason"),
    [
        ({"max_turns": 2}, [ADD] * 3, "max_turns"),
        ({"max_tokens": 20}, [ADD] * 3, "length"),
        ({"max_tokens": 80}, [ADD] * 3, "length"),
        ({"max_turn_tokens": 10}, [ADD] * 3, "length"),
    ],
    ids=["turns", "first turn", "observation", "one turn"],
)
async def test_a_budget_ends_a_row_as_truncated(
    options: dict[str, Any], turns: list[str], reason: str
) -> None:
    rollout, policy, _ = await run(turns, **options)
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.TRUNCATED, reason)
    row = rollout.trajectory
    assert row.loss_mask[-1] == 1  # nothing is observed that nobody answers
    prompt = len(policy.requests[0].prompt_ids)
    assert len(row.tokens) - prompt <= options.get("max_tokens", 500)


async def test_results_take_no_more_than_their_tokens() -> None:
    _, _, text = await run([call("long", '{"n": 1000000}'), ANSWER], "long", max_result_tokens=40)
    observed = text.partition("tool\n")[2].partition(END)[0]
    assert "truncated" in observed and len(chat_tokenizer().encode(observed)) == 40


async def test_an_infrastructure_fault_is_no_observation() -> None:
    both = call("add", '{"a": 1}', "") + call("fail", '{"how": "infra"}')
    with pytest.raises(InfraError, match="the disk is gone"):
        await run([both, ANSWER], "add", "fail")


async def test_other_formats_of_calls() -> None:
    fenced = f"```python\nprint(42)\n```{END}"
    _, _, text = await run([fenced, ANSWER], "python", format="python_fence", role="user")
    assert "<|start|>user\nread 'print(42)\\n'<|end|>" in text


def test_an_unknown_format_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no formats? named 'hermse'; did you mean 'hermes'"):
        program.build({"tools": [f"{HERE}.add"], "format": "hermse"})
