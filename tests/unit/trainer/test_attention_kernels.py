"""Installed FlashAttention packages, played by modules that compute the same on a CPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from meshrl.trainer.model import attention, attention_kernels, packing
from meshrl.trainer.model.attention import Scores
from meshrl.trainer.model.packing import pack


def flash_attn_varlen_func(  # type: ignore[no-untyped-def]  # the package's first arguments, and its names
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    """FlashAttention 2.8, row by row: the last query of a row sees all its keys."""
    assert causal and dropout_p == softcap == 0.0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (cu_seqlens_q[-1], cu_seqlens_k[-1]) == (len(q), len(k)) and len(k) == len(v)
    places, found = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)], []
    for start, end, first, last in zip(
        *(part for of in places for part in (of[:-1], of[1:])), strict=True
    ):
        assert 0 < end - start <= max_seqlen_q and end - start <= last - first <= max_seqlen_k
        age = torch.arange(first - last + end - start, end - start)
        age = torch.arange(end - start)[:, None] - age
        seen = (age >= 0) & (age <= (window_size[0] if window_size[0] >= 0 else last))
        one = [x.transpose(0, 1) for x in (q[start:end], k[first:last], v[first:last])]
        out = F.scaled_dot_product_attention(
            one[0], one[1], one[2], attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        found.append(out.transpose(0, 1))
    return torch.cat(found)


def flash_attention_2(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):  # type: ignore[no-untyped-def]
    """As torch's `varlen_attn` is called."""
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        **{"softmax_scale": scale, "causal": True, "window_size": window_size},
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(name: str, **content: Any) -> None:
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]  # `find_spec` reads it
        for key, value in content.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)

    return install


@pytest.mark.parametrize("shared", [4, 0], ids=["prefix", "nothing shared"])
@pytest.mark.parametrize("window", [None, 3])
def test_the_package_of_flash_attention_2_takes_a_pack_as_rectangles_do(
    installed: Any, window: int | None, shared: int
) -> None:
    installed("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    attend = attention_kernels.of_package()
    assert attend is not None
    torch.manual_seed(0)
    beginning = np.arange(shared, dtype=np.int32)  # laid once; the pack has rows in another order
    rows = [np.concatenate([beginning, np.full(n, n, np.int32)]) for n in (5, 2, 4)]
    layout = pack(rows, [4, 4, 4]).layout
    tokens = layout.rows.queries
    query, (key, value) = torch.randn(1, 4, tokens, 8), torch.randn(2, 1, 2, tokens, 8)
    scores = Scores(scaling=0.3, window=window, softcap=None, sinks=None)
    found = attention._end_to_end(attend, query, key, value, layout, scores)
    torch.testing.assert_close(found, attention._attend(query, key, value, layout, scores))


@pytest.mark.parametrize("folded", [True, False])
def test_long_rows_are_taken_one_by_one_and_those_between_them_together(
    monkeypatch: pytest.MonkeyPatch, folded: bool
) -> None:
    alone: list[int] = []

    def attend_row(q: Any, k: Any, v: Any, scale: float | None) -> torch.Tensor:
        alone.append(len(q))
        return attention_kernels.attend_row(q, k, v, scale)

    for module in (packing, attention):
        monkeypatch.setattr(module, "LONG_ROW", 20)
    monkeypatch.setattr(attention, "takes_long_rows", lambda query, key: True)
    monkeypatch.setattr(attention, "attend_row", attend_row)
    # On a CPU torch's own takes the place of cuDNN's.
    monkeypatch.setattr(attention_kernels, "sdpa_kernel", lambda backend: nullcontext())
    torch.manual_seed(0)
    beginning = np.arange(4 if folded else 0, dtype=np.int32)
    lengths = (5, 2, 33, 21, 7, 20)
    rows = [np.concatenate([beginning, np.full(n, n, np.int32)]) for n in lengths]
    layout = pack(rows, [1] * len(rows)).layout
    tokens = len(layout.order)
    query = torch.randn(1, 4, tokens, 8, requires_grad=True)
    key, value = torch.randn(2, 1, 2, tokens, 8)
    scores = Scores(scaling=0.3, window=None, softcap=None, sinks=None)
    found = attention._end_to_end(flash_attention_2, query, key, value, layout, scores)
    wanted = attention._attend(query, key, value, layout, scores)
    assert sorted(alone) == [n + len(beginning) for n in (20, 21, 33)]
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(found)
    gradients = [torch.autograd.grad((x * weight).sum(), query)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients)
    assert not attention_kernels.takes_long_rows(query[..., :3], key)  # a size that cuDNN has not


def test_the_trial_of_cudnn_is_no_part_of_the_forward_that_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_kernels, "sdpa_kernel", lambda backend: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query = torch.ones(4, 2, 8, dtype=torch.float64, requires_grad=True)

    def forward(query: torch.Tensor) -> torch.Tensor:
        assert attention_kernels.takes_long_rows(query, query)
        return attention_kernels.attend_row(query, query, query, None)

    attention_kernels._cudnn_works.cache_clear()
    checkpoint(forward, query, use_reentrant=False).sum().backward()
    attention_kernels._cudnn_works.cache_clear()


def test_a_package_that_is_not_there_or_was_built_for_another_torch_is_not_used(
    installed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert attention_kernels.of_package() is None  # not installed here
    installed("flash_attn")
    assert attention_kernels.of_package() is None
    assert "flash_attn is installed and cannot be used" in caplog.text


def test_torch_gets_flash_attention_3_on_hopper_where_it_is_installed(
    installed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[str] = []
    attention_of_torch = SimpleNamespace(activate_flash_attention_impl=given.append)
    use = attention_kernels.use_flash_attention_3
    assert not use(9, attention_of_torch)
    installed("flash_attn_interface")
    assert not use(8, attention_of_torch)
    assert not use(9, SimpleNamespace())  # torch 2.10
    assert given == []
    assert use(9, attention_of_torch)
    assert given == ["FA3"]
    # This torch's own: the package must bring kernels.
    assert not use(9)
    assert "flash_attn_interface is installed and cannot be used" in caplog.text
