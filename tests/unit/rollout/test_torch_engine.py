"""The torch engine says what transformers says, for every family that it runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import ConfigError, UserError
from meshrl.rollout.engines.torch import build
from meshrl.rollout.streams import sample

from .checkpoints import (
    VOCAB,
    Checkpoint,
    assert_told,
    forced_logprobs,
    greedy,
    make_model,
    prompts,
    request,
)
from .conftest import EngineMaker

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
SHARED = {"shared_expert_intermediate_size": 16}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3 with attention bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen2 untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "mistral with a window that is never full": ("Mistral", {"sliding_window": 200}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3 moe of dense and sparse layers": (
        "Qwen3Moe",
        EXPERTS | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3.5": ("Qwen3_5Text", HYBRID),
    "qwen3.5 with attention bias": (
        "Qwen3_5Text",
        HYBRID | {"attention_bias": True, "linear_conv_kernel_dim": 2, "linear_num_key_heads": 4},
    ),
    "qwen3 next": ("Qwen3Next", EXPERTS | SHARED | HYBRID | {"mlp_only_layers": [1]}),
    "qwen3.5 moe": ("Qwen3_5MoeText", EXPERTS | SHARED | HYBRID),
    "llama": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama with every bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear rope": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
async def test_greedy_tokens_equal_those_of_transformers(
    name: str, tmp_path: Path, make_engine: EngineMaker
) -> None:
    family, changes = FAMILIES[name]
    model = make_model(family, **changes)
    model.save_pretrained(tmp_path)
    engine = await make_engine(tmp_path)
    generate_requests = prompts(5)
    answers = await asyncio.gather(
        *(
            sample(engine, request(str(i), prompt, temperature=0.0, max_tokens=24))
            for i, prompt in enumerate(generate_requests)
        )
    )
    wish = replace(request("told", generate_requests[-1] * 9, temperature=0.5), prompt_top=3)
    again = replace(
        wish, prompt_ids=np.append(wish.prompt_ids, [5, 6]).astype(np.int32), continued=2
    )
    for told in await asyncio.gather(sample(engine, wish), sample(engine, again)):
        assert_told(model, wish.prompt_ids.tolist(), told.prompt, 3)
    for prompt, answer in zip(generate_requests, answers, strict=True):
        assert answer.prompt is None
        assert answer.tokens.tolist() == greedy(model, prompt, 24)
        want = forced_logprobs(model, prompt, answer.tokens.tolist())
        np.testing.assert_allclose(answer.logprobs, want, atol=1e-4)


async def test_a_sharded_checkpoint_is_read_completely(
    qwen3: Checkpoint, tmp_path: Path, make_engine: EngineMaker
) -> None:
    qwen3.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    engine = await make_engine(tmp_path)
    answer = await sample(engine, request("a", [5, 6, 7], temperature=0.0, max_tokens=12))
    assert answer.tokens.tolist() == greedy(qwen3.model, [5, 6, 7], 12)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.3},
        {"temperature": 1.2, "min_p": 0.1, "top_k": 30, "top_p": 0.8},
        {"temperature": 0.7, "repetition_penalty": 1.5},
        {"temperature": 0.0, "repetition_penalty": 0.8},
        {"temperature": 0.0, "logit_bias": {5: 3.5, 9: -100.0}},
        {"repetition_penalty": 1.3, "logit_bias": {5: 3.5, 9: -2.0}, "min_p": 0.05},
    ],
    ids=str,
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    qwen3: Checkpoint, make_engine: EngineMaker, sampling: dict[str, Any]
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    generate_requests = prompts(6)
    answers = await asyncio.gather(
        *(
            sample(engine, request(str(i), prompt, max_tokens=30, seed=i, **sampling))
            for i, prompt in enumerate(generate_requests)
        )
    )
    for prompt, answer in zip(generate_requests, answers, strict=True):
        want = forced_logprobs(qwen3.model, prompt, answer.tokens.tolist(), **sampling)
        np.testing.assert_allclose(answer.logprobs, want, atol=1e-5)


async def test_other_running_requests_do_not_change_a_draw(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, slots=6)
    alone = await sample(engine, request("me", [9, 8, 7], max_tokens=40, seed=3))
    others = [
        request(f"other {i}", prompt, max_tokens=5 + 7 * i, temperature=i % 2 and 0.7, top_k=5)
        for i, prompt in enumerate(prompts(8))
    ]
    others[2:2] = [
        request(f"changed {i}", [4, i], max_tokens=9 * i, repetition_penalty=1.0 + i / 4, min_p=0.1)
        for i in range(1, 4)
    ]
    crowd = await asyncio.gather(
        *(
            sample(engine, each)
            for each in [*others, request("me", [9, 8, 7], max_tokens=40, seed=3)]
        )
    )
    assert crowd[-1].tokens.tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(crowd[-1].logprobs, alone.logprobs, atol=1e-5)


async def test_another_seed_or_another_name_gives_another_answer(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    requests = [request("a", [4], seed=0), request("a", [4], seed=1), request("b", [4], seed=0)]
    answers = [(await sample(engine, each)).tokens.tolist() for each in requests]
    assert len({tuple(answer[:20]) for answer in answers}) == 3


async def test_more_ragged_requests_than_slots_all_end_as_they_would_alone(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, slots=4, max_prefill_tokens=32)
    generate_requests = prompts(24, seed=5)
    lengths = np.random.default_rng(1).integers(1, 50, len(generate_requests)).tolist()
    answers = await asyncio.gather(
        *(
            sample(engine, request(str(i), prompt, temperature=0.0, max_tokens=length))
            for i, (prompt, length) in enumerate(zip(generate_requests, lengths, strict=True))
        )
    )
    for prompt, length, answer in zip(generate_requests, lengths, answers, strict=True):
        assert answer.tokens.tolist() == greedy(qwen3.model, prompt, length)
        assert answer.finish_reason == ("stop" if answer.tokens[-1] == 2 else "length")
    assert engine.stats().running == 0


async def test_the_cache_stays_within_its_bytes_and_everything_is_answered(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    row_of_32 = 2 * 2 * 2 * 8 * 4 * 32
    engine = await make_engine(qwen3.path, slots=8, kv_cache_bytes=6 * row_of_32)
    assert engine.max_model_len == 6 * 32
    lengths = [10, 20, 150, 30, 5, 60]
    answers = await asyncio.gather(
        *(sample(engine, request(str(n), [7, 8], temperature=0.0, max_tokens=n)) for n in lengths)
    )
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.tokens.tolist() == greedy(qwen3.model, [7, 8], length)


async def test_stop_token_ids_end_a_response_and_belong_to_it(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path)
    free = greedy(qwen3.model, [3, 4, 5], 20)
    stop = free[6]
    answer = await sample(
        engine, request("a", [3, 4, 5], temperature=0.0, max_tokens=20, stop_token_ids=(stop,))
    )
    assert answer.tokens.tolist() == free[: free.index(stop) + 1]
    assert answer.finish_reason == "stop"


class Letters:
    """A tokenizer whose token i is a letter pair, so that stop strings cross the borders of tokens."""

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + i % 26) + chr(97 + i // 26) for i in ids)


async def test_a_stop_string_across_two_tokens_ends_a_response(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, tokenizer=Letters(), eos_token_ids=[])
    free = await sample(engine, request("a", [3, 4, 5], max_tokens=30))
    text = Letters().decode(free.tokens)
    crossing = text[13:15]  # second letter of token 6, first letter of token 7
    end = (text.index(crossing) + 1) // 2 + 1
    answer = await sample(engine, request("a", [3, 4, 5], max_tokens=30, stop=("##", crossing)))
    assert answer.tokens.tolist() == free.tokens[:end].tolist()
    assert answer.finish_reason == "stop"


async def test_a_request_as_long_as_the_model_allows_is_cut_there(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, max_model_len=30, eos_token_ids=[])
    answer = await sample(engine, request("a", [5] * 20, max_tokens=100))
    assert (len(answer.tokens), answer.finish_reason) == (10, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "complaint"),
    [
        ([], {}, "the prompt is empty"),
        ([5] * 256, {}, "leave no room for a response in 256"),
        ([VOCAB], {}, "different tokenizers"),
        ([5], {"top_k": 0}, "top_k is 0"),
        ([5], {"top_p": 1.5}, "top_p is 1.5"),
        ([5], {"temperature": -1.0}, "temperature is -1.0"),
        ([5], {"min_p": 1.5}, "min_p is 1.5"),
        ([5], {"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ([5], {"logit_bias": {3: 200.0}}, "logit_bias of token 3 is 200.0"),
        ([5], {"logit_bias": {61: 1.0}}, "logit_bias names token 61, the model knows 0 to 60"),
        ([5], {"max_tokens": 0}, "max_tokens is 0"),
        ([5], {"stop": ("x",)}, "stop strings need a tokenizer"),
    ],
)
async def test_an_invalid_request_says_why(
    qwen3: Checkpoint,
    make_engine: EngineMaker,
    prompt: list[int],
    sampling: dict[str, Any],
    complaint: str,
) -> None:
    engine = await make_engine(qwen3.path)
    with pytest.raises(UserError, match=complaint):
        await sample(engine, request("a", prompt, **sampling))


@pytest.mark.parametrize("family", ["Mamba", "DeepseekV3"])
async def test_a_model_of_another_family_is_refused_with_the_families_that_run(
    family: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [f"{family}ForCausalLM"]}))
    engine = build({}, model=tmp_path, slots=1)
    runs = r"\(it runs Llama.*Qwen2.*Qwen3.*; other models need rollout\.name=vllm or sglang\)"
    with pytest.raises(UserError, match=f"cannot run {family}ForCausalLM {runs}"):
        await engine.start()


async def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        await build({}, model=tmp_path, slots=1).start()
    make_model("Llama").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"]})
    )
    with pytest.raises(UserError, match=r"lacks model\.safetensors"):
        await build({}, model=tmp_path, slots=1).start()


def test_an_unknown_option_names_the_nearest_right_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.max_model_length.*'max_model_len'"):
        build({"max_model_length": 3}, model=tmp_path, slots=1)
    with pytest.raises(ConfigError, match=r"rollout\.engine\.device"):
        build({"device": "tpu"}, model=tmp_path, slots=1)
