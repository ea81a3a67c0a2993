"""Unmodified agents that use the official client are trained on exactly what the engine sampled for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from meshrl.contract.types import OnUpdate, Version

from ..unit.rollout.checkpoints import pack
from .gateway_agents import AGENT, BLOCKING, leading
from .gateway_mesh import FIRST, RUN, Mesh, agents_mesh, check_exact

ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


async def test_turns_streams_and_tool_results_are_one_row_of_what_was_sampled(
    talking_model: Path,
) -> None:
    async def three_turns(client: AsyncOpenAI, task: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        options: Any = {"model": "any", "max_tokens": 12, "tools": [ADD]}
        first = await client.chat.completions.create(messages=messages, **options)
        messages.append(first.choices[0].message.model_dump())
        messages.append({"role": "tool", "tool_call_id": "x", "content": "3"})
        text, reasons = "", []
        stream = await client.chat.completions.create(messages=messages, stream=True, **options)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
        assert reasons[-1] in ("stop", "length") and not any(reasons[:-1])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
        await client.chat.completions.create(messages=messages, **options)

    options = leading(three_turns)
    async with agents_mesh(talking_model, options, tasks=3, group_size=2) as mesh:
        rows = await mesh.rows(3)
        assert len(rows) == 6
        for uid, row in rows.items():
            check_exact(mesh, uid, row)
            assert len([n for n in mesh.engine.deltas if n.startswith(str(uid))]) == 3
            answer = mesh.tokenizer.decode_all(row.tokens.tolist())
            assert (
                answer.startswith("[add]U:")
                and "T:3<eos>A:" in answer
                and "U:sure?<eos>A:" in answer
            )
            assert mesh.posted(uid) is None
        # Groups draw for themselves.
        assert len({row.tokens.tobytes() for row in rows.values()}) == 6


async def test_log_probs_and_usage_are_those_of_the_row(talking_model: Path) -> None:
    sampled: list[float] = []
    texts: list[str] = []

    async def ask(client: AsyncOpenAI, task: Any) -> None:
        answer = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], logprobs=True, max_tokens=9
        )
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.content and answer.usage
        sampled.extend(token.logprob for token in answer.choices[0].logprobs.content)
        assert answer.usage.completion_tokens == len(sampled)
        texts.append(answer.choices[0].message.content or "")
        stream = await client.completions.create(
            model="m",
            prompt="y",
            logprobs=1,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        counted = None
        values: list[float] = []
        async for chunk in stream:
            if chunk.usage:
                counted = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.logprobs:
                    values.extend(choice.logprobs.token_logprobs or [])
        assert counted == len(values)

    async with agents_mesh(talking_model, {**leading(ask), "branch": "longest"}) as mesh:
        await mesh.rows(1)
        deltas = mesh.engine.deltas[f"{RUN}/t0/0.0"]
        assert sampled == [float(value) for delta in deltas for value in delta.logprobs]
        assert texts == [mesh.tokenizer.decode([t for d in deltas for t in d.tokens.tolist()])]


async def test_what_a_prompt_says_is_what_transformers_says(talking_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(talking_model)
    found: list[Any] = []

    async def ask(client: AsyncOpenAI, task: Any) -> None:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        wish: Any = {"model": "m", "extra_body": {"prompt_logprobs": 2}}
        found.append((await client.chat.completions.create(**chat, **wish)).model_dump())
        text: Any = {"prompt": "who?", "max_tokens": 3, "logprobs": 1, "echo": True}
        found.append((await client.completions.create(**text, **wish)).model_dump())

    async with agents_mesh(talking_model, {**leading(ask), "branch": "longest"}) as mesh:
        await mesh.rows(1)
        chat, text = found
        prompt = mesh.tokenizer.encode("who?")
        values = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    choice = text["choices"][0]
    assert choice["text"].startswith("who?") and "prompt_logprobs" not in text
    none, *echoed = choice["logprobs"]["token_logprobs"][: len(prompt)]
    own = [row[token].item() for row, token in zip(values, prompt[1:], strict=True)]
    assert none is None and echoed == pytest.approx(own, abs=1e-4)
    assert len(choice["logprobs"]["token_logprobs"]) == text["usage"]["total_tokens"]
    first, *places = choice["prompt_logprobs"]
    assert first is None and len(places) == len(own)
    for place, row, token, value in zip(places, values, prompt[1:], own, strict=True):
        assert place[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
        best = place[str(int(row.argmax()))]
        assert best["rank"] == 1 and best["logprob"] == pytest.approx(row.max().item(), abs=1e-4)
        assert len(place) in (2, 3)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_an_agent_that_forgets_is_one_row_of_the_queue_with_a_part_for_each_step(
    talking_model: Path,
) -> None:
    async def windowed(client: AsyncOpenAI, task: Any) -> None:
        text = "nothing"
        for _ in range(3):
            seen: list[Any] = [{"role": "user", "content": f"last: {text}"}]
            asked = client.chat.completions.create(model="m", messages=seen, max_tokens=8)
            text = (await asked).choices[0].message.content or ""

    options = {**leading(windowed), "branch": "each"}
    async with agents_mesh(talking_model, options, tasks=2, group_size=2) as mesh:
        rows = await mesh.rows(2)
        assert len(rows) == 4
        for uid, row in rows.items():
            check_exact(mesh, uid, row)
            starts = [part.start for part in row.parts]
            assert len(starts) == 3 and all(len(part.anchors) == 1 for part in row.parts)
            # Each part begins as a request does, and the row is what its parts are.
            assert {int(row.tokens[start]) for start in starts} == {int(row.tokens[0])}
        await mesh.queue.settle(RUN, epoch=1, step=0, batch_id="b")
        await mesh.queue.commit(RUN, epoch=1, step=1)
        ledger = await mesh.queue.ledger(RUN)
        assert (ledger.admitted, ledger.trained, ledger.balanced) == (4, 4, True)


async def test_a_weight_update_during_a_conversation_labels_each_token_with_its_version(
    talking_model: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    second = Version(1, 1)
    manifest, buckets = pack(AutoModelForCausalLM.from_pretrained(talking_model), second)
    seen: list[Mesh] = []

    async def ask(client: AsyncOpenAI, task: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=100, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if seen[0].torch.version == FIRST:
                await seen[0].torch.stage_weights(manifest, buckets)
                await seen[0].torch.commit_weights(second, OnUpdate.IN_FLIGHT)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "y"}]
        await client.chat.completions.create(model="m", messages=messages, max_tokens=5)

    async with agents_mesh(talking_model, leading(ask)) as mesh:
        seen.append(mesh)
        for uid, row in (await mesh.rows(1)).items():
            check_exact(mesh, uid, row)
            assert row.spans[-1].version == second


async def test_a_blocking_agent_runs_in_a_thread_and_posts_its_reward(
    talking_model: Path,
) -> None:
    options = BLOCKING
    async with agents_mesh(talking_model, options, tasks=2) as mesh:
        for uid, row in (await mesh.rows(2)).items():
            check_exact(mesh, uid, row)
            assert mesh.posted(uid).score == 0.25


async def test_a_command_finds_its_session_in_the_environment_and_its_task_on_stdin(
    talking_model: Path,
) -> None:
    options = {"command": [sys.executable, str(AGENT)]}
    async with agents_mesh(talking_model, options, tasks=2) as mesh:
        for uid, row in (await mesh.rows(2)).items():
            check_exact(mesh, uid, row)
            assert mesh.posted(uid).components == {"answers": 2.0}
            assert mesh.posted(uid).score == float(uid.task[1:]) + 1


async def test_sync_batches_wait_for_agents(talking_model: Path) -> None:
    options = BLOCKING
    async with agents_mesh(talking_model, options, tasks=4, slots=4, deterministic=True) as mesh:
        assert len(await mesh.rows(4)) == 4


async def test_an_evaluation_without_a_mesh_runs_agents_too(
    talking_model: Path, tmp_path: Path
) -> None:
    from meshrl.config.recipe import Recipe
    from meshrl.launcher.evaluation import evaluate
    from meshrl.launcher.prompts import eval_tasks

    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 3)
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r", "dir": tmp_path / "run"},
            "model": {"path": talking_model},
            "data": {"val_files": [tmp_path / "held_out.jsonl"], "max_response_length": 40},
            "rollout": {
                "program": "openai",
                "program_options": BLOCKING,
            },
        }
    )
    report = await evaluate(recipe, talking_model, eval_tasks(recipe))
    assert (report.tasks, report.rows, report.score) == (3, 3, 0.25)
