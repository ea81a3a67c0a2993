"""Models with layers that keep a state from one token to the next: in packs, alone, by transformers, and on ranks."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from meshrl.contract.errors import UserError
from meshrl.contract.types import Int32
from meshrl.testing import vision
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, build_policy, open_hf, random_hf
from meshrl.trainer.ranks.world import World
from tests.doubles.architectures import apart, random_checkpoint
from tests.doubles.equality import TRAININGS, train

from . import tiny
from .ranks import Ranks

PROMPT = 2
SHAPE: dict[str, Any] = dict(
    vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0,
)  # fmt: skip
LINEAR: dict[str, Any] = dict(
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16,
)  # fmt: skip
DENSE, MIXTURE = {**SHAPE, **LINEAR}, {**SHAPE, **LINEAR, **EXPERTS}
MAMBA: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=8, mamba_expand=2, mamba_d_state=8)
LATENT: dict[str, Any] = dict(
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    num_key_value_heads=4, first_k_dense_replace=1,
)  # fmt: skip


def layers(pattern: str) -> dict[str, Any]:
    """l: linear, f: full, c: convolution, m: Mamba, a: attention."""
    names = {"l": "linear_attention", "f": "full_attention", "c": "conv", "m": "mamba", "a": "attention"}  # fmt: skip
    return {"layer_types": [names[each] for each in pattern], "num_hidden_layers": len(pattern)}


TABLE: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3_5Text", DENSE),
    ("Qwen3_5Text", DENSE | layers("lf")),
    ("Qwen3_5Text", DENSE | layers("fllf")),
    ("Qwen3_5Text", DENSE | layers("ll")),
    ("Qwen3_5Text", DENSE | layers("llllf") | {"linear_conv_kernel_dim": 2}),
    ("Qwen3_5Text", DENSE | {"linear_conv_kernel_dim": 7, "tie_word_embeddings": True}),
    ("Qwen3_5Text", DENSE | {"linear_num_key_heads": 4, "linear_value_head_dim": 16}),
    ("Qwen3_5Text", DENSE | {"hidden_size": 48, "head_dim": 16, "attention_bias": True}),
    ("Qwen3Next", MIXTURE),
    ("Qwen3Next", MIXTURE | layers("fl")),
    ("Qwen3Next", MIXTURE | {"mlp_only_layers": [0, 3], "norm_topk_prob": False}),
    ("Qwen3Next", MIXTURE | {"decoder_sparse_step": 2, "linear_conv_kernel_dim": 3}),
    ("Qwen3Next", MIXTURE | {"linear_key_head_dim": 16, "linear_num_value_heads": 6}),
    ("Qwen3Next", MIXTURE | layers("llfllf") | {"num_experts": 8, "num_experts_per_tok": 3}),
    ("Qwen3_5MoeText", MIXTURE),
    ("Qwen3_5MoeText", MIXTURE | layers("lf") | {"linear_conv_kernel_dim": 2}),
    ("Qwen3_5MoeText", MIXTURE | {"num_experts": 6, "num_experts_per_tok": 1}),
    ("Qwen3_5MoeText", MIXTURE | {"hidden_size": 48, "linear_value_head_dim": 4}),
    ("NemotronH", SHAPE | dict(
        layers_block_type=["mamba", "moe", "attention", "mlp"], mamba_num_heads=8, mamba_head_dim=8, n_groups=2,
        ssm_state_size=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=16, chunk_size=16,
    )),
    ("KimiLinear", SHAPE | LATENT | layers("lf") | dict(
        linear_head_dim=8, linear_num_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
    )),
    ("BailingHybrid", SHAPE | LATENT | layers("lf") | dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=2, topk_group=1,
    )),
    ("Lfm2", SHAPE | layers("ccfc")),
    ("Lfm2", SHAPE | layers("cf") | {"conv_L_cache": 5, "conv_bias": True}),
    ("Lfm2Moe", SHAPE | layers("ccf") | EXPERTS | {"num_dense_layers": 1}),
    ("FalconH1", SHAPE | MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64}),
    ("Bamba", SHAPE | MAMBA | {"attn_layer_indices": [1], "mamba_chunk_size": 16}),
    ("OlmoHybrid", DENSE),
    ("GraniteMoeHybrid", SHAPE | MAMBA | layers("mam") | {"shared_intermediate_size": 48}),
]  # fmt: skip


def random_policy(name: str, shape: dict[str, Any], world: World, **how: Any) -> Policy:
    hf = random_hf(getattr(transformers, f"{name}Config")(**shape), 0)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in hf.named_parameters():
            if parameter_name.endswith(
                "A_log"
            ):  # a state that lasts: else little of it is left of its gradient
                parameter.uniform_(-4, -1, generator=draws)
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.5 * parameter.shape[-1] ** -0.5, generator=draws)
    return build_policy(hf, world, ModelConfig(path=Path("x"), **how))


def siblings() -> list[Int32]:
    """Rows of 6 to 90 tokens, of which some begin alike: chunks of linear attention have 64."""
    rows = [*tiny.rows(3), *tiny.rows(2, seed=1, shortest=70, longest=90)]
    return [*rows, np.concatenate([rows[0][:5], rows[1]]).astype(np.int32)]


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().detach().clone() for n, p in policy.named_tensors()}  # type: ignore[attr-defined]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {n: p.grad.full_tensor() for n, p in policy.named_tensors() if p.grad is not None}  # type: ignore[attr-defined]
    policy.zero_grad()
    return found


OFTEN = (0, 4, 8, 10, 14, 18, 21, 24)
CASES = [
    pytest.param(
        *case, id=f"{index}-{case[0]}", marks=() if index in OFTEN else pytest.mark.nightly
    )
    for index, case in enumerate(TABLE)
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_pack_gives_what_each_row_gives_alone_and_in_transformers(
    name: str, shape: dict[str, Any], world: World
) -> None:
    policy, rows = random_policy(name, shape, world), siblings()
    own = type(policy.hf)._from_config(copy.deepcopy(policy.hf.config), attn_implementation="eager")
    own.load_state_dict(weights(policy), strict=False)
    wanted = []
    for row in rows:
        tokens = torch.from_numpy(row)[None].long()
        logprobs = own(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        wanted.append(logprobs.gather(1, tokens[0, 1:, None])[PROMPT - 1 :, 0])
    torch.autograd.backward(-torch.cat(wanted).sum())
    theirs = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    alone = [policy(pack([row], [PROMPT]), 1.0)[0] for row in rows]
    torch.autograd.backward(-torch.cat(alone).sum())
    apiece = gradients(policy)
    for share in (True, False):
        together, _ = policy(pack(rows, [PROMPT] * len(rows), share_prefixes=share), 1.0)
        torch.autograd.backward(-together.sum())
        found = gradients(policy)
        for logprobs, grads in ((wanted, theirs), (alone, apiece)):
            torch.testing.assert_close(together, torch.cat(logprobs), rtol=1e-6, atol=1e-6)
            assert whole_apart(found, grads) < 5e-6  # 1e-6 and less but for deep ones
            # Of a decay much is cancelled: a state that rows share is some 1e-1 off.
            assert apart(found, grads) < 1e-4


def whole_apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Difference of two gradients, as a share of the norm."""
    assert found.keys() == wanted.keys()
    both = [torch.cat([each[name].flatten() for name in wanted]) for each in (found, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
@pytest.mark.parametrize("name", ["enable_gradient_checkpointing", "use_torch_compile"])
def test_a_layer_that_runs_again_or_is_compiled_gives_the_same_gradient(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced and cut, but not written as C++: inductor spends minutes on that.
    compiler = functools.partial(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: compiler(layer, **how))
    found = []
    for chosen in (False, True):
        policy = random_policy("Qwen3_5Text", DENSE | layers("lf"), world, **{name: chosen})
        packs = [pack(tiny.rows(3, seed=seed), [PROMPT] * 3) for seed in (0, 1)]
        first, second = (policy(each, 1.0)[0].sum() for each in packs)
        torch.autograd.backward(first - 2 * second)  # the first one's layers run again last
        found.append(gradients(policy))
    assert whole_apart(*found) < 1e-6


@pytest.mark.parametrize(
    ("name", "shape", "targets"),
    [
        ("Qwen3Next", MIXTURE, ("in_proj_qkvz", "in_proj_ba", "out_proj")),
        ("Qwen3_5Text", DENSE, "all-linear"),
    ],
)
def test_adapters_of_linear_attention_learn_in_a_pack_what_they_learn_of_rows(
    name: str, shape: dict[str, Any], targets: Any, world: World
) -> None:
    policy = random_policy(name, shape, world, lora_rank=4, target_modules=targets)
    assert any("linear_attn.in_proj_" in name for name in weights(policy) if ".lora_A" in name)
    with torch.no_grad():
        for name, parameter in policy.named_tensors():
            if ".lora_B" in name:
                parameter.add_(0.1)
    rows = siblings()
    torch.autograd.backward(sum(policy(pack([row], [PROMPT]), 1.0)[0].sum() for row in rows))
    apiece = gradients(policy)
    torch.autograd.backward(policy(pack(rows, [PROMPT] * len(rows)), 1.0)[0].sum())
    assert whole_apart(gradients(policy), apiece) < 1e-6


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5Text"])
def test_two_ranks_learn_what_one_process_learns(
    name: str, tmp_path: Path, world: World, ranks: Ranks
) -> None:
    random_checkpoint(name, tmp_path / "model")
    torch.save(train(tmp_path / "model", world, TRAININGS["AdamW"]), tmp_path / "alone.pt")
    layouts = [{"data_shard": 2}]
    if name == "Qwen3Next":
        layouts.append({"data_shard": 2, "expert": 2})
    ranks.run("beside_one", tmp_path, layouts, output=tmp_path / "output", ranks=2)
    found = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert len(found) == len(layouts)
    for layout, (loss, gradient, weight) in found:
        # Of a decay that leaves nothing of a state, a gradient is little more than rounding.
        assert loss < 1e-6 and gradient < 1e-4 and weight < 1e-4, layout


@pytest.mark.parametrize("shared", ["sequence", "tensor"])
def test_ranks_that_would_share_a_state_are_refused_in_one_line(shared: str) -> None:
    world = Mock(spec=World, sequence=None, tensor=None, experts=None)
    sharers = Mock(size=2) if shared == "sequence" else Mock(size=Mock(return_value=2))
    setattr(world, shared, sharers)
    hf = random_hf(transformers.Qwen3_5TextConfig(**DENSE), 0)
    with pytest.raises(UserError, match=r"layers that keep a state .* are not shared") as raised:
        build_policy(hf, world, ModelConfig(path=Path("x")))
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3Next", "Qwen3_5MoeText"])
def test_engines_get_a_version_under_the_names_that_the_checkpoint_has(
    name: str, tmp_path: Path, world: World
) -> None:
    make = vision.random_checkpoint if name == "Qwen3_5" else random_checkpoint
    make(name, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    policy = build_policy(open_hf(tmp_path), world, ModelConfig(path=tmp_path))
    sent = {name: tuple(weight.shape) for name, weight in policy.published_weights()}
    assert sent == {name: shape for name, shape in stored.items() if ".visual." not in name}
    layer = "model.language_model.layers.0" if name == "Qwen3_5" else "model.layers.0"
    assert sent[f"{layer}.linear_attn.conv1d.weight"][1] == 1
    assert (f"{layer}.mlp.experts.3.down_proj.weight" in sent) is (name != "Qwen3_5")


def test_a_layer_that_is_told_no_rows_is_refused_in_one_line() -> None:
    shape = SHAPE | dict(
        mamba_d_state=8,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_offset=1,
        expert_layer_offset=1,
    )
    config = transformers.JambaConfig(**shape, use_mamba_kernels=False)
    with pytest.raises(UserError, match="jamba has layers of other kinds than attention"):
        random_hf(config, 0)
