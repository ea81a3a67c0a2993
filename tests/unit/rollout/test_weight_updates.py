"""Weights change between two decode steps, and every token says which weights sampled it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import InfraError, UnavailableError, UserError
from meshrl.contract.types import OnUpdate, TensorSpec, Uint8, Version, WeightManifest
from meshrl.rollout.engines.torch import TorchEngine
from meshrl.rollout.streams import Response, closing, response_of, sample

from .checkpoints import (
    Checkpoint,
    assert_goes_on_with_the_old_cache,
    forced_logprobs,
    greedy,
    make_model,
    pack,
    request,
)
from .conftest import EngineMaker

NEXT = Version(1, 1)
PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def other() -> Any:
    """The same architecture with other weights."""
    return make_model("Qwen3", seed=9, head_dim=8, tie_word_embeddings=True)


async def updated_midway(engine: TorchEngine, on_update: OnUpdate) -> Response:
    """A greedy response during which NEXT, already staged, is committed after the first delta."""
    deltas = []
    greedy_request = request("a", PROMPT, temperature=0.0, max_tokens=150)
    async with closing(engine.generate(greedy_request)) as stream:
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 1:
                await engine.commit_weights(NEXT, on_update)
    return response_of(deltas)


@pytest.mark.parametrize("where", ["device", "host"])
async def test_an_interrupted_generation_continues_as_the_new_model_would(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker, where: str
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[], weight_staging=where)
    await engine.stage_weights(*pack(other, NEXT))
    assert engine.stats().staging == where
    answer = await updated_midway(engine, OnUpdate.INTERRUPT)
    old, new = answer.spans
    assert (old.start, old.end, new.end) == (0, new.start, 150)
    assert 0 < new.start < 150
    before, after = answer.tokens[: new.start].tolist(), answer.tokens[new.start :].tolist()
    np.testing.assert_allclose(
        answer.logprobs,
        [
            *forced_logprobs(qwen3.model, PROMPT, before),
            *forced_logprobs(other, PROMPT + before, after),
        ],
        atol=1e-4,
    )
    other.generation_config.eos_token_id = None
    assert after == greedy(other, PROMPT + before, len(after))


@pytest.mark.parametrize("where", ["device", "host"])
async def test_an_update_in_flight_keeps_the_cache_of_the_old_weights(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker, where: str
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[], weight_staging=where)
    await engine.stage_weights(*pack(other, NEXT))
    assert engine.stats().staging == where
    answer = await updated_midway(engine, OnUpdate.IN_FLIGHT)
    assert len(answer.spans) == 2
    assert_goes_on_with_the_old_cache((qwen3.model, other), PROMPT, answer)


@pytest.mark.parametrize("where", ["device", "host"])
async def test_spans_are_exact_over_many_updates_of_ragged_requests(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker, where: str
) -> None:
    engine = await make_engine(
        qwen3.path, slots=4, eos_token_ids=[], stream_interval=5, weight_staging=where
    )
    requests = [
        request(str(i), PROMPT[: 1 + i % 4], max_tokens=20 + 9 * i, seed=i) for i in range(12)
    ]
    readers = [asyncio.create_task(sample(engine, each)) for each in requests]
    step = 0
    while not all(reader.done() for reader in readers):
        step += 1
        version = Version(1, step)
        await engine.stage_weights(*pack(qwen3.model if step % 2 == 0 else other, version))
        await engine.commit_weights(version, OnUpdate.INTERRUPT)
        await asyncio.sleep(0.01)
    crossed = 0
    for sent, reader in zip(requests, readers, strict=True):
        answer = await reader
        prompt = sent.prompt_ids.tolist()
        tokens = answer.tokens.tolist()
        assert [span.start for span in answer.spans] == [0, *(s.end for s in answer.spans[:-1])]
        assert answer.spans[-1].end == len(tokens) == sent.sampling.max_tokens
        crossed += len(answer.spans) - 1
        for span in answer.spans:
            model = qwen3.model if span.version.step % 2 == 0 else other
            want = forced_logprobs(
                model, prompt + tokens[: span.start], tokens[span.start : span.end]
            )
            np.testing.assert_allclose(answer.logprobs[span.start : span.end], want, atol=1e-4)
    assert crossed > 0


async def test_bfloat16_weights_are_converted_to_the_engines_type(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path)
    await engine.stage_weights(*pack(other, NEXT, "bfloat16"))
    await engine.commit_weights(NEXT, OnUpdate.DRAIN)
    rounded = make_model("Qwen3", seed=9, head_dim=8, tie_word_embeddings=True)
    rounded.load_state_dict({k: v.bfloat16().float() for k, v in other.state_dict().items()})
    answer = await sample(engine, request("a", PROMPT, temperature=0.0, max_tokens=20))
    assert answer.tokens.tolist() == greedy(rounded, PROMPT, 20)


async def test_buckets_may_be_read_only_and_reused_after_staging(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path)
    manifest, buckets = pack(other, NEXT)
    frozen = [bucket.copy() for bucket in buckets]
    for bucket in frozen:
        bucket.flags.writeable = False
    await engine.stage_weights(manifest, frozen)
    await engine.stage_weights(manifest, buckets)
    for bucket in buckets:
        bucket[:] = 0
    await engine.commit_weights(NEXT, OnUpdate.DRAIN)
    answer = await sample(engine, request("a", PROMPT, temperature=0.0, max_tokens=20))
    assert answer.tokens.tolist() == greedy(other, PROMPT, 20)


async def test_a_tied_model_takes_an_equal_output_matrix_and_refuses_another(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path)
    manifest, buckets = pack(other, NEXT)
    embedding = next(s for s in manifest.tensors if s.name == "model.embed_tokens.weight")
    head = replace(embedding, name="lm_head.weight", bucket=2, offset=0)
    data = buckets[embedding.bucket][embedding.offset : embedding.offset + embedding.nbytes]
    with_head = replace(manifest, tensors=(*manifest.tensors, head))
    await engine.stage_weights(with_head, [*buckets, data.copy()])
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        await engine.stage_weights(with_head, [*buckets, np.zeros_like(data)])


Damage = Callable[[tuple[TensorSpec, ...]], tuple[TensorSpec, ...]]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda specs: specs[1:], r"missing model\.embed_tokens\.weight"),
        (lambda specs: (*specs, replace(specs[0], name="x")), r"unknown x$"),
        (
            lambda specs: (replace(specs[0], shape=(61, 31), nbytes=61 * 31 * 4), *specs[1:]),
            r"misshapen model\.embed_tokens\.weight is \[61, 31\], want \[61, 32\]",
        ),
        (lambda specs: (replace(specs[0], nbytes=8), *specs[1:]), r"has 8 bytes, want 7808"),
        (lambda specs: (replace(specs[0], offset=10**6), *specs[1:]), r"of a bucket of"),
        (lambda specs: (replace(specs[0], dtype="int4"), *specs[1:]), r"is int4"),
    ],
    ids=["missing", "unknown", "misshapen", "bytes", "offset", "dtype"],
)
async def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker, damage: Damage, complaint: str
) -> None:
    engine = await make_engine(qwen3.path)
    manifest, buckets = pack(other, NEXT)
    broken: tuple[WeightManifest, Sequence[Uint8]] = (
        replace(manifest, tensors=damage(manifest.tensors)),
        buckets,
    )
    with pytest.raises(UserError, match=complaint):
        await engine.stage_weights(*broken)
    answer = await sample(engine, request("a", PROMPT, temperature=0.0, max_tokens=10))
    assert answer.tokens.tolist() == greedy(qwen3.model, PROMPT, 10)


async def test_weights_that_are_not_finite_fail_their_requests_and_nothing_later(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, slots=2)
    manifest, buckets = pack(other, NEXT)
    poisoned = [bucket.copy() for bucket in buckets]
    poisoned[0].view(np.float32)[:] = np.nan
    await engine.stage_weights(manifest, poisoned)
    await engine.commit_weights(NEXT, OnUpdate.DRAIN)
    with pytest.raises(InfraError, match="not finite"):
        await sample(engine, request("a", PROMPT, max_tokens=5))
    await engine.stage_weights(*pack(other, Version(1, 2)))
    await engine.commit_weights(Version(1, 2), OnUpdate.DRAIN)
    answer = await sample(engine, request("a", [4], temperature=0.0, max_tokens=20))
    assert answer.tokens.tolist() == greedy(other, [4], 20)


class ThrowingTokenizer:
    """A user's tokenizer that breaks in the engine's thread."""

    def decode(self, ids: Sequence[int]) -> str:
        raise RuntimeError("vocabulary on fire")


async def test_a_crash_of_the_thread_fails_every_request_and_every_update(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, slots=2, eos_token_ids=[], tokenizer=ThrowingTokenizer())
    await engine.stage_weights(*pack(other, NEXT))
    readers = [
        asyncio.create_task(sample(engine, request(str(i), PROMPT, max_tokens=200)))
        for i in range(4)
    ]
    await asyncio.sleep(0)
    update = asyncio.create_task(engine.commit_weights(NEXT, OnUpdate.DRAIN))
    await asyncio.sleep(0)
    readers.append(
        asyncio.create_task(sample(engine, request("bad", PROMPT, max_tokens=9, stop=("x",))))
    )
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(results[-1], InfraError)
    assert "vocabulary on fire" in str(results[-1])
    assert all(isinstance(each, InfraError | Response) for each in results)
    await asyncio.wait({update})
    with pytest.raises(UnavailableError, match="vocabulary on fire"):
        await sample(engine, request("late", PROMPT))


async def test_a_cancelled_draining_commit_is_withdrawn(
    qwen3: Checkpoint, other: Any, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    await engine.stage_weights(*pack(other, NEXT))
    async with closing(engine.generate(request("a", PROMPT, max_tokens=200))) as stream:
        first = await anext(stream)
        commit = asyncio.create_task(engine.commit_weights(NEXT, OnUpdate.DRAIN))
        await asyncio.sleep(0)
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)
        assert (await sample(engine, request("b", PROMPT, max_tokens=4))).spans[
            0
        ].version == first.version
    assert engine.version == first.version
