from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ActorConfig, ModelConfig
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import build_policy, random_hf
from meshrl.trainer.model.routing import BIAS, ExpertBalance, routers
from meshrl.trainer.ranks.world import World

from . import rank_work, tiny

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
    learner: Learner = rank_work.make_of(
        build_policy(hf, world, ModelConfig(path=path)), world, optim=optim, **actor
    )
    rows = rank_work.trajectories()
    by_uid = {row.uid: row for row in rows}
    found = []
    for step in range(steps):
        made = learner.schedule(rank_work.batch(rows))
        found.append(learner.learn(made, [by_uid[uid] for uid in made.uids(0)], step))
    return found


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
