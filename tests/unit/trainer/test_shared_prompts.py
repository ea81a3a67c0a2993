"""Attention of a prompt that several rows share: what the rows give alone, by fewer pairs of query and key."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from meshrl.contract.types import Int32, Uid
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.experience import schedule
from meshrl.trainer.model import attention, attention_kernels, packing
from meshrl.trainer.model.packing import PackLayout, RowRun, attention_pairs, pack
from meshrl.trainer.model.policy import Policy, build_policy, empty_hf, random_hf
from meshrl.trainer.ranks.world import World

from . import tiny
from .rank_work import batch_of, manifest_row
from .test_attention_kernels import flash_attention_2

PROMPTS = (70, 40, 9)
WINDOW: dict[str, Any] = dict(
    use_sliding_window=True, sliding_window=11, max_window_layers=0,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip


def groups() -> list[Int32]:
    """Groups of 6 rows with prompts of PROMPTS, the first two with a beginning in common, and a stranger."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, tiny.VOCABULARY, n).astype(np.int32) for n in PROMPTS]
    prompts[1][:30] = prompts[0][:30]
    rows = tiny.rows(1, seed=7, shortest=60, longest=60)
    for number, prompt in enumerate(prompts):
        ends = tiny.rows(6, seed=number, shortest=1, longest=30)
        ends[2] = np.concatenate([ends[1], ends[2]])  # another answer is its beginning
        ends[4][0] = ends[0][0]
        rows += [np.concatenate([prompt, end]) for end in [*ends[:5], ends[3]]]
    return rows


def prompt_lengths() -> list[int]:
    return [1, *itertools.chain.from_iterable([n] * 6 for n in PROMPTS)]


def outcome(policy: Policy, packs: list[packing.Pack]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a weighted sum of them, of all weights in one vector."""
    found = [policy(each, 0.9)[0] for each in packs]
    logprobs = torch.cat(found)
    factors = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    ((logprobs * factors).sum() / len(logprobs)).backward()
    gradients = torch.cat([p.grad.full_tensor().flatten() for _, p in policy.named_tensors()])  # type: ignore[union-attr]
    return logprobs.detach(), gradients


def by_the_kernels(monkeypatch: pytest.MonkeyPatch, long_row: int) -> list[str]:
    """Let functions for a CPU take the place of the GPU's kernels; which ones were called, in their order."""
    called: list[str] = []

    def varlen(*inputs: Any, **how: Any) -> Any:
        called.append("varlen")
        return flash_attention_2(*inputs, **how)

    def alone(*inputs: Any) -> torch.Tensor:
        called.append("row")
        return attention_kernels.attend_row(*inputs)

    def attend(*inputs: Any) -> torch.Tensor:
        return attention._end_to_end(varlen, *inputs)

    monkeypatch.setattr(attention_kernels, "sdpa_kernel", lambda backend: nullcontext())
    monkeypatch.setattr(attention, "takes_long_rows", lambda query, key: True)
    monkeypatch.setattr(attention, "attend_row", alone)
    monkeypatch.setattr(attention, "_attend", attend)
    for module in (packing, attention):
        monkeypatch.setattr(module, "LONG_ROW", long_row)
    return called


@pytest.mark.parametrize("kernels", [0, 50, 1000], ids=["rectangles", "long rows", "varlen"])
@pytest.mark.parametrize("changes", [{}, WINDOW], ids=["full", "window"])
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
@pytest.mark.parametrize("option", ["", "enable_gradient_checkpointing", "use_torch_compile"])
def test_a_pack_gives_what_its_rows_give_alone(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    changes: dict[str, Any],
    option: str,
    kernels: int,
) -> None:
    rows, prompts = groups(), prompt_lengths()
    options = {option: True} if option else {}

    def policy(**how: bool) -> Policy:
        hf = random_hf(tiny.config(num_hidden_layers=2, **changes), 1)
        return build_policy(hf, world, ModelConfig(path=Path("x"), **how))  # type: ignore[arg-type]

    single = [pack([row], [prompt]) for row, prompt in zip(rows, prompts, strict=True)]
    wanted = outcome(policy(), single)
    called = by_the_kernels(monkeypatch, kernels) if kernels else []
    # Traced and cut, but not written as C++: inductor spends minutes on that.
    compiler = functools.partial(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: compiler(layer, **how))
    together = pack(rows, prompts)
    found = outcome(policy(**options), [together])
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= 1e-6 * max(1, float(other.abs().max()))
    if kernels:
        assert ("row" in called) == (kernels == 50) and "varlen" in called
    else:
        assert any(bucket.start for bucket in together.layout.buckets)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("window", [None, 500])
def test_a_gpus_kernels_give_in_bfloat16_what_rectangles_give_in_float32(
    window: int | None,
) -> None:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 1000, n).astype(np.int32) for n in (2100, 300)]
    ends = [draw.integers(0, 1000, n).astype(np.int32) for n in (300, 90, 1, 2500)]
    layout = pack([np.concatenate([p, end]) for p in prompts for end in ends], [1] * 8).layout
    scores = attention.Scores(scaling=None, window=window, softcap=None, sinks=None)
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, layout.rows.queries, 64).bfloat16() for heads in (4, 2, 2)]
    weight = torch.randn(1, layout.rows.queries, 4, 64).bfloat16()

    def results(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = attention._attend(
            given[0], given[1], given[2], layout.to(torch.device(device)), scores
        )
        gradients = torch.autograd.grad(out, given, weight.to(device, dtype))
        return [x.detach().float().cpu() for x in (out, *gradients)]

    both = zip(results("cuda", torch.bfloat16), results("cpu", torch.float32), strict=True)
    assert all((one - other).norm() < 0.01 * other.norm() for one, other in both)


def test_rows_are_fewer_where_layers_compute_them_whole() -> None:
    kinds = ["conv", "full_attention"]
    hybrid = transformers.Lfm2Config(hidden_size=32, num_hidden_layers=2, layer_types=kinds)
    models = [empty_hf(config) for config in (tiny.config(), hybrid)]
    assert [attention.rows_per_laid(hf) for hf in models] == [5, 2]


def of_kernels(layout: PackLayout) -> int:
    """Pairs that kernels compute of a causal pack: a row that is taken alone whole."""

    def of(run: RowRun) -> int:
        if run.alone:
            return attention_pairs(run.keys, 0)
        both = zip(run.cu_queries.diff().tolist(), run.cu_keys.diff().tolist(), strict=True)
        return sum(attention_pairs(keys, 0) - attention_pairs(keys - own, 0) for own, keys in both)

    return sum(map(of, layout.runs))


@pytest.mark.parametrize("mean", [None, 300], ids=["answers of 1,024", "of 300 in the mean"])
def test_eight_answers_to_a_long_prompt_take_a_third_of_the_pairs(mean: int | None) -> None:
    draw = np.random.default_rng(0)
    lengths = [1024] * 8 if mean is None else draw.exponential(mean, 8).astype(int) + 1
    rows = [manifest_row(Uid("r", "t", n), 8, 8192 + k, prompt=8192) for n, k in enumerate(lengths)]
    made = schedule(batch_of(rows), ranks=1, max_tokens=16_384, mini_batch_groups=None)
    (mini,) = made.mini_batches
    assert mini.ranks == (((*range(8),),),)  # one micro-batch
    prompt = draw.integers(0, 1000, 8192).astype(np.int32)
    texts = [
        np.concatenate([prompt, [n], draw.integers(0, 1000, k - 1)]).astype(np.int32)
        for n, k in enumerate(lengths)
    ]
    layout = pack(texts, [8192] * 8).layout
    whole = pack(texts, [8192] * 8, share_prefixes=False).layout
    shares = [layout.pairs / whole.pairs, of_kernels(layout) / of_kernels(whole)]
    print(f"{mean}: rectangles {shares[0]:.3f}, kernels {shares[1]:.3f} of the pairs of whole rows")
    assert max(shares) <= 0.35
