"""Layers that keep a state, with kernels for rows end to end: plain functions stand in for those of GPUs.

They have the kernels' names and arguments, and transformers' own wrapper calls them as it would call the kernels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from meshrl.trainer.model import policy as trained_policy
from meshrl.trainer.model.attention import is_stateful
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, random_hf
from meshrl.trainer.ranks.world import World

from .test_hybrids import (
    DENSE,
    LATENT,
    MAMBA,
    MIXTURE,
    PROMPT,
    SHAPE,
    gradients,
    layers,
    random_policy,
    siblings,
    whole_apart,
)

ALL = ("causal_conv1d", "fla", "mamba_ssm")
KERNELS = {
    "causal_conv1d_fn": ("causal_conv1d_fn", "causal_conv1d"),
    "torch_chunk_gated_delta_rule": ("chunk_gated_delta_rule", "fla"),
    "chunk_kimi_delta_attention": ("chunk_kda", "fla"),
    "mamba2_chunk_scan": ("mamba_chunk_scan_combined", "mamba_ssm"),
}
"""Kernel and package by transformers' own function."""
KIMI: dict[str, Any] = SHAPE | LATENT | layers("lf") | dict(
    linear_head_dim=8, linear_num_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
)  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen3_5Text": (modeling_qwen3_5, DENSE | layers("lfl")),
    "Qwen3Next": (modeling_qwen3_next, MIXTURE | layers("lf")),
    "KimiLinear": (modeling_kimi_linear, KIMI),
    "Lfm2": (modeling_lfm2, SHAPE | layers("cfc")),
    "Bamba": (modeling_bamba, SHAPE | MAMBA | {"attn_layer_indices": [1], "mamba_chunk_size": 16}),
}


def apiece(own: Callable[..., Any], sizes: Sequence[int], *columns: torch.Tensor) -> torch.Tensor:
    """`own` of each row of [1, T, …], end to end."""
    rows = zip(*(column.split(list(sizes), 1) for column in columns), strict=True)
    return torch.cat([own(*row) for row in rows], 1)


def sizes_of(seq_idx: torch.Tensor, tokens: int) -> list[int]:
    assert seq_idx.dtype == torch.int32 and seq_idx.shape == (1, tokens)
    numbers, sizes = seq_idx[0].unique_consecutive(return_counts=True)
    assert numbers.tolist() == list(range(len(numbers)))
    return sizes.tolist()


def sizes_between(cu_seqlens: torch.Tensor, tokens: int) -> list[int]:
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0 and cu_seqlens[-1] == tokens
    return cu_seqlens.diff().tolist()


def convolution(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def causal_conv1d_fn(
        x: torch.Tensor, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None
    ) -> torch.Tensor:
        def row(part: torch.Tensor) -> torch.Tensor:
            return own(part.transpose(1, 2), weight, bias, activation).transpose(1, 2)

        if seq_idx is None:
            return own(x, weight, bias, activation)
        assert x.stride(1) == 1  # as the kernel demands, of tokens with numbers
        sizes = sizes_of(seq_idx, x.shape[2])
        return apiece(row, sizes, x.transpose(1, 2)).transpose(1, 2)

    return causal_conv1d_fn


def delta_rule(own: Callable[..., Any]) -> Callable[..., Any]:
    def chunk_rule(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        initial_state: Any = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None,
    ) -> Any:  # fmt: skip
        def row(*parts: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = own(
                *parts[:3],
                g=parts[3],
                beta=parts[4],
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )[0]
            return found

        if cu_seqlens is None:
            return row(q, k, v, g, beta), None
        return apiece(row, sizes_between(cu_seqlens, q.shape[1]), q, k, v, g, beta), None

    return chunk_rule


def scan(own: Callable[..., Any]) -> Callable[..., Any]:
    def mamba_chunk_scan_combined(
        x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
        chunk_size: int, D: Any = None, z: Any = None, dt_bias: Any = None, dt_softplus: bool = False,
        seq_idx: Any = None, dt_limit: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        def row(x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> Any:
            how = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
            return own(x, dt, A, B, C, chunk_size=chunk_size, **how)

        if seq_idx is None:
            found: torch.Tensor = row(x, dt, B, C)
            return found
        return apiece(row, sizes_of(seq_idx, x.shape[1]), x, dt, B, C)

    return mamba_chunk_scan_combined


PLAIN = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": scan,
}


def install(
    monkeypatch: pytest.MonkeyPatch,
    modeling: ModuleType,
    packages: Sequence[str],
    made: Callable[[str, Any], Any] = lambda name, own: PLAIN[name](own),
) -> None:
    """Let transformers find these packages alone, with kernels that `made` makes of its own functions."""
    for function, (kernel, package) in KERNELS.items():
        wrapped = getattr(modeling, function, None)
        if wrapped is None:
            continue
        own = wrapped.__wrapped__
        parts = {kernel: made(function, own)} if package in packages else {}
        with monkeypatch.context() as importing:
            importing.setitem(sys.modules, package, SimpleNamespace(**parts))  # type: ignore[arg-type]
            again = use_kernel_func_from_hub_with_fallback(kernel, package)(own)
        monkeypatch.setattr(modeling, function, again)


def inputs(policy: Policy) -> list[tuple[int, int]]:
    """Rows and tokens of what the first linear map of each layer with a state gets, from here on."""
    seen: list[tuple[int, int]] = []
    for layer in filter(is_stateful, policy.hf.modules()):
        first = next(part for part in layer.modules() if isinstance(part, nn.Linear))
        first.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape[:2])))
    return seen


@pytest.mark.parametrize("name", CASES)
def test_kernels_take_rows_end_to_end_and_give_what_each_gives_alone(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    modeling, shape = CASES[name]
    monkeypatch.setattr(trained_policy, "_faults", {})
    alone, rows = random_policy(name, shape, world).eval(), siblings()
    wanted = [alone(pack([row], [PROMPT]), 1.0)[0] for row in rows]
    torch.autograd.backward(-torch.cat(wanted).sum())
    theirs = gradients(alone)
    install(monkeypatch, modeling, ALL)
    # Mamba's layers have one more kernel, of all that they compute, while they train.
    policy = random_policy(name, shape, world).eval()
    for share in (True, False):
        given = pack(rows, [PROMPT] * len(rows), share_prefixes=share)
        policy(given, 1.0)
        seen = inputs(policy)
        found, _ = policy(given, 1.0)
        assert set(seen) == {(1, sum(map(len, rows)))}
        torch.autograd.backward(-found.sum())
        torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-6, atol=1e-6)
        assert whole_apart(gradients(policy), theirs) < 1e-6


@pytest.mark.parametrize("packages", [(), ("causal_conv1d",), ("fla",)])
def test_layers_without_all_their_kernels_run_row_by_row(
    packages: tuple[str, ...], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, modeling_qwen3_5, packages)
    policy = random_policy("Qwen3_5Text", DENSE | layers("lfl"), world)
    given = pack(siblings(), [PROMPT] * len(siblings()))
    policy(given, 1.0)
    seen = inputs(policy)
    policy(given, 1.0)
    assert set(seen) == {tuple(bucket.gather.shape) for bucket in given.layout.buckets}


@pytest.mark.parametrize("deaf", ["causal_conv1d_fn", "chunk_kimi_delta_attention"])
def test_a_kernel_that_passes_over_where_rows_begin_is_given_row_by_row(
    deaf: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(name: str, own: Any) -> Any:
        @functools.wraps(own)
        def passes_over(*given: Any, **named: Any) -> Any:
            return own(*given, **named)

        return passes_over if name == deaf else PLAIN[name](own)

    install(monkeypatch, modeling_kimi_linear, ALL, made)
    policy = random_policy("KimiLinear", KIMI, world)
    given = pack(siblings(), [PROMPT] * len(siblings()))
    policy(given, 1.0)
    seen = inputs(policy)
    policy(given, 1.0)
    assert set(seen) == {tuple(bucket.gather.shape) for bucket in given.layout.buckets}


@pytest.mark.parametrize("keep_matmuls", [False, True])
def test_kernels_are_tried_once_also_where_layers_run_again(
    keep_matmuls: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, modeling_qwen3_5, ALL)
    rows, found = siblings(), []
    for again in ({}, {"enable_gradient_checkpointing": True, "keep_matmuls": keep_matmuls}):
        policy = random_policy("Qwen3_5Text", DENSE | layers("lf"), world, **again)
        policy(pack(rows, [PROMPT] * len(rows)), 1.0)[0].sum().backward()
        found.append(gradients(policy))
    assert whole_apart(*found) < 1e-6


def test_a_model_is_tried_without_kernels_that_run_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(name: str, own: Any) -> Any:
        def on_a_gpu(*given: Any, **named: Any) -> Any:
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

        return on_a_gpu

    install(monkeypatch, modeling_qwen3_5, ALL, made)
    monkeypatch.setattr(trained_policy, "_faults", {})
    random_hf(trained_policy.AutoConfig.for_model("qwen3_5_text", **DENSE), 0)
