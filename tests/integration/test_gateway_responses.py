"""Agents that use OpenAI's Responses are trained on exactly what the engine sampled for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from meshrl.rollout.tokenizer import load_tokenizer
from tests.doubles.scripted import Scripted

from .gateway_agents import leading
from .gateway_mesh import agents_mesh, check_exact

ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Applies a patch."}


async def test_turns_streams_and_results_are_one_row_of_what_was_sampled(
    talking_model: Path,
) -> None:
    async def turns(client: AsyncOpenAI, task: Any) -> None:
        options: Any = {"model": "m", "max_output_tokens": 12, "tools": [ADD]}
        told: list[Any] = [{"role": "user", "content": task["prompt"]}]
        first = await client.responses.create(input=told, instructions="be kind", **options)
        assert first.status in ("completed", "incomplete") and first.usage
        told += [item.model_dump() for item in first.output]
        told.append({"type": "function_call_output", "call_id": "x", "output": "3"})
        text, numbers, second = "", [], None
        stream = await client.responses.create(
            input=told, instructions="be kind", stream=True, **options
        )
        async for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type in ("response.completed", "response.incomplete"):
                second = event.response
        assert numbers == [*range(len(numbers))]
        assert second and second.output_text == text
        assert second.usage and second.usage.output_tokens > 0
        third = await client.responses.create(
            input="sure?", previous_response_id=second.id, instructions="be kind", **options
        )
        assert third.previous_response_id == second.id

    async with agents_mesh(talking_model, leading(turns), tasks=2) as mesh:
        rows = await mesh.rows(2)
        for uid, row in rows.items():
            check_exact(mesh, uid, row)
            assert len([n for n in mesh.engine.deltas if n.startswith(str(uid))]) == 3
            told = mesh.tokenizer.decode_all(row.tokens.tolist())
            assert "be kind" in told and "T:3<eos>A:" in told and "U:sure?<eos>A:" in told


async def test_thoughts_calls_and_custom_tools_are_items_that_come_back(
    talking_model: Path,
) -> None:
    said = [
        '<think>2 and 2</think>one<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "patch", "arguments": {"input": "+1"}}</tool_call>',
        "four",
    ]
    kinds: list[list[str]] = []

    async def turns(client: AsyncOpenAI, task: Any) -> None:
        told: list[Any] = [{"role": "user", "content": "1+1?"}]
        options: Any = {"model": "m", "tools": [ADD, PATCH, {"type": "web_search"}]}
        options |= {"reasoning": {"effort": "low"}, "max_output_tokens": 90}
        for streamed in (True, False, True):
            if streamed:
                async with client.responses.stream(input=told, **options) as stream:
                    async for _ in stream:
                        pass
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(input=told, **options)
            kinds.append([item.type for item in answer.output])
            for item in answer.output:
                told.append(item.model_dump())
                if item.type == "function_call":
                    assert (item.name, item.arguments) == ("add", '{"a": 1}')
                    result = {"call_id": item.call_id, "output": "2"}
                    told.append({"type": "function_call_output", **result})
                if item.type == "custom_tool_call":
                    assert (item.name, item.input) == ("patch", "+1")
                    result = {"call_id": item.call_id, "output": "done"}
                    told.append({"type": "custom_tool_call_output", **result})

    engine = Scripted(load_tokenizer(talking_model), said, piece=3)
    async with agents_mesh(talking_model, leading(turns), engine=engine) as mesh:
        ((_, row),) = (await mesh.rows(1)).items()
        told = mesh.tokenizer.decode_all(row.tokens.tolist())
        assert all(text in told for text in said)  # one branch: each answer was recognised
    assert kinds == [
        ["reasoning", "message", "function_call"],
        ["custom_tool_call"],
        ["message"],
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"background": True}, "background"),
    ({"text": {"format": {"type": "json_object"}}}, "text"),
]


async def test_a_wrong_request_names_its_field(talking_model: Path) -> None:
    async def ask(client: AsyncOpenAI, task: Any) -> float:
        for change, param in WRONG:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**{"model": "m", "input": "x", **change})
            assert param in str(refused.value.param), refused.value
        with pytest.raises(openai.NotFoundError, match="no answer of this session"):
            await client.responses.create(model="m", input="x", previous_response_id="resp_1")
        await client.responses.create(model="m", input="x", max_output_tokens=4)
        return 1.0

    async with agents_mesh(talking_model, leading(ask)) as mesh:
        ((uid, _),) = (await mesh.rows(1)).items()
        assert mesh.posted(uid).score == 1.0
