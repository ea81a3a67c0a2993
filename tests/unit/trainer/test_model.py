from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
)

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, build_policy, load_hf, random_hf
from meshrl.trainer.ranks.world import World

from . import tiny

PROMPT = 3
SHAPE: dict[str, Any] = dict(
    vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
FAMILIES = {
    "qwen3": tiny.config(),
    "llama, untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "mistral, sliding window": MistralConfig(**SHAPE, sliding_window=9),
    "gemma 2, softcaps": Gemma2Config(
        **SHAPE, head_dim=8, sliding_window=9, attn_logit_softcapping=0.5, final_logit_softcapping=2.0,
        initializer_range=0.3,
    ),
    "gpt-oss, sinks": GptOssConfig(
        **SHAPE, head_dim=8, sliding_window=9, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.3,
    ),
    "deepseek-v3, latent attention": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4}, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4, n_shared_experts=1, n_group=2,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, moe_intermediate_size=24,
    ),
}  # fmt: skip


def padded_logprobs(hf: Any, rows: list[Any], temperature: float) -> torch.Tensor:
    """What transformers says of a right-padded batch, eager attention."""
    hf.set_attn_implementation("eager")
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.from_numpy(row)
        mask[index, : len(row)] = 1
    logits = hf(input_ids=ids, attention_mask=mask).logits / temperature
    log_p = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([log_p[i, PROMPT - 1 : len(row) - 1] for i, row in enumerate(rows)])


def siblings() -> list[Any]:
    """Rows that begin alike, for 4 to 20 tokens, one of them twice."""
    stem, *tails = tiny.rows(8, shortest=20)
    rows = [np.concatenate([stem[: 4 * (i % 5) + 4], tail]) for i, tail in enumerate(tails)]
    return [*rows, rows[2]]


@pytest.mark.parametrize("rows", [tiny.rows(11), siblings()], ids=["strangers", "siblings"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded_in_value_and_gradient(family: str, rows: list[Any]) -> None:
    made = pack(rows, [PROMPT] * len(rows))
    mix = torch.randn(len(made.targets), generator=torch.Generator().manual_seed(0))
    packed, padded = random_hf(FAMILIES[family], 1), random_hf(FAMILIES[family], 1)
    mine, _ = Policy(packed)(made, 0.8)
    full = padded_logprobs(padded, rows, 0.8)
    torch.testing.assert_close(mine, full, rtol=1e-5, atol=1e-5)
    (mine * mix).sum().backward()
    (full * mix).sum().backward()
    for (name, a), (_, b) in zip(packed.named_parameters(), padded.named_parameters(), strict=True):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in policy.named_tensors():
        assert parameter.grad is not None
        found[name] = parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]
    return found


def run_in_packs(policy: Policy, rows: list[Any], cuts: list[int]) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    for start, end in itertools.pairwise(cuts):
        part = rows[start:end]
        logprobs, entropies = policy(pack(part, [PROMPT] * len(part)), 1.0)
        (logprobs.sum() + 0.1 * entropies.sum()).backward()
    return gradients(policy)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_does_not_depend_on_how_rows_are_cut_into_micro_batches(
    world: World, checkpointing: bool
) -> None:
    config = ModelConfig(path=Path("x"), enable_gradient_checkpointing=checkpointing)
    policy = build_policy(random_hf(tiny.config(), 2), world, config)
    rows = tiny.rows(12)
    whole = run_in_packs(policy, rows, [0, 12])
    for cuts in ([0, 5, 12], [0, 1, 2, 3, 9, 12], [0, 0, 12]):
        for name, gradient in run_in_packs(policy, rows, cuts).items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-5)


def test_computing_in_bfloat16_keeps_float32_masters(world: World) -> None:
    config = ModelConfig(path=Path("x"), param_dtype="bfloat16")
    policy = build_policy(random_hf(tiny.config(), 2), world, config)
    rows = tiny.rows(6)
    exact, _ = Policy(random_hf(tiny.config(), 2))(pack(rows, [PROMPT] * 6), 1.0)
    logprobs, _ = policy(pack(rows, [PROMPT] * 6), 1.0)
    logprobs.sum().backward()
    assert {p.dtype for _, p in policy.named_tensors()} == {torch.float32}
    assert {g.dtype for g in gradients(policy).values()} == {torch.float32}
    assert 1e-6 < (logprobs - exact).abs().max() < 0.1


def test_equal_batches_give_bit_identical_gradients(world: World) -> None:
    rows = tiny.rows(12)
    config = ModelConfig(path=Path("x"))
    first, second = (
        run_in_packs(build_policy(random_hf(tiny.config(), 2), world, config), rows, [0, 7, 12])
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_is_loaded_in_float32(tiny_path: Path) -> None:
    hf = load_hf(tiny_path)
    again = AutoModelForCausalLM.from_pretrained(tiny_path)
    assert all(torch.equal(a, b) for a, b in zip(hf.parameters(), again.parameters(), strict=True))


def test_a_directory_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.path: no config.json in .*not a Hugging Face"):
        load_hf(tmp_path)


def test_layers_in_which_rows_of_a_pack_would_see_each_other_are_refused() -> None:
    config = tiny.config(layer_types=["full_attention", "full_attention"])
    config.layer_types[1] = "chunked_attention"
    with pytest.raises(UserError, match="layer_types chunked_attention: rows of a pack would see"):
        random_hf(config, 0)
