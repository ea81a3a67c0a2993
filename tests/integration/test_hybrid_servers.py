"""Hybrids (layers with a state of each row) sampled by a real vLLM on a CPU, whose kernels want bfloat16 for them.

Versions come as the trainer publishes them, so that vLLM's own loader reads their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from meshrl.contract.types import OnUpdate, Uint8, Version, WeightManifest
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.streams import Response, sample
from meshrl.testing import vision
from meshrl.testing.contract import engine_suite
from meshrl.testing.contract.engine_suite import LONG, SLOTS, EngineSuite
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import pack as packed
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.model.snapshot import take_snapshot
from meshrl.trainer.ranks.world import World
from tests.doubles import vision_rows

from .. import servers
from ..unit.rollout.checkpoints import forced_logprobs, make_model, pack, prompts, request
from ..waiting import until
from . import weights_fleet
from .test_real_servers import VLLM, Words, all_of, attached_to, server_log

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not servers.is_here("vllm"), reason="no vLLM here: `make venv-vllm`"),
    pytest.mark.asyncio(loop_scope="module"),
]
SHAPE: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,
}
"""Heads as vLLM's kernels for a CPU want them."""
OWN = {**SHAPE, "hidden_size": 64, "initializer_range": 0.1, "max_position_embeddings": 2 * LONG}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
TEXT: Mapping[str, Mapping[str, Any]] = {
    "Qwen3_5Text": OWN,
    "Qwen3Next": {**OWN, **EXPERTS},
    "Qwen3_5MoeText": {**OWN, **EXPERTS},
}
"""Families of text."""
SWAPPED = 300
"""Response tokens of a request during which the weights change."""
MEAN, MOST = 0.05, 1.0
"""Bounds of how far vLLM's log-probs in bfloat16 are from float32's. Weights of another version are 1 off on average.

A token of a mixture for which rounding chose another expert is 0.64 off, and 0.63 by transformers in bfloat16."""


def options(checkpoint: Path) -> dict[str, object]:
    """`rollout.engine` of an engine that starts the server."""
    arguments = [*servers.VLLM_ARGUMENTS]
    return {
        **VLLM.options(server_log(VLLM, checkpoint)),
        "dtype": "bfloat16",
        "extra_args": arguments,
    }


def assert_near(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    apart = np.abs(np.concatenate(found) - np.concatenate(wanted))
    assert apart.mean() < MEAN and apart.max() < MOST, (apart.mean(), apart.max())


def dense(seed: int = 0) -> Any:
    """A model whose weights bfloat16 holds."""
    return make_model("Qwen3_5Text", seed=seed, **OWN).bfloat16().float()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    dense().bfloat16().save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def owner(checkpoint: Path) -> AsyncIterator[ServerEngine]:
    """The engine whose child answers the contract suite and the updates in flight."""
    engine = VLLM.build(options(checkpoint), model=checkpoint, slots=SLOTS, tokenizer=Words())
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(owner: ServerEngine, checkpoint: Path) -> AsyncIterator[ServerEngine]:
    attached = {**attached_to(VLLM, owner, checkpoint), "stream_interval": 4}
    engine = VLLM.build(attached, model=checkpoint, slots=SLOTS, tokenizer=Words())
    await engine.start()
    yield engine
    await engine.close()


class TestContract(EngineSuite):
    @pytest.fixture(autouse=True)
    def fewer_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A state is computed slowly on a CPU: a long response would take half a minute."""
        monkeypatch.setattr(engine_suite, "LONG", LONG // 4)

    def weights(self, version: Version) -> tuple[WeightManifest, Sequence[Uint8]]:
        return pack(dense(), version, "bfloat16")


async def swapped(
    engine: ServerEngine, models: tuple[Any, Any], step: int, on_update: OnUpdate
) -> list[Response]:
    """Answers during which the second model's weights took the first one's place."""
    for number, model in enumerate(models):
        await engine.stage_weights(*pack(model, Version(1, step + number), "bfloat16"))
        if number == 0:
            await engine.commit_weights(Version(1, step), OnUpdate.DRAIN)
    before = engine.stats().tokens_generated
    running = [
        asyncio.create_task(sample(engine, request(str(i), p, max_tokens=SWAPPED)))
        for i, p in enumerate(prompts(SLOTS, seed=5))
    ]
    await until(lambda: engine.stats().tokens_generated >= before + SLOTS * 30)
    await engine.commit_weights(Version(1, step + 1), on_update)
    return await asyncio.gather(*running)


@pytest.mark.parametrize("on_update", [OnUpdate.IN_FLIGHT, OnUpdate.INTERRUPT])
async def test_a_swap_in_mid_generation_labels_every_token_and_serves_the_new_weights(
    engine: ServerEngine, on_update: OnUpdate
) -> None:
    old, new = models = dense(seed=1), dense(seed=2)
    # On a busy machine responses may end before the update begins: they say nothing, and the next ones may.
    for step in range(0, 10, 2):
        answers = await swapped(engine, models, step, on_update)
        if all(len(answer.spans) > 1 for answer in answers):
            break
    for prompt, answer in zip(prompts(SLOTS, seed=5), answers, strict=True):
        versions = [span.version for span in answer.spans]
        assert versions == [Version(1, step), Version(1, step + 1)]
        assert (answer.spans[0].start, answer.spans[-1].end) == (0, SWAPPED)
        border, tokens = answer.spans[0].end, answer.tokens.tolist()
        wanted = forced_logprobs(old, prompt, tokens[:border])
        assert_near([answer.logprobs[:border]], [wanted])
        wanted = forced_logprobs(new, prompt, tokens)
        assert np.abs(answer.logprobs[:border] - wanted[:border]).mean() > 4 * MEAN
        if on_update is OnUpdate.IN_FLIGHT:  # with the state and the keys that the old weights made
            wanted = on_old_state(models, prompt, tokens, border)
        assert_near([answer.logprobs[border:]], [wanted[border:]])


async def test_a_long_prompt_with_a_seed_is_computed_in_parts_and_answered_alike_twice(
    engine: ServerEngine,
) -> None:
    model, version = dense(seed=3), Version(1, 0)
    await engine.stage_weights(*pack(model, version, "bfloat16"))
    await engine.commit_weights(version, OnUpdate.DRAIN)
    prompt = [3 + token % 58 for token in range(300)]
    asked = request("long", prompt, max_tokens=8, seed=4)
    first, again = [await sample(engine, asked) for _ in range(2)]
    assert first.tokens.tolist() == again.tokens.tolist()
    assert_near([first.logprobs], [forced_logprobs(model, prompt, first.tokens.tolist())])


@torch.no_grad()
def on_old_state(
    models: tuple[Any, Any], prompt: Sequence[int], tokens: Sequence[int], border: int
) -> np.ndarray:
    """float32[R]: log-probs of the second model behind what the first one read before token `border`."""
    old, new = models
    read = [*prompt, *tokens[: border - 1]]
    cache = old(torch.tensor([read]), use_cache=True).past_key_values
    said = [np.zeros(border, dtype=np.float32)]
    for at in range(border, len(tokens)):
        answer = new(torch.tensor([[tokens[at - 1]]]), past_key_values=cache, use_cache=True)
        said.append(answer.logits[0, -1].log_softmax(-1)[tokens[at] : tokens[at] + 1].numpy())
    return np.concatenate(said)


def write(family: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random checkpoint in bfloat16."""
    if family in TEXT:
        make_model(family, **TEXT[family]).bfloat16().save_pretrained(path)
        return
    kind = vision.KINDS[family]
    rope = {**kind["text_config"]["rope_parameters"], "mrope_section": [4, 2, 2]}
    both = {"tie_word_embeddings": True, "rope_parameters": rope}
    text = {**kind["text_config"], **SHAPE, **both}
    monkeypatch.setitem(vision.KINDS, family, {**kind, "text_config": text})
    vision.random_checkpoint(family, path)
    # vLLM tries labels of its own behind the template, which a tokenizer of few words does not know.
    (path / "chat_template.jinja").unlink()
    file = path / "model.safetensors"
    held = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})


def trainers(policy: Policy, prompt: Sequence[int], answer: Response) -> np.ndarray:
    """float32[R]: what the trainer says of a response."""
    text = np.array([*prompt, *answer.tokens], dtype=np.int32)
    with torch.no_grad():
        found, _ = policy(packed([text], [len(prompt)]), 1.0)
    said: np.ndarray = found.numpy()
    return said


@pytest.mark.parametrize(
    "family",
    [
        "Qwen3Next",
        "Qwen3_5Moe",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("Qwen3_5", "Qwen3_5Text", "Qwen3_5MoeText")
        ),
    ],
)
async def test_what_the_trainer_publishes_is_loaded_and_served_by_disk_and_by_gloo(
    family: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3_5 and Qwen3_5Moe are vision-language models, which vLLM serves under their own names.

    Experts of the second are 48 wide, which vLLM's kernels for a CPU pad.
    """
    write(family, tmp_path, monkeypatch)
    policy = build_policy(open_hf(tmp_path), world, ModelConfig(path=tmp_path))
    engine = VLLM.build(options(tmp_path), model=tmp_path, slots=SLOTS, tokenizer=Words())
    await engine.start()
    try:
        for step, carrier in enumerate(("disk", "gloo"), start=1):
            version = Version(1, step)
            vision_rows.move_weights(policy, step)
            made = take_snapshot(
                policy, world, run="r", version=version, dtype="bfloat16", bucket_bytes=1 << 20
            )
            assert made is not None
            async with weights_fleet.opened(carrier, tmp_path, base_s=60.0) as fleet:
                fleet.attach("server", engine)
                source = weights_fleet.PackedSource(made.manifest, made.buckets)
                await fleet.coordinator.publish(source)
                await fleet.until_serving(engine, version)
            asked = [[9 + token % 20 for token in each] for each in prompts(4, seed=step)]
            answers = await all_of(
                engine, [request(f"{step} {i}", p, max_tokens=24) for i, p in enumerate(asked)]
            )
            assert {span.version for answer in answers for span in answer.spans} == {version}
            wanted = [trainers(policy, p, a) for p, a in zip(asked, answers, strict=True)]
            assert_near([answer.logprobs for answer in answers], wanted)
    finally:
        await engine.close()
