from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model import sharding
from meshrl.trainer.model.lora import BaseModel
from meshrl.trainer.model.policy import build_policy, open_hf, random_hf
from meshrl.trainer.ranks.world import World

from . import tiny
from .ranks import Ranks

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
KINDS = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixture": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "packed mixture": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "latent": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, n_shared_experts=1, moe_intermediate_size=24, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "parallel", "size"),
    [
        ("tied", {}, 2),
        ("mixture", {"expert": 2}, 4),
        ("packed mixture", {"expert": 2}, 2),
        ("latent", {"expert": 2}, 2),
        ("mixture", {"tensor": 2}, 4),
    ],
    ids=str,
)
def test_each_rank_reads_its_shards_and_writes_its_files_and_together_they_are_the_model(
    tmp_path: Path, ranks: Ranks, kind: str, parallel: Mapping[str, int], size: int
) -> None:
    random_hf(KINDS[kind], 0).save_pretrained(tmp_path / "model", max_shard_size="10KB")
    ranks.run(
        "load_and_export",
        tmp_path / "model",
        parallel,
        output=tmp_path / "output",
        ranks=size,
    )
    lines = (tmp_path / "output").read_text().splitlines()
    shares = [list(map(int, line.split())) for line in lines if line[0].isdigit()]
    assert len(shares) == size
    own = [numbers for _, numbers, _ in shares]
    if "tensor" in parallel:  # norms, routers and a vocabulary of 37 are whole on each of the two
        assert shares[0][2] < sum(own) < 2 * shares[0][2]
    else:
        assert sum(own) == shares[0][2]
        assert max(own) < 1.1 * shares[0][2] / size

    export = tmp_path / "export"
    assert {file.read_text() for file in export.glob("*.rank")} == set(map(str, range(size)))
    written, start = BaseModel(export), BaseModel(tmp_path / "model")
    assert written.names == start.names
    assert all(torch.equal(written.tensor(name), start.tensor(name)) for name in start.names)
    assert AutoModelForCausalLM.from_pretrained(export).config.model_type == KINDS[kind].model_type


def test_a_checkpoint_that_lacks_a_tensor_or_has_another_shape_is_refused(
    tmp_path: Path, world: World
) -> None:
    random_hf(tiny.config(), 0).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for damaged, reason in (
        ({n: t for n, t in tensors.items() if n != name}, f"has no weights for hf.{name}"),
        ({**tensors, name: tensors[name][:-1]}, f"{name} is .*, and config.json wants"),
    ):
        save_file(damaged, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=reason):
            build_policy(open_hf(tmp_path), world, ModelConfig(path=tmp_path))


def test_where_transformers_reads_no_shards_the_model_is_read_whole(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "version", lambda _: "4.57.1")
    assert not sharding.is_empty(open_hf(tiny_path))
