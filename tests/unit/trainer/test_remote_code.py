from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import build_policy, open_hf, random_hf
from meshrl.trainer.ranks.world import World

from . import tiny

CODE = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "{kind}"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
ALONE = """
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect the cache into which transformers copies imported code."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def own_architecture(path: Path, kind: str, more: str = "") -> Path:
    """A checkpoint with code of its own."""
    random_hf(tiny.config(), 0).save_pretrained(path)
    (path / f"modeling_{kind}.py").write_text(CODE.format(kind=kind) + more)
    names = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnForCausalLM"}
    config = json.loads((path / "config.json").read_text()) | {
        "model_type": kind,
        "architectures": ["OwnForCausalLM"],
        "auto_map": {auto: f"modeling_{kind}.{name}" for auto, name in names.items()},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_code_of_a_checkpoint_runs_where_it_is_trusted_which_is_said(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    path = own_architecture(tmp_path / "own", "own_trusted")
    with pytest.raises(UserError, match=r"code of its own, .* want model\.trust_remote_code: true"):
        open_hf(path)
    with caplog.at_level(logging.WARNING):
        hf = open_hf(path, trust_remote_code=True)
    assert "own runs Python files of its own, as this user" in caplog.text
    policy = build_policy(hf, world, ModelConfig(path=path, trust_remote_code=True))
    rows = tiny.rows(3)
    known = build_policy(random_hf(tiny.config(), 0), world, ModelConfig(path=path))
    made = pack(rows, [2] * 3)
    assert type(policy.hf).__name__ == "OwnForCausalLM"
    assert torch.equal(policy(made, 1.0)[0], known(made, 1.0)[0])


def test_a_model_whose_attention_cannot_be_packed_is_refused_when_it_is_opened(
    tmp_path: Path,
) -> None:
    path = own_architecture(tmp_path / "own", "own_alone", ALONE)
    with pytest.raises(UserError, match="rows of a pack would see each other; want a model that"):
        open_hf(path, trust_remote_code=True)
