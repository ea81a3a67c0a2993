"""The headers of a checkpoint's weights, which somebody else has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrl.contract.errors import UserError
from meshrl.rollout.server_engine.checkpoint import read_checkpoint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a header of 0 bytes"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes, where 0 is the most"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "where 2 is the most"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "nested too deeply"),
        ((2).to_bytes(8, "little") + b"[]", "no object"),
        ((8).to_bytes(8, "little") + b'{"a":{}}', "'shape'"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "not subscriptable"),
        ((20).to_bytes(8, "little") + b'{"a":{"shape":"no"}}', "invalid literal"),
    ],
)
def test_weights_with_a_hostile_header_are_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    sizes = {"vocab_size": 9, "max_position_embeddings": 9}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: unreadable weights: ") as caught:
        read_checkpoint(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
