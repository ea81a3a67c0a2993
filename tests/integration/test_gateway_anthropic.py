"""Agents that use Anthropic's client are trained on exactly what the engine sampled for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from meshrl.http.gateway.anthropic import AnthropicTurn
from meshrl.http.gateway.thinking import Kind, ThoughtSplitter, joined
from meshrl.rollout.tokenizer import load_tokenizer
from tests.doubles.scripted import Scripted

from .gateway_agents import leading
from .gateway_mesh import agents_mesh, check_exact

ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def client_of(openai: Any) -> AsyncAnthropic:
    """Anthropic's client at the address of an OpenAI client, whose URL ends with /v1."""
    url = str(openai.base_url).rstrip("/").removesuffix("/v1")
    return AsyncAnthropic(base_url=url, api_key=openai.api_key, max_retries=0)


async def test_turns_streams_and_tool_results_are_one_row_of_what_was_sampled(
    talking_model: Path,
) -> None:
    counted: list[tuple[int, int]] = []

    async def three_turns(openai: Any, task: Any) -> None:
        async with client_of(openai) as client:
            options: Any = {
                "model": "claude",
                "max_tokens": 12,
                "tools": [ADD],
                "system": "be kind",
            }
            messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
            count = await client.messages.count_tokens(
                messages=messages, model="claude", tools=[ADD], system="be kind"
            )
            first = await client.messages.create(messages=messages, **options)
            counted.append((count.input_tokens, first.usage.input_tokens))
            assert first.stop_reason in ("end_turn", "max_tokens") and first.role == "assistant"
            messages.append({"role": "assistant", "content": first.content})
            result = {"type": "tool_result", "tool_use_id": "x", "content": "3"}
            messages.append(
                {"role": "user", "content": [result, {"type": "text", "text": "and 4"}]}
            )
            async with client.messages.stream(messages=messages, **options) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                second = await stream.get_final_message()
            assert "".join(block.text for block in second.content if block.type == "text") == text
            assert second.usage.output_tokens > 0
            messages.append({"role": "assistant", "content": second.content})
            messages.append({"role": "user", "content": "sure?"})
            count = await client.messages.count_tokens(
                messages=messages, model="claude", tools=[ADD], system="be kind"
            )
            third = await client.messages.create(messages=messages, **options)
            counted.append((count.input_tokens, third.usage.input_tokens))

    async with agents_mesh(talking_model, leading(three_turns), tasks=2) as mesh:
        rows = await mesh.rows(2)
        for uid, row in rows.items():
            check_exact(mesh, uid, row)
            assert len([n for n in mesh.engine.deltas if n.startswith(str(uid))]) == 3
            told = mesh.tokenizer.decode_all(row.tokens.tolist())
            assert "be kind" in told and "T:3<eos>" in told and "U:and 4<eos>A:" in told
            assert "U:sure?<eos>A:" in told
    assert all(asked == used for asked, used in counted)


async def test_a_thought_is_a_block_and_comes_back_as_it_was_sampled(talking_model: Path) -> None:
    said = "<think>2 and 2</think> 4"
    blocks: list[Any] = []

    async def two_turns(openai: Any, task: Any) -> None:
        async with client_of(openai) as client:
            options: Any = {"model": "claude", "max_tokens": 64}
            options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            messages: list[Any] = [{"role": "user", "content": "2+2?"}]
            first = await client.messages.create(messages=messages, **options)
            messages.append({"role": "assistant", "content": first.content})
            messages.append({"role": "user", "content": "sure?"})
            async with client.messages.stream(messages=messages, **options) as stream:
                second = await stream.get_final_message()
            blocks.extend([first.content, second.content])

    engine = Scripted(load_tokenizer(talking_model), [said, said], piece=3)
    async with agents_mesh(talking_model, leading(two_turns), engine=engine) as mesh:
        ((_, row),) = (await mesh.rows(1)).items()
        told = mesh.tokenizer.decode_all(row.tokens.tolist())
        assert told.count(said) == 2  # one branch: the first answer was recognised
    for content in blocks:
        thought, text = content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "2 and 2", " 4")


async def test_tool_calls_and_stop_sequences_have_reasons_of_their_own(
    talking_model: Path,
) -> None:
    call = 'one<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    reasons: list[Any] = []

    async def turns(openai: Any, task: Any) -> None:
        async with client_of(openai) as client:
            options: Any = {"model": "claude", "max_tokens": 90, "tools": [ADD]}
            messages: list[Any] = [{"role": "user", "content": "1+1?"}]
            for stream in (False, True):
                if stream:
                    async with client.messages.stream(messages=messages, **options) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await client.messages.create(messages=messages, **options)
                text, use = answer.content
                assert text.type == "text" and text.text == "one"
                assert use.type == "tool_use" and (use.name, use.input) == ("add", {"a": 1})
                reasons.append(answer.stop_reason)
                result = {"type": "tool_result", "tool_use_id": use.id, "content": "2"}
                messages.append({"role": "assistant", "content": answer.content})
                messages.append({"role": "user", "content": [result]})
            last = await client.messages.create(
                messages=messages, stop_sequences=["five"], **options
            )
            reasons.append((last.stop_reason, last.stop_sequence))
            assert last.content[0].type == "text" and last.content[0].text == "four "

    engine = Scripted(load_tokenizer(talking_model), [call, call, "four five six"], piece=3)
    async with agents_mesh(talking_model, leading(turns), engine=engine) as mesh:
        ((_, row),) = (await mesh.rows(1)).items()
        assert mesh.tokenizer.decode_all(row.tokens.tolist()).count(call) == 2
    assert reasons == ["tool_use", "tool_use", ("stop_sequence", "five")]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tool_choice": {"type": "any"}, "tools": [ADD]}, "tool_choice must be auto or none"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"extra_body": {"temperature": 1.5}}, "temperature"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages.0.content",
    ),
]


async def test_a_wrong_request_is_told_in_the_form_of_its_dialect(talking_model: Path) -> None:
    body: Any = {
        "model": "claude",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "x"}],
    }

    async def ask(openai: Any, task: Any) -> float:
        async with client_of(openai) as client:
            for change, said in WRONG:
                with pytest.raises(anthropic.BadRequestError) as refused:
                    await client.messages.create(**{**body, **change})
                error: Any = refused.value.body
                assert error["type"] == "error"
                assert error["error"]["type"] == "invalid_request_error"
                assert said in error["error"]["message"]
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await client.with_options(api_key="mrs_wrong").messages.create(**body)
            wrong: Any = unknown.value.body
            assert wrong["error"]["type"] == "authentication_error"
            await client.messages.create(**body)
        return 1.0

    async with agents_mesh(talking_model, leading(ask)) as mesh:
        ((uid, _),) = (await mesh.rows(1)).items()
        assert mesh.posted(uid).score == 1.0


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("prompt", "answer", "thought", "text"),
    [
        ("A:", "<think>a<b</think>c", "a<b", "c"),
        ("A:<think>\n", "a</th</think>\nc", "a</th", "\nc"),
        ("A:", "no thought, <think>", "", "no thought, <think>"),
        ("A:", "<thin", "", "<thin"),
        ("A:", "<think>cut of", "cut of", ""),
        ("A:", "<think></think>", "", ""),
        ("A:", "", "", ""),
    ],
)
def test_pieces_of_a_thought_and_a_text_are_the_answer_again(
    prompt: str, answer: str, thought: str, text: str, size: int
) -> None:
    split = ThoughtSplitter(prompt, wanted=True)
    parts = [answer[at : at + size] for at in range(0, len(answer), size)]
    pieces = [piece for part in parts for piece in split.feed(part)]
    pieces += split.end()
    found = {kind: "".join(p for k, p in pieces if k is kind) for kind in Kind}
    assert found == {Kind.THOUGHT: thought, Kind.TEXT: text}
    if thought:
        assert joined(thought, text, split.signature) == answer
        block = {"type": "thinking", "thinking": thought, "signature": split.signature}
        turn = AnthropicTurn.model_validate(
            {"role": "assistant", "content": [block, {"type": "text", "text": text}]}
        )
        assert [*turn.messages()] == [{"role": "assistant", "content": answer}]
