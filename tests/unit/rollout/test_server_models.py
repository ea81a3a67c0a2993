"""A server that serves another model than the one that is trained is named at the start, with both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrl.contract.errors import UserError
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts
from meshrl.rollout.server_engine.kind import check_same_model

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "vocab_size": 99}


def model(path: Path, **changes: object) -> CheckpointFacts:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return CheckpointFacts(
        path=path, num_bytes=0, shapes={}, tied=False, vocab_size=99, max_length=8, eos_token_ids=()
    )


@pytest.mark.parametrize("key", ["root", "id"])  # vLLM's card has both, SGLang's path is its id
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, "hidden_size is 128; model.path is .*ours, with 64"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"architectures is \['Qwen2ForCausalLM'\]"),
        ({"text_config": CONFIG | {"vocab_size": 7}}, "vocab_size is 7"),
    ],
)
def test_another_model_is_one_line_that_names_both(
    tmp_path: Path, key: str, changes: dict[str, object], said: str
) -> None:
    ours, theirs = model(tmp_path / "ours"), model(tmp_path / "theirs", **changes)
    card = {"data": [{"id": "x", key: str(theirs.path)}]}
    with pytest.raises(
        UserError, match=f"vLLM server at http://a serves .*theirs, whose {said}"
    ) as raised:
        check_same_model("vLLM", "http://a", card, ours)
    assert "\n" not in str(raised.value)


def test_the_same_model_elsewhere_or_under_a_name_is_left_to_the_first_version(
    tmp_path: Path,
) -> None:
    ours = model(tmp_path / "ours")
    copy = model(tmp_path / "copy")
    for root in (str(copy.path), "Qwen/Qwen3-0.6B", "/models/on/another/machine"):
        check_same_model("SGLang", "http://a", {"data": [{"id": root}]}, ours)
