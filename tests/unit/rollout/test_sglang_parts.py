"""The requests and payloads of the sglang engine, without a server."""

from __future__ import annotations

import base64
import importlib.util
import os
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from meshrl.config.machine import AssumedMachine, Assumptions
from meshrl.contract.errors import InfraError, UserError
from meshrl.contract.types import GenerateRequest, SamplingParams
from meshrl.rollout.engines.sglang import PLUGIN_DIR, Config
from meshrl.rollout.engines.vllm import Config as VllmConfig
from meshrl.rollout.server_engine.request import ServerRequest
from meshrl.rollout.server_engine.sglang_messages import (
    EventReader,
    ServerFacts,
    named_empty_tensor,
    request_body,
)
from meshrl.rollout.streams import check_request

FACTS = ServerFacts(
    ranks=1, overlaps=True, increments=True, eos_token_ids=(2,), vocab_size=50_000, mask_tokens=4096
)


def sampling_request(**what: Any) -> ServerRequest:
    default = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": (2,)}
    rest = {"token_ids": [5], "max_tokens": 9, "seed": 3, "stream_interval": 4}
    return ServerRequest(**{**default, **rest, **what})


def test_the_payload_is_one_named_tensor_and_calls_nothing_else() -> None:
    raw = base64.b64decode(named_empty_tensor("/dev/shm/ä/1"))
    ((name, tensor),) = pickle.loads(raw)
    assert (name, tensor.numel()) == ("/dev/shm/ä/1", 0)
    assert torch.is_tensor(tensor)
    called = [argument for code, argument, _ in pickletools.genops(raw) if code.name == "GLOBAL"]
    assert called == ["torch Tensor"]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PLUGIN_DIR)
    spec = importlib.util.spec_from_file_location("plugin", PLUGIN_DIR / "meshrl_sglang.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """Takes weights as SGLang's models do."""

    def __init__(self) -> None:
        self.taken: dict[str, torch.Tensor] = {}

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(())

    def load_weights(self, tensors: Any) -> None:
        self.taken = {name: tensor.clone() for name, tensor in tensors}


def test_the_loader_hands_every_tensor_of_a_staged_version_to_the_model_and_forgets_pictures(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Mock()
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.mm_schedule", server)
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Model()
    plugin.load(model, [(str(tmp_path), torch.Tensor())])
    assert model.taken.keys() == tensors.keys()
    assert all(torch.equal(model.taken[name], tensor) for name, tensor in tensors.items())
    server.embedding_cache.clear.assert_called_once_with()
    with pytest.raises(FileNotFoundError, match=r"no \S+safetensors in"):
        plugin.load(model, [(str(tmp_path / "none"), torch.Tensor())])


@pytest.mark.parametrize(
    ("stops", "ignored"), [((2,), False), ((2, 9), False), ((), True), ((9,), True)], ids=str
)
def test_the_server_stops_a_response_only_where_its_own_eos_is_requested(
    stops: tuple[int, ...], ignored: bool
) -> None:
    params = request_body("r", sampling_request(stop_token_ids=stops), "1.0", FACTS)[
        "sampling_params"
    ]
    assert params["ignore_eos"] is ignored
    assert params["stop_token_ids"] == (None if ignored else list(stops))


def test_a_request_with_top_k_or_top_p_asks_for_the_sampling_mask() -> None:
    whole = request_body("r", sampling_request(), "1.0", FACTS)
    assert (whole["return_sampling_mask"], whole["sampling_params"]["top_k"]) == (False, -1)
    cut = request_body("r", sampling_request(top_k=20, top_p=0.9), "1.0", FACTS)
    assert (cut["return_sampling_mask"], cut["sampling_params"]["top_k"]) == (True, 20)
    greedy = request_body("r", sampling_request(top_k=20, temperature=0.0), "1.0", FACTS)
    assert greedy["return_sampling_mask"] is False
    with pytest.raises(
        UserError, match=r"top_p 0\.9 with top_k -1 and min_p 0\.0: .* up to 4096 tokens"
    ):
        request_body("r", sampling_request(top_p=0.9), "1.0", FACTS)


def event(tokens: list[int], finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    logprobs = [[-0.5, token, None] for token in tokens]
    meta |= {"finish_reason": finish, "output_token_logprobs": logprobs}
    return {"output_ids": tokens, "meta_info": meta}


def test_the_servers_message_about_a_failed_request_is_kept() -> None:
    reader = EventReader(increments=True, cut=False)
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


def test_tokens_that_events_repeat_are_read_once() -> None:
    reader = EventReader(increments=False, cut=False)
    chunks = [reader.read(event(list(range(n)))) for n in (1, 4, 4, 6)]
    assert [list(chunk.tokens) for chunk in chunks] == [[0], [1, 2, 3], [], [4, 5]]


@pytest.mark.parametrize("joint", [False, True])
def test_engines_that_cut_differently_never_sample_one_run(joint: bool) -> None:
    both = SamplingParams(top_k=20, top_p=0.7, joint_cut=joint)
    asked = GenerateRequest(request_id="r", prompt_ids=np.array([5], np.int32), sampling=both)
    kinds = {Config.joint_cut: "sglang", VllmConfig.joint_cut: "vllm", False: "torch"}
    accepting = []
    for rule, kind in kinds.items():
        try:
            check_request(asked, joint_cut=rule)
            accepting.append(kind)
        except UserError as error:
            assert "top_k 20 with top_p 0.7" in str(error)
    assert accepting == (["sglang"] if joint else ["torch"])
    for alone in ({"top_k": 20}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.7, "temperature": 0.0}):
        alike = replace(asked, sampling=SamplingParams(joint_cut=joint, **alone))  # type: ignore[arg-type]
        check_request(alike, joint_cut=not joint)


def test_a_key_may_begin_with_a_dash(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--api-key')\n"
        "print(parser.parse_args().api_key)\n"
    )
    path = os.pathsep.join([str(PLUGIN_DIR), str(tmp_path)])
    found = subprocess.run(
        [sys.executable, "-m", "meshrl_sglang_server"],
        env={**os.environ, "PYTHONPATH": path, "SGLANG_API_KEY": "-key"},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "-key", found.stderr


@pytest.mark.parametrize(
    ("name", "tied", "refused"),
    [
        ("Qwen3MoeForCausalLM", True, True),
        ("Qwen3MoeForCausalLM", False, False),
        ("Qwen3ForCausalLM", True, False),
    ],
)
def test_a_mixture_with_tied_embeddings_is_refused(name: str, tied: bool, refused: bool) -> None:
    config = {"architectures": [name], "tie_word_embeddings": tied}
    here = AssumedMachine(Assumptions.model_validate({"models": {"m": config}}))
    found = [*Config(url="http://127.0.0.1:1").faults(here, Path("m"))]
    assert len(found) == refused
    if refused:
        assert found[0][1].startswith(f"SGLang gives {name} an output embedding of its own, and m ")


@pytest.mark.parametrize(
    ("options", "unseen"),
    [
        ({"url": "http://gpu-7:30000"}, True),
        ({"url": "http://gpu-7:30000", "staging": "/mnt/both"}, False),
        ({"url": "http://127.0.0.1:30000"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_server_elsewhere_sees_no_files_of_this_machine(
    options: dict[str, Any], unseen: bool
) -> None:
    assert Config.model_validate(options).stages_out_of_sight is unseen
    assert VllmConfig.model_validate(options).stages_out_of_sight is unseen
    assert not VllmConfig.model_validate({**options, "update": "native"}).stages_out_of_sight
