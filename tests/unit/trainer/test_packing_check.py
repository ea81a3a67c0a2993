from __future__ import annotations

from typing import Any

import pytest
import transformers

from meshrl.contract.errors import UserError
from meshrl.trainer.model import policy
from meshrl.trainer.model.policy import random_hf

LAYERS: dict[str, Any] = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
SHAPE: dict[str, Any] = dict(**LAYERS, vocab_size=64, hidden_size=32, intermediate_size=48)
HYBRID: dict[str, Any] = dict(
    **SHAPE, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4,
)  # fmt: skip
NEMOTRON: dict[str, Any] = dict(**SHAPE, head_dim=8)


def verdict(name: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the small copy shows, whatever the list of model types says."""
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
        ("Qwen3_5Text", HYBRID, "rows of a pack would see each other: a state goes from one"),
        ("Qwen3_5MoeText", HYBRID, "rows of a pack would see each other: a state goes from one"),
        ("Bart", {"d_model": 32}, "it may count positions over the whole pack"),
        ("Pegasus", {"d_model": 32}, "it may count positions over the whole pack"),
        ("Phimoe", SHAPE, "it draws random numbers while it trains"),
        ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "it cannot compute packs: "),
        ("Falcon", {**SHAPE, "alibi": True}, "packed training does not support alibi"),
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
