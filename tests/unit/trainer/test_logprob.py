from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrl.common.device_lease import LOGIT_BYTES, logits_at_once
from meshrl.trainer.model import logprob
from meshrl.trainer.model.logprob import linear_logprob


def whole(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    found = log_p.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
    return found, -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("chunk_elements", [1, 53 * 4, 1 << 25])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("several", [(), (3,)])
def test_chunks_equal_the_whole_in_value_and_gradient(
    temperature: float, chunk_elements: int, softcap: float | None, several: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(19, 12, requires_grad=True)
    weight = torch.randn(53, 12, requires_grad=True)
    targets = torch.randint(0, 53, (19, *several))  # the same token twice, too
    mix, of_entropies = torch.randn(19, *several), torch.randn(19)
    gradients = []
    for function in (whole, linear_logprob):
        kwargs: dict[str, Any] = {"temperature": temperature, "softcap": softcap}
        if function is linear_logprob:
            kwargs["chunk_elements"] = chunk_elements
        logprobs, entropies = function(hidden, weight, targets, **kwargs)
        loss = (mix * logprobs).sum() + (of_entropies * entropies).sum()
        gradients.append((logprobs, entropies, *torch.autograd.grad(loss, (hidden, weight))))
    for mine, full in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, full, rtol=1e-5, atol=1e-5)


def test_gradients_pass_the_finite_difference_check_when_only_one_output_is_used() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    targets = torch.randint(0, 7, (5,))
    for index in (0, 1):
        mine = linear_logprob(hidden, weight, targets)[index].sum()
        full = whole(hidden, weight, targets, 1.0)[index].sum()
        for a, b in zip(
            torch.autograd.grad(mine, (hidden, weight)),
            torch.autograd.grad(full, (hidden, weight)),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Watches every operation, backward passes included, for the largest tensor that one returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors)])
        return found


def test_the_logits_never_exist_whole() -> None:
    hidden = torch.randn(64, 2, requires_grad=True)
    weight = torch.randn(50, 2, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64)
    with Largest() as largest:
        logprobs, entropies = linear_logprob(hidden, weight, targets, chunk_elements=200)
        (logprobs.sum() + entropies.sum()).backward()
    assert largest.numel == 200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    hidden, weight = (torch.randn(n, 8, dtype=dtype, requires_grad=True) for n in (11, 50))
    targets = torch.randint(0, 50, (11,))
    found = []
    for function, each in ((whole, torch.Tensor.float), (linear_logprob, lambda tensor: tensor)):
        logprobs, entropies = function(each(hidden), each(weight), targets, temperature=0.7)
        assert logprobs.dtype == torch.float32
        loss = logprobs.sum() + 0.5 * entropies.sum()
        found.append((logprobs, entropies, *torch.autograd.grad(loss, (hidden, weight))))
    for mine, full in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, full, rtol=3e-2, atol=3e-2)


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    hidden = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    logprobs, _ = linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        return func(*args, **(kwargs or {}))


def test_a_frozen_embedding_gets_no_gradient_and_its_product_is_not_computed() -> None:
    hidden, weight = torch.randn(6, 4), torch.randn(11, 4)
    targets = torch.randint(0, 11, (6,))
    products, gradients = [], []
    for frozen in (False, True):
        states = hidden.clone().requires_grad_()
        logprobs, _ = linear_logprob(states, weight.clone().requires_grad_(not frozen), targets)
        with Products() as counted:
            logprobs.sum().backward()
        products.append(counted.count)
        gradients.append(states.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert products == [3, 2]  # the logits again, and one gradient instead of two


@pytest.mark.parametrize(
    ("gib", "power"), [(0, 25), (8, 25), (24, 26), (48, 27), (80, 28), (141, 28)]
)
def test_more_logits_are_held_at_once_where_there_is_more_memory(gib: int, power: int) -> None:
    assert logits_at_once(gib << 30) == 1 << power
    assert gib < 8 or LOGIT_BYTES << power <= (gib << 30) // 20


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The functions that CUDA compiles, on this CPU as they stand."""
    monkeypatch.setattr(logprob, "COMPILED_ON", {"cpu"})
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    logprob._compiled.cache_clear()
    yield
    logprob._compiled.cache_clear()


def found(
    device: str,
    dtype: torch.dtype = torch.float32,
    size: tuple[int, int, int] = (19, 12, 53),
    several: tuple[int, ...] = (),
    used: str = "both",
    frozen: bool = False,
    **kwargs: Any,
) -> list[torch.Tensor]:
    """Log-probs, entropies and gradients of one pass; the same tensors at each call."""
    torch.manual_seed(3)
    n, width, vocabulary = size
    hidden = torch.randn(n, width).to(device, dtype).requires_grad_()
    weight = torch.randn(vocabulary, width).to(device, dtype).requires_grad_(not frozen)
    targets = torch.randint(0, vocabulary, (n, *several)).to(device)
    if several:
        targets[0] = targets[0, 0]  # the same token several times
    mix, of_entropies = torch.randn(n, *several).to(device), torch.randn(n).to(device)
    logprobs, entropies = linear_logprob(hidden, weight, targets, **kwargs)
    of_logprobs, of_both = (mix * logprobs).sum(), (of_entropies * entropies).sum()
    loss = {"logprobs": of_logprobs, "entropies": of_both, "both": of_logprobs + of_both}[used]
    wanted = (hidden,) if frozen else (hidden, weight)
    return [logprobs.detach(), entropies.detach(), *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize(
    "how",
    [
        *({"temperature": temperature} for temperature in (1.0, 0.7, 1.6)),
        {"softcap": 2.0, "temperature": 0.7},
        *({"used": used} for used in ("logprobs", "entropies")),
        *({"several": (3,), "used": used} for used in ("logprobs", "entropies", "both")),
        {"several": (3,), "softcap": 2.0},
        {"several": (1,)},
        {"frozen": True},
        {"dtype": torch.bfloat16, "temperature": 0.7},
        {"dtype": torch.float16, "several": (3,), "softcap": 2.0},
    ],
)
def test_what_cuda_compiles_equals_the_operations_one_by_one(
    how: dict[str, Any], uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = found("cpu", chunk_elements=53 * 4, **how)
    monkeypatch.setattr(logprob, "COMPILED_ON", set())
    eager = found("cpu", chunk_elements=53 * 4, **how)
    exact = how.get("dtype", torch.float32) == torch.float32
    for mine, other in zip(fused, eager, strict=True):
        tolerance = 1e-5 if exact or mine.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_a_sure_token_keeps_its_small_gradient_in_half_precision(uncompiled: None) -> None:
    """1 - p, not 1 in bfloat16 less p in bfloat16; the row sums to 0 because p sums to 1."""
    logits = torch.tensor([[8.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    targets, ones = torch.tensor([[0]]), torch.ones(1, 1)
    grad = logprob.gradient(logits, targets, ones, None, torch.zeros(1), 1.0, None).float()
    probs = logits.double().softmax(-1)
    torch.testing.assert_close(grad[0, 0].double(), 1 - probs[0, 0], rtol=1e-2, atol=0)
    assert abs(grad.sum()) < 1e-2 * grad[0, 0]


def test_where_nothing_can_be_compiled_one_line_says_so_and_the_numbers_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eager = found("cpu", chunk_elements=53 * 4)

    def failing(function: Any, dynamic: bool) -> Any:
        def first_call(*_: Any) -> Any:
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

        return first_call

    monkeypatch.setattr(logprob, "COMPILED_ON", {"cpu"})
    monkeypatch.setattr(torch, "compile", failing)
    logprob._compiled.cache_clear()
    with caplog.at_level(logging.WARNING):
        fallen = found("cpu", chunk_elements=53 * 4)
    logprob._compiled.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "log-probs are computed slower: torch.compile failed: RuntimeError: Failed to find C compiler."
    ]
    assert all(map(torch.equal, fallen, eager))


def test_a_single_token_is_compiled_for_once_however_its_gradient_lies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, compile_ = CompileCounter(), torch.compile
    monkeypatch.setattr(logprob, "COMPILED_ON", {"cpu"})
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic: compile_(function, backend=compiled)
    )
    logprob._compiled.cache_clear()
    hidden, weight = torch.randn(1, 4).requires_grad_(), torch.randn(11, 4)
    for of_each in (torch.ones(1), torch.ones(()).expand(1)):  # as the gradient of a sum lies
        logprobs, entropies = linear_logprob(hidden, weight, torch.zeros(1, dtype=torch.int64))
        torch.autograd.backward((logprobs, entropies), (of_each, of_each))
    logprob._compiled.cache_clear()
    assert compiled.frame_count == 2  # `statistics` and `gradient`


@pytest.mark.parametrize("name", ["statistics", "gradient"])
def test_a_device_without_memory_is_no_failed_compilation(
    name: str, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(logprob, name, full)
    with pytest.raises(torch.OutOfMemoryError):
        found("cpu")
    assert "cpu" in logprob.COMPILED_ON


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants an NVIDIA GPU")
@pytest.mark.filterwarnings("default")  # Triton and inductor warn of much
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.7, "softcap": 20.0},
        {"several": (5,)},
        {"several": (5,), "used": "entropies"},
        {"frozen": True, "used": "logprobs"},
    ],
)
def test_compiled_on_a_gpu_equals_the_operations_one_by_one(
    dtype: torch.dtype, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()  # else the cases together are more graphs than it keeps of one function
    how = {"dtype": dtype, "size": (300, 64, 5_003), "chunk_elements": 128 * 5_003, **how}
    fused, again = found("cuda", **how), found("cuda", **how)
    assert "cuda" in logprob.COMPILED_ON, "it was not compiled"
    assert all(map(torch.equal, fused, again))
    monkeypatch.setattr(logprob, "COMPILED_ON", set())
    for mine, other in zip(fused, found("cuda", **how), strict=True):
        tolerance = 1e-4 if mine.dtype == torch.float32 else 1e-2
        assert (mine - other).float().norm() <= tolerance * other.float().norm()
