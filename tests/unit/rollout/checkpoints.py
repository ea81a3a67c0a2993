"""Random tiny checkpoints of the supported families, their wire layout, and what transformers says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash

from meshrl.contract.types import (
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    TensorSpec,
    Version,
    WeightManifest,
)
from meshrl.rollout.streams import Response

FIRST = Version(1, 0)
VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random float32 model, in evaluation mode."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "norm.weight")):  # or they would be zeros and ones
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("A_log"):  # a state that lasts
                parameter.uniform_(-4, -1)
            elif name.endswith("conv1d.weight"):  # or rounding is much of the little that is normed
                parameter.normal_(0, 0.5)
    return model


def pack(
    model: Any, version: Version, dtype: str = "float32"
) -> tuple[WeightManifest, list[np.ndarray]]:
    """The model in the wire layout: two buckets of the names that its checkpoint has."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors, buckets = [], []
    held = {n: p.detach().to(getattr(torch, dtype)) for n, p in model.named_parameters()}
    names = [*revert_weight_conversion(model, held).items()]
    for bucket, part in enumerate((names[::2], names[1::2])):
        offset, pieces = 0, []
        for name, tensor in part:
            data = tensor.contiguous().view(torch.uint8).flatten().numpy()
            tensors.append(
                TensorSpec(
                    name=name,
                    dtype=dtype,
                    shape=tuple(tensor.shape),
                    bucket=bucket,
                    offset=offset,
                    nbytes=len(data),
                )
            )
            pieces.append(data)
            offset += len(data)
        buckets.append(np.concatenate(pieces))
    manifest = WeightManifest(
        run="run",
        version=version,
        tensors=tuple(tensors),
        bucket_bytes=tuple(len(b) for b in buckets),
        bucket_hashes=tuple(xxhash.xxh3_128_hexdigest(b) for b in buckets),
    )
    return manifest, buckets


@dataclass(frozen=True, slots=True)
class Checkpoint:
    model: Any
    path: Path


def request(name: str, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(**sampling),
    )


def prompts(count: int, *, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Ragged random prompts without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def assert_told(model: Any, prompt: Sequence[int], told: PromptLogprobs | None, top: int) -> None:
    """Compare an engine's log-probs of a prompt with those of transformers at temperature 1."""
    found = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    own = found.gather(-1, torch.tensor(prompt)[1:, None])[:, 0].detach().numpy()
    assert told is not None and told.top_ids.shape == told.top_logprobs.shape == (len(prompt), top)
    assert np.isnan(told.logprobs[0])
    np.testing.assert_allclose(told.logprobs[1:], own, atol=1e-4)
    likeliest = found.topk(top).values.detach().numpy()
    np.testing.assert_allclose(told.top_logprobs[1:], likeliest, atol=1e-4)
    named = found.gather(-1, torch.from_numpy(told.top_ids[1:].astype(np.int64)))
    np.testing.assert_allclose(named.detach().numpy(), likeliest, atol=1e-4)


@torch.no_grad()
def forced_logprobs(
    model: Any,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] = MappingProxyType({}),
) -> np.ndarray:
    """float32[R]: a teacher-forced pass through transformers' own processors; temperature 0 is not divided by."""
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids = torch.tensor([[*prompt, *response]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    if logit_bias:
        biases = [[[token], float(bias)] for token, bias in logit_bias.items()]
        logits = SequenceBiasLogitsProcessor(biases)(ids.expand(len(logits), -1), logits)
    if repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(repetition_penalty)
        logits = torch.cat(
            [penalty(ids[:, : len(prompt) + place], row[None]) for place, row in enumerate(logits)]
        )
    logits = logits / (temperature or 1.0)
    if min_p:
        logits = MinPLogitsWarper(min_p)(ids, logits)
    if top_k > 0:
        logits = TopKLogitsWarper(top_k)(ids, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(ids, logits)
    picked = torch.tensor(list(response))[:, None]
    return logits.log_softmax(-1).gather(-1, picked)[:, 0].numpy()


def assert_goes_on_with_the_old_cache(
    models: tuple[Any, Any], prompt: Sequence[int], answer: Response, count: int = 20
) -> None:
    """From its border on, greedy `answer` is what the second model says to the first one's cache."""
    old, new = models
    border = answer.spans[0].end
    tokens = answer.tokens.tolist()
    with torch.no_grad():
        # The token before the border was sampled by the old weights and is read by the new ones.
        cache = old(
            torch.tensor([[*prompt, *tokens[: border - 1]]]), use_cache=True
        ).past_key_values
        for at in range(border, min(border + count, len(tokens))):
            said = new(torch.tensor([[tokens[at - 1]]]), past_key_values=cache, use_cache=True)
            want = said.logits[0, -1].log_softmax(-1)
            assert int(want.argmax()) == tokens[at]
            assert abs(float(want.max()) - float(answer.logprobs[at])) < 1e-4
