from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from meshrl.contract.errors import UserError
from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.optimizer import Optimizers, fused, keep_own_kernel, move_state
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.model.attention_kernels import with_grouped_heads
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, build_policy, load_hf, open_hf, random_hf
from meshrl.trainer.ranks.world import World, allocator_settings

from . import rank_work, tiny

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
    """transformers' log-probs of a right-padded batch, eager attention."""
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


def answers() -> list[Any]:
    """Answers to two prompts that are longer, with and without a beginning of their own in common, one twice."""
    prompts = tiny.rows(2, seed=3, shortest=33)
    ends = [tiny.rows(6, seed=4 + number, shortest=1, longest=20) for number in range(2)]
    ends[0][1][:1], ends[0][2][:1] = ends[0][0][:1], ends[0][0][:1]
    rows = [np.concatenate([p, end]) for p, of in zip(prompts, ends, strict=True) for end in of]
    return [*rows, rows[4]]


@pytest.mark.parametrize(
    "rows",
    [tiny.rows(11), siblings(), answers()],
    ids=["strangers", "siblings", "answers to long prompts"],
)
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
        near = max(1e-4, 2e-6 * float(b.grad.abs().max()))
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-4, atol=near, msg=lambda m, n=name: f"{n}: {m}"
        )


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in policy.named_tensors():
        assert parameter.grad is not None
        found[name] = parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]
    return found


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


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def learned(world: World, config: Any, steps: int, **changes: Any) -> dict[str, torch.Tensor]:
    """The weights after some steps."""
    model = ModelConfig.model_validate({"path": "x", **changes})
    policy = build_policy(random_hf(config, 2), world, model)
    optimizers = Optimizers(policy, OptimConfig(lr=1e-2))
    for step in range(steps):
        rank_work.nudge(policy, optimizers, step)
    return {name: weight.whole(torch.float32).clone() for name, weight in policy.named_weights()}


def test_selective_checkpointing_computes_no_product_twice_and_learns_the_same(
    world: World,
) -> None:
    found = {}
    random_hf(
        tiny.config(num_hidden_layers=3), 0
    )  # a kind that is loaded for the first time is tried
    for name, options in (
        ("kept", {}),
        ("selective", {"enable_gradient_checkpointing": True, "keep_matmuls": True}),
        ("recomputed", {"enable_gradient_checkpointing": True}),
    ):
        with FlopCounterMode(display=False) as counter:
            weights = learned(world, tiny.config(num_hidden_layers=3), 1, **options)
        found[name] = counter.get_total_flops(), weights
    assert found["selective"][0] == found["kept"][0] < found["recomputed"][0]
    for name, weight in found["kept"][1].items():
        torch.testing.assert_close(found["selective"][1][name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("option", ["param_offload", "enable_gradient_checkpointing"])
def test_a_memory_option_changes_no_weight(world: World, option: str) -> None:
    plain = learned(world, tiny.config(), 3)
    saving = learned(world, tiny.config(), 3, **{option: True})
    for name, weight in plain.items():
        torch.testing.assert_close(saving[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
)
def test_an_offloaded_optimizer_learns_the_same_bits_and_lies_on_the_cpu_between_steps(
    name: Any, device: str
) -> None:
    torch.manual_seed(0)
    start = torch.nn.Linear(8, 4).to(device)
    models = [copy.deepcopy(start) for _ in range(2)]
    made = [
        Optimizers(model, OptimConfig(name=name, lr=1e-2, offload=offload))
        for model, offload in zip(models, (False, True), strict=True)
    ]
    for step in range(4):
        if step == 2:  # a resume in between
            again = Optimizers(models[1], OptimConfig(name=name, lr=1e-2, offload=True))
            for old, part in zip(made[1].parts, again.parts, strict=True):
                part.load_state_dict(old.state_dict())
            made[1] = again
        for model, optimizers in zip(models, made, strict=True):
            model(torch.ones(3, 8, device=device) * (step + 1)).square().sum().backward()
            assert optimizers.step(1e-2) > 0
        states = [state for part in made[1].parts for state in part.state.values()]
        state_values = [v for state in states for name, v in state.items() if name != "step"]
        assert state_values and all(value.device.type == "cpu" for value in state_values)
    for plain, offloaded in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert offloaded.device.type == device
        assert torch.equal(plain, offloaded)


def test_a_state_is_brought_to_where_its_parameter_is_but_for_the_count_of_steps() -> None:
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    part = torch.optim.AdamW([parameter])
    part.state[parameter] = {"exp_avg": torch.zeros(3), "step": torch.tensor(1.0)}
    move_state(part)
    assert part.state[parameter]["exp_avg"].is_meta
    assert not part.state[parameter]["step"].is_meta


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # dynamo's own
def test_what_is_compiled_has_graphs_and_learns_the_same_also_where_activations_are_recomputed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced and cut, but not written as C++: inductor spends minutes on that.
    compiled = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compiled)
    config = tiny.config(num_hidden_layers=1)
    plain = learned(world, config, 1, enable_gradient_checkpointing=True)
    counters.clear()
    both = learned(world, config, 1, enable_gradient_checkpointing=True, use_torch_compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    for name, weight in plain.items():
        torch.testing.assert_close(both[name], weight, rtol=0, atol=1e-4)


def _attend_2_10(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, return_aux=None, scale=None):  # type: ignore[no-untyped-def]
    raise AssertionError


def _attend_2_11(  # type: ignore[no-untyped-def]
    q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    return ("2.11", scale, window_size)


def _attend_2_13(  # type: ignore[no-untyped-def]
    q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    return ("2.13", scale, window_size, enable_gqa)


def test_packed_attention_is_called_as_each_torch_declares_it() -> None:
    assert with_grouped_heads(None) is None
    assert with_grouped_heads(_attend_2_10) is None
    query, key = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    for attend, wanted in (
        (_attend_2_11, ("2.11", 0.5, (3, 0))),
        (_attend_2_13, ("2.13", 0.5, (3, 0), True)),
    ):
        called = with_grouped_heads(attend)
        assert called is not None
        found = called(query, key, key, None, None, 5, 5, scale=0.5, window_size=(3, 0))
        assert found == wanted
    assert with_grouped_heads(varlen_attn) is not None, "this torch has it"


EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
)
MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_learns_in_experts_and_router_and_is_exported(
    name: str, tmp_path: Path, world: World
) -> None:
    random_hf(MIXTURES[name], 0).save_pretrained(tmp_path / "start")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    policy = build_policy(open_hf(tmp_path / "start"), world, ModelConfig(path=tmp_path / "start"))
    rows = tiny.rows(5)
    packed = pack(rows, [PROMPT] * len(rows))
    with torch.no_grad():
        exact = torch.cat([rank_work.exact_logprobs(start, row)[PROMPT - 1 :] for row in rows])
        torch.testing.assert_close(policy(packed, 1.0)[0], exact, rtol=0, atol=1e-5)
    logprobs, _ = policy(packed, 1.0)
    (-logprobs.mean()).backward()
    gradients = {n: p.grad.full_tensor() for n, p in policy.named_tensors() if p.grad is not None}  # type: ignore[attr-defined]
    experts = [n for n in gradients if ".experts." in n]
    routers = [n for n in gradients if ".gate.weight" in n]
    assert experts and len(routers) == SHAPE["num_hidden_layers"]
    assert all(bool(gradients[n].abs().max() > 0) for n in [*experts, *routers])
    optimizers = Optimizers(policy, OptimConfig(lr=1e-2))
    assert optimizers.step(1e-2) > 0
    export_policy(policy, world, tmp_path / "export", tokenizer=tmp_path / "start")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for tensor, weight in policy.named_weights():
        assert torch.equal(again.get_parameter(tensor), weight.whole(torch.float32)), tensor
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert any(
        name.endswith((".experts.3.up_proj.weight", ".experts.3.w3.weight")) for name in stored
    )
    sent = rank_work.tensors_of(rank_work.snapshot(policy, world))
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], stored[name]) for name in stored)


def test_experts_that_a_checkpoint_has_fused_are_published_fused(
    tmp_path: Path, world: World
) -> None:
    hf = random_hf(MIXTURES["qwen3_moe"], 0)
    hf.save_pretrained(tmp_path)
    held = {name: p.detach().clone() for name, p in hf.named_parameters()}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    policy = build_policy(open_hf(tmp_path), world, ModelConfig(path=tmp_path))
    sent = rank_work.tensors_of(rank_work.snapshot(policy, world))
    assert sent.keys() == held.keys()
    assert all(torch.equal(sent[name], held[name]) for name in held)


def test_adapters_on_experts_are_refused_in_one_line(tmp_path: Path, world: World) -> None:
    random_hf(MIXTURES["qwen3_moe"], 0).save_pretrained(tmp_path)
    config = ModelConfig(path=tmp_path, lora_rank=2, target_modules=["gate_proj", "up_proj"])
    with pytest.raises(UserError, match=r"target_modules: adapters on .*experts.* not supported"):
        build_policy(open_hf(tmp_path), world, config)


def test_adamw_is_one_kernel_on_a_gpu_and_takes_over_a_state_that_was_saved_without() -> None:
    assert [fused({"cuda"}), fused({"cpu"}), fused({"cuda", "cpu"})] == [True, None, None]
    layer = torch.nn.Linear(3, 3)

    def stepped(part: torch.optim.AdamW) -> torch.optim.AdamW:
        layer(torch.ones(1, 3)).sum().backward()
        part.step()
        return part

    saved = stepped(torch.optim.AdamW(layer.parameters(), fused=True)).state_dict()
    taken = torch.optim.AdamW(layer.parameters())
    keep_own_kernel(taken)
    taken.load_state_dict(saved)
    assert taken.param_groups[0]["fused"] is None
    stepped(taken)


def test_the_users_own_settings_of_the_allocator_stay() -> None:
    assert allocator_settings({}) == "expandable_segments:True"
    assert allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}) == ""
