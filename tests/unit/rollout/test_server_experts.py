"""Experts as vLLM's and SGLang's servers tell them: the forms are those of their sources (0.32 and 0.5.23)."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import InfraError
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.engines import build_engine, sglang, vllm
from meshrl.rollout.server_engine import sglang_messages
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts
from meshrl.rollout.server_engine.request import ServerRequest
from meshrl.rollout.server_engine.response import Chunk, ResponseReader

from .checkpoints import FIRST
from .checkpoints import Checkpoint as Saved

EXPERTS = np.arange(5 * 3 * 2).reshape(5, 3, 2)
"""Experts of five tokens, by three layers."""


def asking(**what: Any) -> ServerRequest:
    fields: dict[str, Any] = {"token_ids": [5, 6, 7], "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    rest = {"max_tokens": 9, "stop_token_ids": (), "seed": 3, "stream_interval": 4}
    return ServerRequest(**(fields | rest | what))


def npy(array: np.ndarray[Any, Any]) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


def vllm_event(experts: str | None) -> dict[str, Any]:
    content = [{"logprob": -1.0}, {"logprob": -2.0}, {"logprob": -3.0}]
    spans = [{"version": "1.0", "start": 0, "end": 3}]
    choice = {"token_ids": [8, 9, 10], "logprobs": {"content": content}, "finish_reason": "length"}
    return {"choices": [{**choice, "weight_versions": spans, "routed_experts": experts}]}


def test_vllm_is_asked_only_where_experts_are_wanted() -> None:
    assert "routed_experts_prompt_start" not in vllm.sampling_params(asking())
    wanted = vllm.sampling_params(asking(experts_from=2))
    assert wanted["routed_experts_prompt_start"] == 2


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_vllms_file_of_numbers_is_read(kind: type[np.generic]) -> None:
    chunk = vllm._chunk(vllm_event(npy(EXPERTS.astype(kind))))
    assert chunk.experts is not None
    np.testing.assert_array_equal(chunk.experts, EXPERTS)
    assert vllm._chunk(vllm_event(None)).experts is None


@pytest.mark.parametrize(
    ("encoded", "said"),
    [
        ("AAAA", "cannot be read"),
        (npy(EXPERTS.astype(np.float32)), "as float32"),
        (npy(EXPERTS[0]), r"as int64\[3, 2\]"),
        (npy(EXPERTS)[:40], "cannot be read"),
    ],
)
def test_what_is_no_file_of_numbers_is_a_fault_of_vllm(encoded: str, said: str) -> None:
    with pytest.raises(InfraError, match=f"vLLM gave routed experts .*{said}"):
        vllm._chunk(vllm_event(encoded))


def sglang_event(experts: bytes) -> dict[str, Any]:
    logprobs = [[-1.0, 8, None], [-2.0, 9, None], [-3.0, 10, None]]
    spans = [{"version": "1.0", "start": 0, "end": 3}]
    encoded = base64.b64encode(experts).decode()
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": logprobs}
    return {
        "output_ids": [8, 9, 10],
        "meta_info": {**meta, "weight_versions": spans, "routed_experts": encoded},
    }


def test_sglangs_bytes_get_their_shape_from_the_checkpoint() -> None:
    facts = sglang_messages.ServerFacts(
        ranks=1, overlaps=True, increments=True, eos_token_ids=(), vocab_size=9, mask_tokens=1
    )
    body = sglang_messages.request_body("a", asking(experts_from=2), "s", facts)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)
    assert not sglang_messages.request_body("a", asking(), "s", facts)["return_routed_experts"]
    reader = sglang_messages.EventReader(increments=True, cut=False, experts=(3, 2))
    chunk = reader.read(sglang_event(EXPERTS.astype("<i4").tobytes()))
    assert chunk.experts is not None
    np.testing.assert_array_equal(chunk.experts, EXPERTS)
    with pytest.raises(InfraError, match="SGLang gave routed experts that cannot be read"):
        reader.read(sglang_event(bytes(4 * 7)))


def reading(experts: np.ndarray[Any, Any] | None, **what: Any) -> Any:
    reader = ResponseReader(FIRST, None, experts_of=3, **what)
    last = Chunk(
        tokens=[8, 9, 10],
        logprobs=[-1.0, -2.0, -3.0],
        finish_reason="length",
        spans=[("1.0", 0, 3)],
        experts=experts,
    )
    reader.add(last)
    return reader.rest(last)[-1].experts


def test_a_response_tells_the_experts_of_what_was_fed() -> None:
    found = reading(EXPERTS)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, EXPERTS)
    # The server knew nothing of the stop token and fed it.
    np.testing.assert_array_equal(reading(EXPERTS, stop_token_ids=[9]), EXPERTS[:4])


@pytest.mark.parametrize("told", [None, EXPERTS[:4]])
def test_too_few_experts_are_a_fault_of_the_server(told: np.ndarray[Any, Any] | None) -> None:
    with pytest.raises(InfraError, match=r"of 5 tokens; it needs --enable-return-routed-experts"):
        reading(told)


@pytest.mark.parametrize("kind", [vllm.VllmServer, sglang.SglangServer])
def test_a_server_is_started_so_that_it_tells(kind: Any, qwen3: Saved) -> None:
    module = vllm if kind is vllm.VllmServer else sglang
    checkpoint = CheckpointFacts(
        path=qwen3.path, num_bytes=0, shapes={}, tied=False, vocab_size=9, max_length=9,
        eos_token_ids=(),
    )  # fmt: skip

    def arguments(**options: Any) -> Any:
        server = kind(module.Config(**options))
        return server.arguments(checkpoint, max_length=9, slots=1, port="1")

    assert "--enable-return-routed-experts" not in arguments()
    assert "--enable-return-routed-experts" in arguments(return_routed_experts=True)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_recipes_key_sets_the_engines_option(name: str, qwen3: Saved) -> None:
    for wanted in (False, True):
        url = {"url": "http://127.0.0.1:1"}
        config = RolloutConfig(name=name, routing_replay=wanted, engine=url)
        engine: Any = build_engine(config, model=qwen3.path, tokenizer=None)
        assert engine._config.return_routed_experts is wanted
