"""The torch engine tells which experts tokens went to, and a row's recorder puts them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.contract.errors import CorruptError, InfraError, UserError
from meshrl.contract.routed_experts import Experts, RoutedExperts
from meshrl.contract.types import GenerateDelta, GenerateRequest, Int32, Version
from meshrl.rollout.generation_checkpoint import continuation
from meshrl.rollout.streams import ExpertRecorder, sample

from .checkpoints import FIRST, Checkpoint, make_model, prompts, request
from .conftest import EngineMaker
from .test_torch_engine import EXPERTS, HYBRID, SHARED

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen3 moe of dense and sparse layers": (
        "Qwen3Moe",
        {
            "num_experts": 300,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 next": ("Qwen3Next", EXPERTS | SHARED | HYBRID | {"mlp_only_layers": [1]}),
    "qwen3.5 moe": ("Qwen3_5MoeText", EXPERTS | SHARED | HYBRID),
}


def router_choices(model: Any, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """[T, layers, k], ascending, from transformers; zeros in dense layers."""
    taken: dict[int, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, at=at: taken.update({at: out[-1]}))
        for at, layer in enumerate(model.model.layers)
        for module in layer.modules()
        if type(module).__name__.endswith("Router")
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    empty = torch.zeros_like(next(iter(taken.values())))
    found = torch.stack([taken.get(at, empty) for at in range(len(model.model.layers))], 1)
    return found.sort(-1)[0].numpy()


@pytest.mark.parametrize("name", FAMILIES)
async def test_experts_are_those_of_transformers_for_every_token_that_was_fed(
    name: str, tmp_path: Path, make_engine: EngineMaker
) -> None:
    family, changes = FAMILIES[name]
    model = make_model(family, **changes)
    model.save_pretrained(tmp_path)
    engine = await make_engine(tmp_path, eos_token_ids=[], stream_interval=3)
    asked = prompts(4)
    asked[1] = asked[0]  # computed once for both
    recorders = [ExpertRecorder(engine) for _ in asked]
    answers = await asyncio.gather(
        *(
            sample(recorder, request(str(i), prompt, max_tokens=8 + i))
            for i, (recorder, prompt) in enumerate(zip(recorders, asked, strict=True))
        )
    )
    for recorder, prompt, answer in zip(recorders, asked, answers, strict=True):
        tokens = np.array([*prompt, *answer.tokens.tolist()], np.int32)
        found = recorder.column(tokens).array()
        assert not found[-1].any()  # the last one was never fed
        np.testing.assert_array_equal(found[:-1], router_choices(model, tokens)[:-1])


async def test_a_request_for_the_experts_of_a_dense_model_is_refused(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path)
    with pytest.raises(UserError, match="Qwen3ForCausalLM has no experts"):
        await sample(engine, replace(request("a", [3, 4, 5]), experts_from=0))
    with pytest.raises(UserError, match="experts from 4 of 3 prompt tokens"):
        await sample(engine, replace(request("a", [3, 4, 5]), experts_from=4))


def experts(start: int, end: int, weights: int) -> Experts:
    """[n, 1, 2]: each token's place, and the weights that it was computed with."""
    pairs = [[[place, 100 + weights]] for place in range(start, end)]
    return np.array(pairs, np.uint8).reshape(-1, 1, 2)


class Told:
    """An engine of other weights in each request, that samples two tokens and tells experts as it is asked."""

    version = FIRST

    def __init__(self, *, silent: bool = False) -> None:
        self.asked: list[int | None] = []
        self._silent = silent

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        self.asked.append(request.experts_from)
        fed = len(request.prompt_ids) + 1
        told = experts(request.experts_from or 0, fed, len(self.asked))
        yield GenerateDelta(
            tokens=np.array([50, 51], np.int32),
            logprobs=np.zeros(2, np.float32),
            version=Version(1, len(self.asked)),
            finish_reason="stop",
            experts=None if self._silent else told,
        )


def asking(prompt: Int32) -> GenerateRequest:
    return request("r", prompt.tolist())


async def test_tokens_of_a_turn_keep_their_experts_when_the_next_turn_reads_them_again() -> None:
    engine = Told()
    recorder = ExpertRecorder(engine)
    first = np.array([1, 2, 3], np.int32)
    await sample(recorder, asking(first))
    second = np.array([1, 2, 3, 50, 51, 7], np.int32)
    answer = await sample(recorder, asking(second))
    assert engine.asked == [0, 4]  # 51 was sampled, and not fed
    column = recorder.column(np.concatenate([second, answer.tokens]))
    weights = column.array()[:, 0, 1].tolist()
    assert weights == [101] * 4 + [102] * 3 + [0]


async def test_branches_of_a_row_have_the_experts_of_their_own_history() -> None:
    recorder = ExpertRecorder(Told())
    for prompt in ([1, 2, 3], [1, 9]):
        await sample(recorder, asking(np.array(prompt, np.int32)))
    row = np.array([1, 2, 3, 50, 51, 1, 9, 50, 51], np.int32)
    weights = recorder.column(row, [0, 5]).array()[:, 0, 1].tolist()
    assert weights == [101] * 4 + [0] + [101, 102, 102] + [0]
    assert not recorder.column(np.array([8], np.int32)).array().any()


async def test_a_row_that_goes_on_after_another_worker_has_all_its_experts() -> None:
    recorder = ExpertRecorder(Told())
    prompt = asking(np.array([1, 2, 3], np.int32))
    before = GenerateDelta(
        tokens=np.array([4, 5], np.int32), logprobs=np.zeros(2, np.float32), version=FIRST
    )
    answer = await sample(recorder, continuation(prompt, [before]))
    row = np.concatenate([prompt.prompt_ids, before.tokens, answer.tokens])
    assert recorder.column(row).array()[:, 0, 1].tolist() == [101] * 6 + [0]


async def test_an_engine_that_tells_no_experts_is_a_fault() -> None:
    recorder = ExpertRecorder(Told(silent=True))
    with pytest.raises(InfraError, match="the engine returned the experts of 0 of 4 tokens"):
        await sample(recorder, asking(np.array([1, 2, 3], np.int32)))


@pytest.mark.parametrize("highest", [4, 255, 400])
def test_a_column_gives_back_what_was_packed(highest: int) -> None:
    draw = np.random.default_rng(0)
    given = np.stack([draw.permuted(np.arange(highest + 1))[:4] for _ in range(60)]).reshape(
        20, 3, 4
    )
    packed = RoutedExperts.pack(given)
    again = RoutedExperts.of(packed.column, 20)
    np.testing.assert_array_equal(again.array(), np.sort(given, -1))
    np.testing.assert_array_equal(again.part(5, 9).array(), np.sort(given, -1)[5:9])


def test_a_column_that_lies_is_refused_before_it_is_unpacked() -> None:
    column = RoutedExperts.pack(np.zeros((20, 3, 4), np.uint8)).column.copy()
    with pytest.raises(
        CorruptError, match=r"20 tokens, 3 layers and 4 experts .* row of 21 tokens"
    ):
        RoutedExperts.of(column, 21)
    wide = column.copy()
    wide[2:6] = 0xFF  # 65535 layers, 65535 experts a token
    with pytest.raises(CorruptError, match="65535 layers"):
        RoutedExperts.of(wide, 20)
    wide[2:6] = (8, 0, 4, 0)  # 8 layers: more than there are bytes
    with pytest.raises(CorruptError, match="another size"):
        RoutedExperts.of(wide, 20).array()
    with pytest.raises(CorruptError, match="3 bytes are not routed experts"):
        RoutedExperts.of(column[:3], 20)
