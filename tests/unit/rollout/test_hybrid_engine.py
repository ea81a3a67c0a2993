"""The torch engine keeps a state of each row in layers with linear attention: it says what the trainer says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.engines.torch.linear_attention import CHUNK
from meshrl.rollout.server_engine.checkpoint import check_version, read_checkpoint
from meshrl.rollout.streams import closing, response_of, sample
from meshrl.testing import vision
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import pack as packed
from meshrl.trainer.model.policy import Policy, build_policy, load_hf, open_hf
from meshrl.trainer.model.snapshot import take_snapshot
from meshrl.trainer.ranks.world import World
from tests.doubles import vision_rows

from .checkpoints import (
    Checkpoint,
    assert_goes_on_with_the_old_cache,
    forced_logprobs,
    make_model,
    pack,
    prompts,
    request,
)
from .conftest import EngineMaker
from .test_torch_engine import EXPERTS, HYBRID, SHARED

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3_5Text", HYBRID),
    "mixture": ("Qwen3Next", EXPERTS | SHARED | HYBRID),
}
NEXT = Version(1, 1)
PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture(scope="module", params=MODELS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, changes = MODELS[request.param]
    model, path = make_model(family, **changes), tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(path)
    return Checkpoint(model, path)


def another(hybrid: Checkpoint) -> Any:
    """The same architecture with other weights."""
    family, changes = MODELS["mixture" if "Next" in type(hybrid.model).__name__ else "dense"]
    return make_model(family, seed=9, **changes)


async def test_logprobs_are_the_trainers_also_of_siblings_and_of_rows_that_wait(
    hybrid: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(hybrid.path, slots=5, eos_token_ids=[])
    asked = [each for each in prompts(3, longest=CHUNK + 40) for _ in range(3)]
    requests = [
        request(str(n), prompt, max_tokens=9 + 5 * n, seed=n) for n, prompt in enumerate(asked)
    ]
    answers = await asyncio.gather(*(sample(engine, each) for each in requests))
    policy = Policy(load_hf(hybrid.path))
    rows = [
        np.array([*prompt, *answer.tokens], dtype=np.int32)
        for prompt, answer in zip(asked, answers, strict=True)
    ]
    with torch.no_grad():
        wanted, _ = policy(packed(rows, [len(prompt) for prompt in asked]), 1.0)
    found = np.concatenate([answer.logprobs for answer in answers])
    assert len({answer.tokens.tobytes() for answer in answers}) == len(answers)
    apart = np.abs(found - wanted.numpy())
    # Of a token of which little is left to be normed, transformers' own, with a cache, are 3e-5 off, too.
    assert np.quantile(apart, 0.99) < 1e-5 and apart.max() < 1e-4
    alone = await sample(engine, requests[4])
    assert alone.tokens.tolist() == answers[4].tokens.tolist()


def as_downloaded(directory: Path) -> None:
    """Experts in two tensors a layer, and a layer that predicts a further token, as checkpoints of the hub have."""
    file = directory / "model.safetensors"
    held: dict[str, torch.Tensor] = {
        "mtp.fc.weight": torch.ones(2, 4),
        "mtp.norm.weight": torch.ones(4),
    }
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in sorted(load_file(file).items()):
        if found := re.fullmatch(r"(.*mlp\.experts)\.\d+\.(\w+)_proj\.weight", name):
            experts.setdefault(found[1], {}).setdefault(found[2], []).append(tensor)
        else:
            held[name] = tensor
    for name, parts in experts.items():
        stacked = {part: torch.stack(tensors) for part, tensors in parts.items()}
        held[f"{name}.gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], 1)
        held[f"{name}.down_proj"] = stacked["down"]
    save_file(held, file, metadata={"format": "pt"})


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
async def test_the_text_part_of_a_checkpoint_as_it_is_downloaded_is_sampled_and_updated(
    make_engine: EngineMaker, world: World, tmp_path: Path, family: str, frozen: bool
) -> None:
    vision.random_checkpoint(family, tmp_path)
    as_downloaded(tmp_path)
    config = ModelConfig(path=tmp_path, freeze_vision_tower=frozen)
    policy = build_policy(open_hf(tmp_path), world, config)
    engines = [
        await make_engine(tmp_path, eos_token_ids=[], weight_staging=where)
        for where in ("device", "host")
    ]
    prompt = [9, 12, 15, 10]
    for step in (0, 1):
        if step:
            vision_rows.move_weights(policy, step)
            sent = take_snapshot(
                policy, world, run="r", version=NEXT, dtype="float32", bucket_bytes=1 << 16
            )
            assert sent is not None
            check_version(sent.manifest, sent.buckets, read_checkpoint(tmp_path))
        for engine in engines:
            if step:
                await engine.stage_weights(sent.manifest, sent.buckets)
                await engine.commit_weights(NEXT, OnUpdate.DRAIN)
            answer = await sample(engine, request("a", prompt, max_tokens=40))
            with torch.no_grad():
                text = np.array([*prompt, *answer.tokens], dtype=np.int32)
                wanted, _ = policy(packed([text], [len(prompt)]), 1.0)
            np.testing.assert_allclose(answer.logprobs, wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("on_update", [OnUpdate.INTERRUPT, OnUpdate.IN_FLIGHT])
async def test_an_update_computes_states_again_or_goes_on_with_those_that_are_there(
    hybrid: Checkpoint, make_engine: EngineMaker, on_update: OnUpdate, where: str
) -> None:
    engine = await make_engine(hybrid.path, eos_token_ids=[], weight_staging=where)
    other = another(hybrid)
    await engine.stage_weights(*pack(other, NEXT))
    deltas = []
    async with closing(
        engine.generate(request("a", PROMPT, temperature=0.0, max_tokens=60))
    ) as stream:
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 1:
                await engine.commit_weights(NEXT, on_update)
    answer = response_of(deltas)
    border = answer.spans[1].start
    if on_update is OnUpdate.IN_FLIGHT:
        assert_goes_on_with_the_old_cache((hybrid.model, other), PROMPT, answer)
        return
    before, after = answer.tokens[:border].tolist(), answer.tokens[border:].tolist()
    wanted = forced_logprobs(other, PROMPT + before, after)
    np.testing.assert_allclose(answer.logprobs[border:], wanted, atol=1e-4)


async def test_states_come_back_when_the_engine_wakes_and_count_among_the_bytes_of_the_cache(
    hybrid: Checkpoint, make_engine: EngineMaker, tmp_path: Path
) -> None:
    engine = await make_engine(hybrid.path, eos_token_ids=[])
    deltas = []
    async with closing(
        engine.generate(request("a", PROMPT, temperature=0.0, max_tokens=40))
    ) as stream:
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 2:
                await engine.sleep()
                await engine.wake()
    answer = response_of(deltas)
    wanted = forced_logprobs(hybrid.model, PROMPT, answer.tokens.tolist())
    np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4)
    keys = 2 * 2 * 16 * 4 * 32  # of both kinds, heads, width, bytes, positions
    state = 3 * (2 * 2 * 8 + 4 * 12) * 3 * 4 + 3 * 4 * 8 * 12 * 4
    small = await make_engine(
        hybrid.path, kv_cache_bytes=2 * (keys + state) - 1, max_model_len=32, serve=False
    )
    assert small.stats().capacity == 1
