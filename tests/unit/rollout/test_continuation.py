"""A response that another engine continues equals the uninterrupted response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from meshrl.contract.types import GenerateDelta, GenerateRequest, OnUpdate, Version
from meshrl.rollout.end_tokens import StopStrings
from meshrl.rollout.generation_checkpoint import continuation
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts
from meshrl.rollout.server_engine.config import ServerConfig
from meshrl.rollout.server_engine.request import ServerRequest, ended_before, read_request
from meshrl.rollout.server_engine.response import Chunk, ResponseReader
from meshrl.rollout.streams import closing, response_of, sample

from .checkpoints import FIRST, Checkpoint, forced_logprobs, make_model, pack, request
from .conftest import EngineMaker
from .test_torch_engine import Letters

PROMPT = [3, 4, 5]


def after(full_request: GenerateRequest, tokens: Sequence[int]) -> GenerateRequest:
    """`asked` once it has `tokens`."""
    delta = GenerateDelta(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        version=FIRST,
    )
    return continuation(full_request, [delta])


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"seed": 4},
        {"seed": 5, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"seed": 6, "repetition_penalty": 1.6, "logit_bias": {9: 3.0}, "min_p": 0.05},
    ],
    ids=["greedy", "sampled", "cut", "changed logits"],
)
async def test_draws_do_not_depend_on_where_a_continuation_began(
    qwen3: Checkpoint, make_engine: EngineMaker, how: dict[str, Any]
) -> None:
    first = await make_engine(qwen3.path, eos_token_ids=[])
    second = await make_engine(qwen3.path, eos_token_ids=[])
    full_request = request("a", PROMPT, max_tokens=60, **how)
    whole = await sample(first, full_request)
    for cut in (1, 17, 59):
        rest = await sample(second, after(full_request, whole.tokens[:cut]))
        assert rest.tokens.tolist() == whole.tokens[cut:].tolist()
        np.testing.assert_allclose(rest.logprobs, whole.logprobs[cut:], atol=1e-4)
        assert rest.finish_reason == "length"


async def test_a_stop_string_may_begin_before_the_cut_and_end_after_it(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, tokenizer=Letters(), eos_token_ids=[])
    free = await sample(engine, request("a", PROMPT, max_tokens=30))
    text = Letters().decode(free.tokens)
    crossing = text[11:15]  # from the last letter of token 5 to the first of token 7
    end = (text.index(crossing) + 3) // 2 + 1
    full_request = request("a", PROMPT, max_tokens=30, stop=("##", crossing))
    for cut in (end - 2, end - 1):
        rest = await sample(engine, after(full_request, free.tokens[:cut]))
        assert rest.tokens.tolist() == free.tokens[cut:end].tolist()
        assert rest.finish_reason == "stop"
    ended = await sample(engine, after(full_request, free.tokens[:end]))
    assert (ended.tokens.tolist(), ended.finish_reason) == ([], "stop")


async def test_a_response_that_has_ended_already_gets_only_its_finish_reason(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, max_model_len=30, eos_token_ids=[9])
    full_request = request("a", PROMPT, max_tokens=100, stop_token_ids=(11,))
    ends = {"stop": [[7, 9], [7, 11]], "length": [[7] * 27]}
    for reason, prefixes in ends.items():
        for tokens in prefixes:
            answer = await sample(engine, after(full_request, tokens))
            assert (answer.tokens.tolist(), answer.finish_reason) == ([], reason)
    short = request("a", PROMPT, max_tokens=2)
    assert (await sample(engine, after(short, [7, 8]))).finish_reason == "length"
    assert (await sample(engine, after(short, [7, 9]))).finish_reason == "stop"
    assert engine.stats().running == 0


async def test_a_continued_response_keeps_its_context_when_an_update_interrupts_it(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    other = make_model("Qwen3", seed=5, head_dim=8, tie_word_embeddings=True)
    await engine.stage_weights(*pack(other, Version(1, 1)))
    before = [7, 8, 9, 10]
    deltas: list[GenerateDelta] = []
    async with closing(
        engine.generate(after(request("a", PROMPT, max_tokens=150), before))
    ) as stream:
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 1:
                await engine.commit_weights(Version(1, 1), OnUpdate.INTERRUPT)
    old, new = response_of(deltas).spans
    tokens = np.concatenate([delta.tokens for delta in deltas]).tolist()
    assert new.end == len(tokens) == 146
    want = [
        *forced_logprobs(qwen3.model, PROMPT + before, tokens[: old.end]),
        *forced_logprobs(other, PROMPT + before + tokens[: old.end], tokens[old.end :]),
    ]
    np.testing.assert_allclose(np.concatenate([d.logprobs for d in deltas]), want, atol=1e-4)


async def test_continued_and_new_requests_share_a_batch(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, slots=4, eos_token_ids=[])
    full_request = [request(str(i), PROMPT, max_tokens=20 + i, seed=i) for i in range(8)]
    whole = [await sample(engine, each) for each in full_request]
    some = [after(full_request[i], whole[i].tokens[: 5 * (i % 3)]) for i in range(8)]
    answers = await asyncio.gather(*(sample(engine, each) for each in some))
    for i, (answer, undisturbed) in enumerate(zip(answers, whole, strict=True)):
        assert answer.tokens.tolist() == undisturbed.tokens[5 * (i % 3) :].tolist()


def server_request(full_request: GenerateRequest) -> ServerRequest:
    checkpoint = CheckpointFacts(
        **{field: None for field in CheckpointFacts.__dataclass_fields__}
        | {"vocab_size": 61, "eos_token_ids": (2,)}
    )
    return read_request(full_request, ServerConfig(), checkpoint, max_length=30, finds_strings=True)


def test_the_request_for_the_rest_of_a_response_has_another_seed() -> None:
    full_request = request("a", PROMPT, max_tokens=20, seed=3)
    whole, rest = server_request(full_request), server_request(after(full_request, [7, 8]))
    assert (whole.max_tokens, rest.max_tokens) == (20, 18)
    assert whole.seed != rest.seed == server_request(after(full_request, [9, 9])).seed
    assert server_request(after(full_request, [9] * 27)).max_tokens == 0


@pytest.mark.parametrize(
    ("tokens", "reason"), [([7, 2], "stop"), ([7] * 20, "length"), ([7], ""), ([7, 10, 11], "stop")]
)
def test_a_server_is_not_asked_for_a_response_that_has_ended(
    tokens: list[int], reason: str
) -> None:
    text = Letters().decode([10, 11])[1:3]
    full_request = after(request("a", PROMPT, max_tokens=20, stop=(text,)), tokens)
    strings = StopStrings((text,), Letters(), {})
    assert ended_before(full_request, server_request(full_request), strings) == reason


def test_a_stop_string_that_began_before_the_continuation_is_found() -> None:
    text = Letters().decode([10, 11])[1:3]
    reader = ResponseReader(FIRST, StopStrings((text,), Letters(), {}), before=[7, 10])
    assert (
        reader.add(Chunk(tokens=[11, 12], logprobs=[-1.0, -1.0], finish_reason="", spans=None)) == 1
    )
    assert reader.stopped
