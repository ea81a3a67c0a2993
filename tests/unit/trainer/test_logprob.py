from __future__ import annotations

import pytest
import torch

from meshrl.trainer.logprob import linear_logprob


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = ((hidden @ weight.T) / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("chunk_elements", [1, 53 * 4, 1 << 25])
def test_chunks_equal_the_whole_in_value_and_gradient(
    temperature: float, chunk_elements: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(19, 12, requires_grad=True)
    weight = torch.randn(53, 12, requires_grad=True)
    targets = torch.randint(0, 53, (19,))
    mix = torch.randn(2, 19)
    gradients = []
    for function in (whole, linear_logprob):
        kwargs = {"temperature": temperature}
        if function is linear_logprob:
            kwargs["chunk_elements"] = chunk_elements
        logprobs, entropies = function(hidden, weight, targets, **kwargs)
        loss = (mix[0] * logprobs).sum() + (mix[1] * entropies).sum()
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


def test_the_log_softmax_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshrl.trainer import logprob

    largest = 0
    real = logprob._log_softmax

    def watched(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
        nonlocal largest
        logits = real(hidden, weight, temperature)
        largest = max(largest, logits.numel())
        return logits

    monkeypatch.setattr(logprob, "_log_softmax", watched)
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    logprobs, _ = linear_logprob(
        hidden, weight, torch.zeros(64, dtype=torch.int64), chunk_elements=200
    )
    logprobs.sum().backward()
    assert largest == 200


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    hidden = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    logprobs, _ = linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()
