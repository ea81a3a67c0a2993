from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model import policy
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import build_policy, open_hf, random_hf
from meshrl.trainer.offline.reward_training import load_classifier
from meshrl.trainer.ranks.world import World

from . import tiny

LAYERS: dict[str, Any] = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
SHAPE: dict[str, Any] = dict(**LAYERS, vocab_size=64, hidden_size=32, intermediate_size=48)
HYBRID: dict[str, Any] = dict(
    **SHAPE, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4,
)  # fmt: skip
JAMBA: dict[str, Any] = dict(**SHAPE, mamba_d_state=8, num_experts=1, use_mamba_kernels=False)
NEMOTRON: dict[str, Any] = dict(**SHAPE, head_dim=8)


def verdict(name: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The check's message for the small copy, whatever the list of model types says."""
    monkeypatch.setattr(policy, "refusal", lambda _: "")
    monkeypatch.setattr(policy, "_faults", {})
    try:
        random_hf(getattr(transformers, f"{name}Config")(**shape), 0)
    except UserError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("MiniMax", {**NEMOTRON, "num_local_experts": 2}, "rows of a pack would see each other: a state goes"),
        ("Mamba", {**SHAPE, "state_size": 4}, "MambaMixer gets no row boundaries: packed training"),
        ("Bart", {"d_model": 32}, "it may count positions over the whole pack"),
        ("Pegasus", {"d_model": 32}, "it may count positions over the whole pack"),
        ("Phimoe", SHAPE, "it draws random numbers while it trains"),
        ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "it cannot compute packs: "),
        ("Falcon", {**SHAPE, "alibi": True}, "packed training does not support alibi"),
        ("Llama", {**SHAPE, "logit_scale": 0.5}, "off of transformers' own, also by itself"),
        ("Phi", SHAPE, "the output embedding has a bias, which is not supported"),
    ],
)  # fmt: skip
def test_a_model_that_computes_something_else_in_a_pack_is_refused_in_a_line(
    name: str, shape: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = verdict(name, shape, monkeypatch)
    assert says in found and "\n" not in found
    assert found.endswith("; want a model that docs/reference/models.md says is trained")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Nemotron", NEMOTRON), ("StableLm", SHAPE), ("Falcon", SHAPE),
        ("Falcon", {**SHAPE, "new_decoder_architecture": True, "num_kv_heads": 2}),
        ("GPT2", {"resid_pdrop": 0.5}), ("OPT", {"layerdrop": 0.5}),
    ],
)  # fmt: skip
def test_a_model_that_computes_the_same_in_a_pack_is_trained(
    name: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict(name, shape, monkeypatch) == ""


def test_a_classifier_that_computes_something_else_in_a_pack_is_refused_in_a_line(
    tmp_path: Path,
) -> None:
    shapes = {"Qwen3_5Text": HYBRID, "Nemotron": NEMOTRON, "Jamba": JAMBA}
    for name, shape in shapes.items():
        config = getattr(transformers, f"{name}Config")(**shape, num_labels=1, pad_token_id=0)
        factory: Any = transformers.AutoModelForSequenceClassification
        factory.from_config(config).save_pretrained(tmp_path / name)
    for trained in ("Nemotron", "Qwen3_5Text"):
        load_classifier(tmp_path / trained, 0)
    with pytest.raises(UserError, match="JambaMambaMixer gets no row boundaries"):
        load_classifier(tmp_path / "Jamba", 0)


@pytest.mark.parametrize("name", ["Nemotron", "Falcon"])
def test_layers_that_hand_on_no_layout_find_it_when_activations_are_computed_again(
    name: str, world: World
) -> None:
    config = getattr(transformers, f"{name}Config")(**NEMOTRON if name == "Nemotron" else SHAPE)
    gradients = []
    for again in (False, True):
        model = ModelConfig(path=Path("x"), enable_gradient_checkpointing=again)
        trained = build_policy(random_hf(config, 0), world, model)
        packs = [pack(tiny.rows(3, seed=seed), [2] * 3) for seed in (0, 1)]
        found = [trained(each, 1.0)[0].sum() for each in packs]
        (found[0] - 2 * found[1]).backward()  # the first one's layers run again after the second's
        gradients.append([each.grad.full_tensor() for _, each in trained.named_tensors()])  # type: ignore[union-attr]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["jamba", "bart", "musicgen", "gemma3"])
def test_a_checkpoint_of_such_a_type_is_refused_before_anything_is_made_of_it(
    kind: str, tmp_path: Path
) -> None:
    described = {"model_type": kind, "text_config": {}}
    if kind == "gemma3":
        described["vision_config"] = {"depth": 1}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=f"{kind}.*; want a model that docs/reference/models.md"):
        open_hf(tmp_path)
