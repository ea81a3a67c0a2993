"""What the sglang engine says to a server, without one."""

from __future__ import annotations

import base64
import importlib.util
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshrl.contract.errors import InfraError, UserError
from meshrl.rollout.engines._server.request import Ask
from meshrl.rollout.engines._server.tensor_ranges import read_pieces
from meshrl.rollout.engines._sglang.client import Facts, _Reader, request_body
from meshrl.rollout.engines._sglang.kind import PLUGIN_DIR
from meshrl.rollout.engines._sglang.payload import named_empty_tensor
from meshrl.rollout.engines._sglang.plan import plan, update_body

FACTS = Facts(
    ranks=1, overlaps=True, increments=True, eos_token_ids=(2,), vocab_size=50_000, mask_tokens=4096
)


def asked(**what: Any) -> Ask:
    default = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": (2,)}
    rest = {"token_ids": [5], "max_tokens": 9, "seed": 3, "stream_interval": 4}
    return Ask(**{**default, **rest, **what})


def test_the_payload_is_one_named_tensor_and_calls_nothing_else() -> None:
    raw = base64.b64decode(named_empty_tensor("/dev/shm/ä/1"))
    ((name, tensor),) = pickle.loads(raw)
    assert (name, tensor.numel()) == ("/dev/shm/ä/1", 0)
    assert torch.is_tensor(tensor)
    called = [argument for code, argument, _ in pickletools.genops(raw) if code.name == "GLOBAL"]
    assert called == ["torch Tensor"]


def load_plugin() -> Any:
    spec = importlib.util.spec_from_file_location("plugin", PLUGIN_DIR / "meshrl_sglang.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """Takes weights as SGLang's models do."""

    def __init__(self) -> None:
        self.taken: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors: Any) -> None:
        self.taken = {name: tensor.clone() for name, tensor in tensors}


def test_the_loader_hands_every_tensor_of_a_staged_version_to_the_model(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    model, plugin = Model(), load_plugin()
    plugin.load(model, [(str(tmp_path), torch.Tensor())])
    assert model.taken.keys() == tensors.keys()
    assert all(torch.equal(model.taken[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(FileNotFoundError, match=r"no \S+safetensors in"):
        plugin.load(model, [(str(tmp_path / "none"), torch.Tensor())])


def test_tensors_of_a_bucket_begin_where_their_dtype_can(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(3, dtype=torch.bfloat16),  # 6 bytes: what follows would begin at 6
        "b": torch.ones(5),
        "c": torch.ones(1, dtype=torch.float16),
        "d": torch.ones(7),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    pieces = read_pieces(tmp_path / "model.safetensors")
    assert {piece.name for piece in pieces} == tensors.keys()
    (whole,) = plan(pieces, 1 << 20)
    offset = 0
    for piece in whole.pieces:
        assert offset % tensors[piece.name].element_size() == 0
        offset += piece.end - piece.start
    assert offset == whole.nbytes == 6 + 20 + 2 + 28
    small = plan(pieces, 8)
    assert sorted(piece.name for bucket in small for piece in bucket.pieces) == sorted(tensors)
    assert all(bucket.nbytes <= 8 or len(bucket.pieces) == 1 for bucket in small)
    assert update_body(whole, group="g", label=None)["flush_cache"] is False


@pytest.mark.parametrize(
    ("stops", "ignored"), [((2,), False), ((2, 9), False), ((), True), ((9,), True)], ids=str
)
def test_the_server_looks_for_stops_only_where_its_own_is_among_them(
    stops: tuple[int, ...], ignored: bool
) -> None:
    params = request_body("r", asked(stop_token_ids=stops), "1.0", FACTS)["sampling_params"]
    assert params["ignore_eos"] is ignored
    assert params["stop_token_ids"] == (None if ignored else list(stops))


def test_a_cut_distribution_is_asked_for_with_its_mask() -> None:
    whole = request_body("r", asked(), "1.0", FACTS)
    assert (whole["return_sampling_mask"], whole["sampling_params"]["top_k"]) == (False, -1)
    cut = request_body("r", asked(top_k=20, top_p=0.9), "1.0", FACTS)
    assert (cut["return_sampling_mask"], cut["sampling_params"]["top_k"]) == (True, 20)
    greedy = request_body("r", asked(top_k=20, temperature=0.0), "1.0", FACTS)
    assert greedy["return_sampling_mask"] is False
    with pytest.raises(UserError, match=r"top_p 0\.9 with top_k -1: .* up to 4096 tokens"):
        request_body("r", asked(top_p=0.9), "1.0", FACTS)


def event(tokens: list[int], finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    logprobs = [[-0.5, token, None] for token in tokens]
    meta |= {"finish_reason": finish, "output_token_logprobs": logprobs}
    return {"output_ids": tokens, "meta_info": meta}


def test_a_servers_own_account_of_a_failed_request_is_kept() -> None:
    reader = _Reader(increments=True, cut=False)
    with pytest.raises(InfraError, match="SGLang failed a request: out of memory"):
        reader.read({"error": {"message": "out of memory"}})
    with pytest.raises(UserError, match="refuses a request: too long"):
        reader.read(event([], {"type": "abort", "message": "too long", "status_code": 400}))
    # In one place an abort repeats the last token, in another it brings the whole response again.
    chunk = reader.read(event([7], {"type": "abort", "message": "gone"}))
    assert (list(chunk.tokens), chunk.finish_reason) == ([], "abort (gone)")
    with pytest.raises(InfraError, match="2 log-probs for 1 tokens"):
        broken = event([7])
        broken["meta_info"]["output_token_logprobs"] *= 2
        reader.read(broken)


def test_events_that_repeat_what_was_said_are_read_once() -> None:
    reader = _Reader(increments=False, cut=False)
    chunks = [reader.read(event(list(range(n)))) for n in (1, 4, 4, 6)]
    assert [list(chunk.tokens) for chunk in chunks] == [[0], [1, 2, 3], [], [4, 5]]
