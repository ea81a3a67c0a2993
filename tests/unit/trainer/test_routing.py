"""The trainer sends tokens to the experts that sampled them, and keeps its experts equally busy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.routed_experts import RoutedExperts
from meshrl.contract.types import Trajectory, Uid
from meshrl.trainer.config import ActorConfig, ModelConfig
from meshrl.trainer.model.packing import Pack, pack, share_out
from meshrl.trainer.model.parallel import SequenceGroup
from meshrl.trainer.model.policy import Policy, build_policy, random_hf
from meshrl.trainer.model.routing import BIAS, ExpertBalance, Routing, routers
from meshrl.trainer.ranks.world import World

from . import rank_work, tiny

SHAPE: dict[str, Any] = dict(
    vocab_size=tiny.VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256,
)  # fmt: skip
MODELS = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=6, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
        decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "deepseek_v3": DeepseekV3Config(
        **(SHAPE | {"num_key_value_heads": 4}), q_lora_rank=16, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=8,
        n_shared_experts=1, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=24,
    ),
    "qwen3_next": Qwen3NextConfig(
        **SHAPE, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    ),
    "gpt_oss": GptOssConfig(
        **SHAPE, head_dim=8, num_local_experts=6, num_experts_per_tok=2, sliding_window=9,
    ),
}  # fmt: skip


def routers_of(policy: Policy) -> list[torch.nn.Module]:
    return [m for m in policy.hf.modules() if type(m).__name__.endswith("Router")]


def chosen(policy: Policy, given: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, layers, k] of the forward pass, zeros in dense layers, and log-probs [N]."""
    layers = list(policy.hf.get_decoder().layers)
    taken: dict[int, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, at=at: taken.update({at: out[-1]}))
        for at, layer in enumerate(layers)
        for module in layer.modules()
        if type(module).__name__.endswith("Router")
    ]
    logprobs, _ = policy(given, 1.0)
    for hook in hooks:
        hook.remove()
    empty = torch.zeros_like(next(iter(taken.values())))
    return torch.stack([taken.get(at, empty) for at in range(len(layers))], 1), logprobs


def perturb(policy: Policy) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for router in routers_of(policy):
            weight = router.weight
            assert isinstance(weight, torch.Tensor)
            weight.add_(torch.randn_like(weight) * 3 * weight.std())


@pytest.mark.parametrize("name", MODELS)
def test_a_perturbed_router_takes_the_recorded_experts_and_still_learns(name: str) -> None:
    policy = Policy(random_hf(MODELS[name], seed=3))
    rows = tiny.rows(3)
    starts = [len(row) // 2 for row in rows]
    with torch.no_grad():
        recorded, _ = chosen(policy, pack(rows, starts))
    perturb(policy)
    routing = policy.replay_routing()
    assert (routing.layers, routing.chosen) == recorded.shape[1:]
    split = torch.split(recorded.to(torch.uint8), [len(row) for row in rows])
    told = pack(rows, starts, experts=[part.numpy() for part in split])
    free, _ = chosen(policy, pack(rows, starts))
    taken, logprobs = chosen(policy, told)
    assert not torch.equal(free.sort(-1)[0], recorded.sort(-1)[0])
    torch.testing.assert_close(taken, recorded)
    logprobs.sum().backward()
    for router in routers_of(policy):
        weight = router.weight
        assert isinstance(weight, torch.Tensor) and weight.grad is not None
        assert bool(weight.grad.abs().max() > 0)


def test_tokens_without_a_record_go_where_the_router_says() -> None:
    policy = Policy(random_hf(MODELS["qwen3_moe"], seed=3))
    rows = tiny.rows(2)
    own, _ = chosen(policy, pack(rows, [1, 1]))
    policy.replay_routing()
    nothing = [np.zeros((len(row), 3, 3), np.uint8) for row in rows]
    taken, _ = chosen(policy, pack(rows, [1, 1], experts=nothing))
    torch.testing.assert_close(taken, own)


def test_a_prefix_is_shared_as_far_as_its_experts_are_the_same() -> None:
    row = np.arange(9, dtype=np.int32)
    same = np.tile(np.array([[0, 1]], np.uint8), (9, 1, 1))
    other = same.copy()
    other[5] = [1, 2]
    both = pack([row, row], [4, 4], experts=[same, same])
    assert both.input_ids.shape[1] == 9
    apart = pack([row, row], [4, 4], experts=[same, other])
    assert apart.input_ids.shape[1] == 9 + 4
    assert apart.experts is not None
    assert apart.experts[:, 0].tolist() == [[0, 1]] * 9 + [[1, 2]] + [[0, 1]] * 3


def test_experts_of_another_model_are_refused() -> None:
    def row(experts: np.ndarray[Any, Any] | None) -> Trajectory:
        return Trajectory(
            uid=Uid("r", "t", 0),
            tokens=np.zeros(4, np.int32),
            loss_mask=np.zeros(4, np.uint8),
            rollout_logprobs=np.zeros(4, np.float32),
            spans=(),
            routed_experts=None if experts is None else RoutedExperts.pack(experts),
        )

    routing = Routing(layers=2, experts=5, chosen=2)
    assert routing.of(row(None)).shape == (4, 2, 2)
    assert routing.of(row(np.zeros((4, 0, 0), np.uint8))).shape == (4, 2, 2)
    for wrong in (np.zeros((4, 3, 2), np.uint8), np.full((4, 2, 2), 5, np.uint8)):
        with pytest.raises(CorruptError, match=r"row r/t/0.0: experts up to .* the policy has 5"):
            routing.of(row(wrong))


def test_a_dense_model_has_nothing_to_replay() -> None:
    policy = Policy(random_hf(tiny.config(), 0))
    with pytest.raises(UserError, match=r"rollout.routing_replay: Qwen3ForCausalLM has no router"):
        policy.replay_routing()


def test_ranks_that_share_a_pack_have_the_experts_of_their_own_tokens() -> None:
    row = np.arange(7, dtype=np.int32)
    experts = np.stack([row, row + 1], -1)[:, None].astype(np.uint8)
    whole = pack([row], [3], share_prefixes=False, experts=[experts])
    shares = [
        share_out(whole, SequenceGroup(group=cast(Any, None), rank=rank, size=2)).experts
        for rank in range(2)
    ]
    assert whole.experts is not None and shares[0] is not None and shares[1] is not None
    assert [len(share) for share in shares] == [4, 4]  # the last token of the second is padding
    torch.testing.assert_close(torch.cat(shares)[:7], whole.experts)  # type: ignore[arg-type]
    assert not shares[1][-1].any()


MIXTURE: Mapping[str, Any] = {
    **tiny.config().to_dict(),
    "architectures": None,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def qwen() -> Any:
    return random_hf(
        Qwen3MoeConfig(**MIXTURE | {"model_type": "qwen3_moe", "num_experts": 4}), seed=0
    )


def deepseek() -> Any:
    shape = {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    return random_hf(DeepseekV3Config(**MIXTURE | shape), seed=0)


def test_the_auxiliary_loss_is_that_of_transformers(world: World, tmp_path: Path) -> None:
    hf = qwen()
    policy = build_policy(hf, world, ModelConfig(path=tmp_path))
    balance = ExpertBalance(hf, ActorConfig(router_aux_loss_coef=0.1), world)
    logits: list[torch.Tensor] = []
    for router in routers(hf):
        router.register_forward_hook(lambda _, __, output: logits.append(output[0].detach()))
    row = tiny.rows(1)[0]
    packed = pack([row], [2])
    with balance.recorded(packed):
        policy(packed, 1.0)
    part, whole = balance.loss()
    wanted = load_balancing_loss_func(tuple(logits), 4, 2)
    assert [part.item(), whole] == pytest.approx([wanted.item()] * 2, rel=1e-5)
    assert part.requires_grad


def train(hf: Any, world: World, path: Path, steps: int, **actor: float) -> list[dict[str, Any]]:
    """Metrics of each step, where the rewards of the rows are all alike: nothing else is learned."""
    optim = {"lr": 3e-3, "clip_grad": 1e9, "weight_decay": 0.0}
    policy = build_policy(hf, world, ModelConfig(path=path))
    learner = rank_work.make_of(policy, world, optim=optim, **actor)
    rows = rank_work.trajectories()
    return [rank_work.learn(learner, rows, step) for step in range(steps)]


def lopsided(hf: Any) -> Any:
    """Every token finds the first expert twice as good."""
    for router in routers(hf):
        with torch.no_grad():
            router.weight.mul_(20.0)
            router.weight[0] += router.weight[1]
    return hf


def test_the_auxiliary_loss_makes_experts_equally_busy(world: World, tmp_path: Path) -> None:
    alone = train(lopsided(qwen()), world, tmp_path, 12)
    balanced = train(lopsided(qwen()), world, tmp_path, 12, router_aux_loss_coef=1.0)
    assert "actor/router_aux_loss" not in alone[-1]
    first, last = balanced[0], balanced[-1]
    assert last["actor/router_aux_loss"] < first["actor/router_aux_loss"]
    assert last["actor/router_max_violation"] < first["actor/router_max_violation"]
    assert first["actor/loss"] == pytest.approx(alone[0]["actor/loss"], abs=1e-6)


def test_the_bias_of_idle_experts_rises_and_that_of_busy_ones_falls(
    world: World, tmp_path: Path
) -> None:
    hf = lopsided(deepseek())
    found = train(hf, world, tmp_path, 12, moe_router_bias_update_rate=0.02)
    (router,) = routers(hf)
    bias = getattr(router, BIAS)
    assert bias.max() > bias.min()
    assert found[-1]["actor/router_max_violation"] < found[0]["actor/router_max_violation"]
    stored = dict(hf.named_buffers())
    assert any(name.endswith(BIAS) and tensor is bias for name, tensor in stored.items())


@pytest.mark.parametrize(
    ("make", "option", "wrong"),
    [
        (lambda: random_hf(tiny.config(), 0), "router_aux_loss_coef", "has no router of experts"),
        (qwen, "moe_router_bias_update_rate", f"Qwen3MoeForCausalLM have no {BIAS}"),
    ],
)
def test_a_model_that_cannot_be_balanced_is_refused_in_one_line(
    world: World, make: Any, option: str, wrong: str
) -> None:
    with pytest.raises(UserError, match=wrong) as raised:
        ExpertBalance(make(), ActorConfig.model_validate({option: 0.1}), world)
    assert str(raised.value).startswith(f"actor.{option}: ")
